"""TensorRT-LLM's EAGLE-3 head in the layout that ModelOpt exports. Read in source; not run.

The layers to capture are a serving option there, not a field: the command names them. A draft of
several layers is a list called ``midlayer`` (modeling_speculative.py), each with a ``hidden_norm``.
"""

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from conf.schema import ExportFormat
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.export.layout import NUMBERED, PLAIN_KEYS, PLAIN_SETTING, Layout, Setting
from models.export.vllm import plain_config


def config_for(draft: DraftConfig, setting: Setting) -> dict[str, Any]:
    config = plain_config(draft, setting)
    config["eagle_config"] |= {
        "next_layer_regular": True,
        "eh_proj_before_attn": False,
        "return_hidden_post_norm": draft.norm_output,
    }
    return config


def refusals(draft: DraftConfig) -> Iterator[str]:
    if draft.norm_before_residual:
        yield "norm_before_residual is true, and TensorRT-LLM's residual is always the raw state"
    if draft.norm_before_fc and draft.fc_norm:
        yield "norm_before_fc and fc_norm are both true, and TensorRT-LLM applies fc_norm alone"
    if draft.qk_norm:
        yield "qk_norm is true, and TensorRT-LLM's draft layer has no norm of query and key"
    if draft.layers > 1:
        yield (
            f"layers={draft.layers}: TensorRT-LLM has several layers as midlayer.0, midlayer.1 and "
            "so on, where ours are layers.0, layers.1"
        )


def serve(card: CardFacts, draft: DraftConfig, folder: Path) -> list[str]:
    """A file of options, where layers are counted by their outputs, and the server."""
    options = [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {card.serve_n}",
        f"  speculative_model: {folder}",
        f"  eagle3_layers_to_capture: {[n - 1 for n in draft.aux_layers]}",
    ]
    return [
        "cat > eagle3.yaml <<'END'",
        *options,
        "END",
        f"trtllm-serve {quote(card.served_verifier)} --config eagle3.yaml",
    ]


TRTLLM = Layout(
    ExportFormat.trtllm,
    "TensorRT-LLM",
    PLAIN_KEYS,
    PLAIN_SETTING,
    config_for,
    refusals,
    serve,
    layer=NUMBERED,
    offsets="I32",
    membership=False,
)
