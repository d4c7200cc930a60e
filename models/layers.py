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
        self.head_dim = rope.head_dim
        self.q_proj = nn.Linear(2 * width, heads * rope.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, kv_heads * rope.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, kv_heads * rope.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * rope.head_dim, width, bias=False)
        self.rotary = Rotary(rope)

    def split(self, projected: Tensor) -> Tensor:
        """[B, T, H*Dh] -> [B, H, T, Dh]."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_of(self, states: Tensor, positions: Tensor) -> Tensor:
        return self.rotary.rotate(self.split(self.k_proj(states)), positions)

    def remember(self, states: Tensor, positions: Tensor, memory: Memory) -> None:
        """Give keys and values of ``states`` [B, T, 2D] to ``memory``, and compute nothing else."""
        memory.remember(self.keys_of(states, positions), self.split(self.v_proj(states)))

    def forward(self, states: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """states [B, T, 2D], positions [B, T] -> [B, T, D]."""
        query = self.rotary.rotate(self.split(self.q_proj(states)), positions)
        key, value = self.keys_of(states, positions), self.split(self.v_proj(states))
        output = memory.attend(query, key, value)  # [B, H, T, Dh]
        return self.o_proj(output.transpose(1, 2).flatten(2))


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

    def pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded, hidden [B, T, D] -> [B, T, 2D], the embedding first, each normed."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, memory: Memory, normed: bool
    ) -> Tensor:
        """embedded, hidden [B, T, D] -> [B, T, D]; ``normed``: the residual is the normed state."""
        both = self.pair(embedded, hidden)
        residual = both[..., hidden.shape[-1] :] if normed else hidden
        residual = residual + self.self_attn(both, positions, memory)
        return residual + self.mlp(self.post_attention_layernorm(residual))
