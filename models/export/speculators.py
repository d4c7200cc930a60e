"""The layout of the speculators library, which vLLM serves by itself. Read in 0.9.0, vLLM 0.32.0.

The folder names its verifier, so ``vllm serve FOLDER`` is the whole command. vLLM applies no class
defaults to ``transformer_layer_config`` and drops every other key at top level. It shares an
embedding that equals the verifier's; without one in the file the library means to take the
verifier's, and computes with memory as it happens to be (seen in 0.9.0 on transformers 5.19).
"""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from conf.schema import ExportFormat
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.export.layout import NORM_FLAGS, NUMBERED, PLAIN_KEYS, Layout, Setting
from models.export.vllm import layer_config

ARCHITECTURE = "Eagle3DraftModel"
LAYER_CONFIG, SPECULATION = "transformer_layer_config", "speculators_config"
AT_TOP = {"draft_vocab_size", "aux_layers", *NORM_FLAGS}
KEYS = {
    name: key if name in AT_TOP else f"{LAYER_CONFIG}.{key}" for name, key in PLAIN_KEYS.items()
}
SETTING_KEYS = {
    "dtype": "dtype",
    "bos": f"{LAYER_CONFIG}.bos_token_id",
    "eos": f"{LAYER_CONFIG}.eos_token_id",
    "verifier": f"{SPECULATION}.verifier.name_or_path",
    "verifier_architectures": f"{SPECULATION}.verifier.architectures",
    "draft_tokens": f"{SPECULATION}.proposal_methods.0.speculative_tokens",
}


def config_for(draft: DraftConfig, setting: Setting) -> dict[str, Any]:
    tokens = {"bos_token_id": setting.bos, "eos_token_id": setting.eos}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": setting.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": setting.dtype,
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.hidden_size,
        "eagle_aux_hidden_state_layer_ids": draft.aux_layers,
        # written out: vLLM takes true where it is absent, the library false
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        SPECULATION: {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": setting.verifier,
                "architectures": setting.verifier_architectures,
            },
        },
        LAYER_CONFIG: {**layer_config(draft), **tokens},
    }


def refusals(draft: DraftConfig) -> Iterator[str]:
    if draft.norm_before_fc and draft.fc_norm:
        yield "norm_before_fc and fc_norm are both true, and speculators takes one of them"


def serve(_card: CardFacts, _draft: DraftConfig, folder: Path) -> list[str]:
    return [f"vllm serve {quote(str(folder))}"]


SPECULATORS = Layout(
    ExportFormat.speculators,
    "speculators",
    KEYS,
    SETTING_KEYS,
    config_for,
    refusals,
    serve,
    layer=NUMBERED,
    both_spellings=False,
    last_stream=False,
    embedding=True,
)
