"""What engines make of a folder that cannot run here: frozen from their source, defaults included.

Each function returns the head that the engine would run, as a DraftConfig, from config.json and
the names of the tensors. Written from the engines' own reading, not from what export writes.
"""

from dataclasses import dataclass
from typing import Any

from models.eagle3 import DraftConfig

HF_ROPE_BASE = 10000.0  # where a config names none


@dataclass(frozen=True)
class Head:
    """What an engine runs: the head, and the tensors that it found no use for."""

    draft: DraftConfig
    ignored: list[str]


def sizes(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {
        "rope_type": (config.get("rope_scaling") or {}).get("rope_type", "default"),
        "rope_theta": config.get("rope_theta", HF_ROPE_BASE),
        **(config.get("rope_scaling") or {}),
    }
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_positions": config.get("max_position_embeddings", 2048),
        "rope": rope,
        "layers": config["num_hidden_layers"],
    }


def sglang(config: dict[str, Any], names: list[str], layers: int) -> Head:
    """The 2025 revision's spelling, the 2026 revision's flags: a head must please both."""
    outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    fc_norm = bool(config.get("fc_norm", config.get("use_aux_norm", False)))
    known = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"}
    ignored = [
        name
        for name in names
        if name not in known
        and not name.startswith("midlayer.")
        and not (fc_norm and name.startswith("fc_norm."))
    ]
    draft = DraftConfig(
        **sizes(config),
        draft_vocab_size=config["draft_vocab_size"] or config["vocab_size"],
        aux_layers=[m + 1 for m in outputs] if outputs else [2, layers // 2, layers - 3],
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=fc_norm,
        norm_output=bool(config.get("norm_output", False)),
    )
    ignored += [n for n in names if n.endswith(("q_norm.weight", "k_norm.weight"))]
    return Head(draft, ignored)


def tensorrt_llm(config: dict[str, Any], names: list[str], captured: list[int]) -> Head:
    """``captured`` comes from the serving option, not from the checkpoint."""
    eagle = config.get("eagle_config", {})
    fc_norm = bool(config.get("fc_norm", False))
    draft = DraftConfig(
        **sizes(config),
        draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
        aux_layers=[m + 1 for m in captured],
        norm_before_residual=False,
        norm_before_fc=bool(eagle.get("norm_before_fc", False)) and not fc_norm,
        fc_norm=fc_norm,
        norm_output=bool(config.get("norm_output") or eagle.get("return_hidden_post_norm", False)),
    )
    ignored = [n for n in names if n.endswith(("q_norm.weight", "k_norm.weight"))]
    if draft.layers > 1:  # a list of modules, midlayer.0 and so on
        ignored += [n for n in names if n.startswith("layers.")]
    return Head(draft, ignored)


def llamacpp(config: dict[str, Any], names: list[str], layers: int) -> Head:
    """The converter's reading; it ends with an error for a tensor that it has no place for."""
    assert "draft_vocab_size" in config
    if config["num_hidden_layers"] != 1:
        raise ValueError("one layer is wanted")
    places = (
        "fc.",
        "norm.",
        "lm_head.",
        "d2t",
        "t2d",
        "midlayer.",
        "layers.0.",
        "input_norm.",
        "embed_tokens.",
    )
    unknown = [name for name in names if not name.startswith(places)]
    unknown += [n for n in names if n.endswith(("q_norm.weight", "k_norm.weight"))]
    if unknown:
        raise ValueError(f"Can not map tensor {unknown[0]!r}")
    ids = config.get("eagle_aux_hidden_state_layer_ids", [2, layers // 2, layers - 3])
    if len(ids) != 3:
        raise ValueError("three layers are wanted")
    draft = DraftConfig(
        **sizes(config),
        draft_vocab_size=config["draft_vocab_size"],
        aux_layers=ids,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        fc_norm=False,
        norm_output=False,
    )
    return Head(draft, [])
