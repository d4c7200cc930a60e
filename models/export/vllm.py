"""The plain EAGLE-3 layout of vLLM, the one that most engines share. Read in vLLM 0.32.0."""

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from conf.schema import ExportFormat
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.export.layout import PLAIN_KEYS, PLAIN_SETTING, Layout, Setting

LLAMA, QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"


def layer_config(draft: DraftConfig) -> dict[str, Any]:
    """The decoder layers, every key that the library's config class knows for them."""
    rope = dict(draft.rope)
    kind = rope.setdefault("rope_type", "default")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    window = {"use_sliding_window": False, "sliding_window": None} if draft.qk_norm else {}
    return {
        "model_type": "qwen3" if draft.qk_norm else "llama",
        "num_hidden_layers": draft.layers,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "vocab_size": draft.vocab_size,
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # the older spelling of the same table
        "rope_scaling": None if kind == "default" else scaling,
        "num_aux_hidden_states": len(draft.aux_layers),
        **window,
    }


def plain_config(draft: DraftConfig, setting: Setting) -> dict[str, Any]:
    """Every key of config.json, the ones that equal a default too: defaults differ by engine."""
    return {
        "architectures": [QWEN3 if draft.qk_norm else LLAMA],
        "torch_dtype": setting.dtype,
        **layer_config(draft),
        "logit_scale": 1.0,
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.hidden_size,
        "eagle_aux_hidden_state_layer_ids": draft.aux_layers,
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "fc_norm": draft.fc_norm,
        "norm_output": draft.norm_output,
        "eagle_config": {
            # SGLang reads this list alone and counts layer outputs: stream n leaves layer n-1
            "eagle_aux_hidden_state_layer_ids": [n - 1 for n in draft.aux_layers],
            "use_aux_hidden_state": True,
            "norm_before_fc": draft.norm_before_fc,
        },
        "bos_token_id": setting.bos,
        "eos_token_id": setting.eos,
    }


def nothing_refused(_draft: DraftConfig) -> Iterator[str]:
    yield from ()


def serve(card: CardFacts, _draft: DraftConfig, folder: Path) -> list[str]:
    speculative = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": card.serve_n}
    return [
        f"vllm serve {quote(card.served_verifier)} "
        f"--speculative-config {quote(json.dumps(speculative))}"
    ]


VLLM = Layout(
    ExportFormat.vllm,
    "vLLM",
    PLAIN_KEYS,
    PLAIN_SETTING,
    plain_config,
    nothing_refused,
    serve,
)
