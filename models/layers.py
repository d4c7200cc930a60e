"""The parts of the draft's decoder layer, named as EAGLE-3 files name them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import Memory
from models.rope import Rope, Rotary


class DraftAttention(nn.Module):
    """Grouped-query attention over [embedding ; state], 2D wide in and D wide out."""

    def __init__(self, width: int, heads: int, kv_heads: int, rope: Rope):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, rope.head_dim
        self.q_proj = nn.Linear(2 * width, heads * rope.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_heads * rope.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_heads * rope.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * rope.head_dim, width, bias=False)
        self.rotary = Rotary(rope)

    def forward(self, states: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """states [B, T, 2D], positions [B, T] -> [B, T, D]."""
        batch, rows, _ = states.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, rows, heads, self.head_dim).transpose(1, 2)

        query = self.rotary.rotate(split(self.q_proj(states), self.heads), positions)
        key = self.rotary.rotate(split(self.k_proj(states), self.kv_heads), positions)
        value = split(self.v_proj(states), self.kv_heads)
        output = memory.attend(query, key, value)  # [B, H, T, Dh]
        return self.o_proj(output.transpose(1, 2).reshape(batch, rows, -1))


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class MidLayer(nn.Module):
    """The draft's one decoder layer: it reads the token's embedding beside the state."""

    def __init__(self, attention: DraftAttention, mlp: GatedMLP, norms: list[nn.RMSNorm]):
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, memory: Memory, normed: bool
    ) -> Tensor:
        """embedded, hidden [B, T, D] -> [B, T, D]; ``normed``: the residual is the normed state."""
        state = self.hidden_norm(hidden)
        residual = state if normed else hidden
        both = torch.cat((self.input_layernorm(embedded), state), dim=-1)  # [B, T, 2D]
        residual = residual + self.self_attn(both, positions, memory)
        return residual + self.mlp(self.post_attention_layernorm(residual))
