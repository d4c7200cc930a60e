"""The sizes of a draft's Llama layers, by what a verifier's config says of its own layers."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

MLP_FACTOR = 4  # times the width: an MLP where the verifier has no dense one to copy
EPS = 1e-6  # where the verifier's norms have none of their own, OLMo's for one
COUNTS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class LayerShape:
    """A dense Llama layer as wide as the verifier."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    @classmethod
    def of(cls, text: PreTrainedConfig, rope: dict[str, Any]) -> "LayerShape":
        """``text``: the config of the language model; ``rope``: the table that the draft takes."""
        head_dim = head_dim_of(text, rope)
        heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
        if latent(text):  # its heads are not stored: as many as the width holds
            heads = kv_heads = max(1, text.hidden_size // head_dim)
        return cls(
            intermediate_size=inner_size_of(text),
            num_heads=heads,
            num_kv_heads=kv_heads or heads,
            head_dim=head_dim,
            rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or EPS),
        )


def latent(text: PreTrainedConfig) -> bool:
    """Multi-head latent attention (DeepSeek-V3, Kimi K2): keys and values share a small vector."""
    return getattr(text, "kv_lora_rank", None) is not None


def head_dim_of(text: PreTrainedConfig, rope: dict[str, Any]) -> int:
    """An explicit width wins, for it may differ from hidden / heads.

    Latent attention calls the rotated part of a head head_dim; the value's width is that of a
    plain head. longrope has a factor a rotated pair: where fewer than half a head's channels are
    pairs (Phi-4-mini), the draft's heads are as wide as the rotated part, which is all it rotates.
    """
    if rope.get("rope_type") == "longrope":
        return 2 * len(rope["long_factor"])
    if latent(text):
        return text.v_head_dim
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def inner_size_of(text: PreTrainedConfig) -> int:
    """The width of the MLP: the verifier's dense one, or four times the width where it has none.

    Mixtures that name moe_intermediate_size (Qwen3-MoE, DeepSeek-V3) keep intermediate_size for
    dense layers; in others (gpt-oss, Mixtral) it is that of one expert, far from a layer's work.
    """
    inner = getattr(text, "intermediate_size", None)
    inner = max(inner) if isinstance(inner, list) else inner  # one a layer
    experts = max(getattr(text, name, None) or 0 for name in COUNTS_OF_EXPERTS)
    expert_alone = experts > 1 and getattr(text, "moe_intermediate_size", None) is None
    return MLP_FACTOR * text.hidden_size if inner is None or expert_alone else inner
