"""Rotary positions of the draft: the verifier's own table, computed by the library."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """states [B, H, T, Dh] at positions [B, T] -> the same, rotated; angles in fp32."""
        if self.inverse_frequencies.device != states.device:
            self.inverse_frequencies = self.inverse_frequencies.to(states.device)
        angles = positions[:, None, :, None].float() * self.inverse_frequencies
        cos = (angles.cos() * self.scaling).to(states.dtype)
        sin = (angles.sin() * self.scaling).to(states.dtype)
        first, second = states.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
