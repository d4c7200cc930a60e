"""Rotary positions of the draft: the verifier's own table, computed by the library."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.schema import ConfigError

STATIC_TYPES = ("default", "linear", "llama3", "yarn")  # tables that do not depend on the length


@dataclass(frozen=True)
class Rope:
    """What defines a rotary table: the head width, the position limit and the rope parameters."""

    head_dim: int
    max_positions: int
    parameters: dict[str, Any]


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
            rope_parameters=dict(rope.parameters),
        )
        with torch.device("cpu"):
            table = LlamaRotaryEmbedding(config)
        self.inverse_frequencies = table.inv_freq  # [Dh/2] fp32
        self.scaling = float(table.attention_scaling)

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
