"""Rotary positions of the draft: the verifier's own table, computed by the library."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.schema import ConfigError

# Tables that do not depend on the length of the text; longrope's is once it is ``settled``.
STATIC_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
FULL = "full_attention"  # the library's word for a layer that sees all earlier tokens
# Keys of a verifier's table that the draft's has not: a Llama layer rotates its whole heads, and
# of text alone the three positions of mrope are one; "type" is an older spelling of "rope_type".
NOT_OF_LLAMA = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")
MSCALES = ("short_mscale", "long_mscale")  # vLLM's keys for longrope; the library has one for both


@dataclass(frozen=True)
class Rope:
    """What defines a rotary table: the head width, the position limit and the rope parameters."""

    head_dim: int
    max_positions: int
    parameters: dict[str, Any]


def table_for_llama(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The table of a verifier's rope parameters that a draft takes over; None: it has several.

    Gemma 3 and OLMo 3 have one for layers with a sliding window and one for layers without. The
    draft's layer sees all earlier tokens, in training and in every engine: it takes the latter's.
    """
    nested = {name: table for name, table in parameters.items() if isinstance(table, dict)}
    if nested and FULL not in nested:
        return None
    table = nested.get(FULL, parameters)
    kept = {key: value for key, value in table.items() if key not in NOT_OF_LLAMA}
    return {"rope_type": table.get("type", "default")} | kept


def settled(rope: Rope) -> dict[str, Any]:
    """The rope parameters of one table for every length up to the position limit.

    longrope has two: the library takes the long factors once a text passes the original limit,
    vLLM once its longest text may. A draft whose limit lies above the original one takes the long
    factors throughout, as vLLM does by default, another the short ones. Written in both places,
    with the scale spelled out, the choice is the same in every engine and at every length.
    """
    parameters = dict(rope.parameters)
    if parameters.get("rope_type") != "longrope":
        return parameters
    long = rope.max_positions > parameters["original_max_position_embeddings"]
    factors = parameters["long_factor" if long else "short_factor"]
    scale = parameters.get(MSCALES[long]) or Rotary(rope).scaling  # Phi-3.5-MoE has its own
    both = {"short_factor": list(factors), "long_factor": list(factors)}
    return parameters | both | dict.fromkeys(("attention_factor", *MSCALES), scale)


def settle_longrope(model: nn.Module, max_positions: int) -> None:
    """Let a verifier use one of longrope's two tables for all texts, as ``settled`` has it.

    The library chooses by the longest text of a batch, so that states would depend on what else
    is in it, and a cached answer that passes the limit would mix keys of both tables.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            rotary: Any = module
            compute = ROPE_INIT_FUNCTIONS["longrope"]
            table, _ = compute(rotary.config, rotary.inv_freq.device, seq_len=max_positions)
            for kept in (rotary.inv_freq, rotary.original_inv_freq):
                kept.copy_(table)
            rotary.long_inv_freq = table


class Rotary:
    """Rotates queries and keys. Not a module: a cast of the model must not round its table."""

    def __init__(self, rope: Rope):
        kind = rope.parameters.get("rope_type", "default")
        if kind not in STATIC_TYPES:
            raise ConfigError(
                f"verifier rope_type={kind}: not supported by the draft; "
                f"supported are {', '.join(STATIC_TYPES)}"
            )
        config = LlamaConfig(
            hidden_size=rope.head_dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=rope.head_dim,
            max_position_embeddings=rope.max_positions,
            rope_parameters={k: v for k, v in rope.parameters.items() if k not in MSCALES},
        )
        with torch.device("cpu"):
            table = LlamaRotaryEmbedding(config)
            self.inverse_frequencies = table.inv_freq  # [Dh/2] fp32
            self.scaling = float(table.attention_scaling)
            if kind == "longrope":  # the library's table for texts as long as the limit
                compute = ROPE_INIT_FUNCTIONS[kind]
                self.inverse_frequencies, _ = compute(config, seq_len=rope.max_positions)

    def at(self, positions: Tensor, dtype: torch.dtype) -> "Rotation":
        """positions [...] -> the rotation of rows that sit there; angles in fp32."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions[..., None, None].float() * self.inverse_frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return Rotation(cos.to(dtype), sin.to(dtype))


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine [..., 1, Dh/2] of one position a row."""

    cos: Tensor
    sin: Tensor

    def rotate(self, states: Tensor) -> Tensor:
        """states [..., H, Dh] -> the same, rotated."""
        return _Rotate.apply(states, self.cos, self.sin)


class _Rotate(torch.autograd.Function):
    """Four writes in place of the nine that autograd makes; back is the inverse rotation."""

    @staticmethod
    def forward(ctx, states, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(states, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, -sin), None, None


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of the last dimension by its angle."""
    output = torch.empty_like(states, memory_format=torch.contiguous_format)
    first, second = states.chunk(2, dim=-1)
    out_first, out_second = output.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return output
