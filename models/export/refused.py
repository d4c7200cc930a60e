"""Heads that are published and cannot be run here, each told by its config.json."""

import json
from collections.abc import Iterator
from typing import Any

LLAMA_LAYERS = "give an EAGLE-3 head of Llama layers"
# The library's names of layers that compute what a draft here does, biases apart.
LAYERS = ("llama", "mistral", "qwen2", "qwen3")  # qwen3 norms query and key, too
QUANTISED = ("quantization_config", "compression_config")
PARALLEL = ("parallel_drafting", "pard_token", "ptd_token_id", "mask_token_id")


def refusals(top: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    """Why this head is none of ours, a sentence each. ``layer``: the part on the decoder layer."""
    yield from other_kinds(top, layer)
    yield from other_sizes(top, layer)
    yield from other_steps(layer, layer.get("eagle_config") or {})
    for key in QUANTISED:
        if top.get(key) or layer.get(key):
            yield f"{key}: the head is quantised, which is not read; give the one before"


def other_kinds(top: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    names = json.dumps(top.get("architectures") or [])
    kind = top.get("speculators_model_type", "eagle3")
    model = layer.get("model_type", "llama")
    if "medusa" in f"{names}{model}".lower() or "medusa_num_heads" in layer:
        yield f"architectures={names}: a Medusa head; {LLAMA_LAYERS}"
    elif '"Eagle' in names and "Eagle3" not in names:
        yield f"architectures={names}: an EAGLE-1 head; {LLAMA_LAYERS}"
    elif kind != "eagle3":
        yield f"speculators_model_type={kind}: not eagle3; {LLAMA_LAYERS}"
    elif model not in LAYERS:
        yield f"model_type={model}: its layer is none of {', '.join(LAYERS)}; {LLAMA_LAYERS}"
    for key in PARALLEL:
        if any(part.get(key) is not None and part[key] is not False for part in (layer, top)):
            yield f"{key}: a head for parallel drafting, which fills places with mask_hidden; " + (
                "give one that drafts token by token"
            )


def other_sizes(top: dict[str, Any], layer: dict[str, Any]) -> Iterator[str]:
    width = layer.get("hidden_size")
    target = layer.get("target_hidden_size", top.get("target_hidden_size"))
    if target not in (None, width):
        yield (
            f"target_hidden_size={target}: differs from hidden_size={width}, and a draft here is "
            "as wide as its verifier; give such a head"
        )


def other_steps(layer: dict[str, Any], eagle: dict[str, Any]) -> Iterator[str]:
    """What would be computed otherwise than our draft does."""
    act, scale = layer.get("hidden_act", "silu"), layer.get("logit_scale")
    windows = "sliding_attention" in (layer.get("layer_types") or [])
    if windows or (layer.get("use_sliding_window") and layer.get("sliding_window")):
        yield (
            f"sliding_window={layer.get('sliding_window')}: the layer sees a window of the text, "
            "and a draft here sees all of it; give a head with full attention"
        )
    if act != "silu":
        yield f"hidden_act={act}: must be silu; {LLAMA_LAYERS}"
    if scale not in (None, 1):
        yield f"logit_scale={scale}: must be 1, logits are not scaled here; {LLAMA_LAYERS}"
    if eagle.get("use_aux_hidden_state") is False:
        yield "eagle_config.use_aux_hidden_state=false: reads no states inside; " + LLAMA_LAYERS
    if eagle.get("next_layer_regular") is False or eagle.get("eh_proj_before_attn"):
        yield "eagle_config: its layer is not EAGLE-3's; " + LLAMA_LAYERS
