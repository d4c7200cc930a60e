"""The parts of the draft's decoder layers, named as EAGLE-3 files name them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.marks import part
from models.memory import Memory
from models.rope import Rope, Rotary, Rotation


class StreamNorm(nn.RMSNorm):
    """RMSNorm in the precision of what comes in, whatever that of the weights is.

    An unroll keeps its residual stream in fp32 while the weights are bf16: seven steps of rounding
    to bf16 would cost more than all the products do.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class DraftAttention(nn.Module):
    """Grouped-query attention over [embedding ; state], 2D wide in and D wide out.

    A matrix on the pair is a sum of two: the token's share does not change while the state is
    unrolled, so ``share_of`` gives it apart and an unroll computes it once for all steps.
    Without ``pair`` it reads the state alone, D wide: there is no share, which is None throughout.

    With an epsilon ``norm_eps``, each head of query and key is normed before it is rotated, as in
    Qwen3: one weight [Dh] for all heads. A norm needs the whole sum, so a share stays unnormed.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        rope: Rope,
        norm_eps: float | None = None,
        pair: bool = True,
    ):
        super().__init__()
        self.width, self.pair = width, pair
        self.head_dim = rope.head_dim
        self.sizes = [heads * rope.head_dim, kv_heads * rope.head_dim, kv_heads * rope.head_dim]
        read = 2 * width if pair else width
        self.q_proj = nn.Linear(read, self.sizes[0], bias=False)
        self.k_proj = nn.Linear(read, self.sizes[1], bias=False)
        self.v_proj = nn.Linear(read, self.sizes[2], bias=False)
        self.o_proj = nn.Linear(self.sizes[0], width, bias=False)

        def norm() -> nn.Module:
            return nn.Identity() if norm_eps is None else StreamNorm(self.head_dim, eps=norm_eps)

        self.q_norm, self.k_norm = norm(), norm()
        self.rotary = Rotary(rope)

    def share_of(self, embedded: Tensor, asks: bool) -> Tensor:
        """[..., D] -> [..., (H + 2 Hkv) * Dh]: what tokens add to query, key and value.

        Rows that do not ask need no query: [..., 2 Hkv * Dh].
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)[0 if asks else 1 :]
        return torch.cat([F.linear(embedded, p.weight[:, : self.width]) for p in projections], -1)

    def add_state(self, share: Tensor | None, states: Tensor, projection: nn.Linear) -> Tensor:
        """The token's share and that of the state [..., D] -> [..., heads, Dh]."""
        projected = F.linear(states, projection.weight[:, -self.width :])
        projected = projected if share is None else share + projected
        return projected.unflatten(-1, (-1, self.head_dim))

    def remember(
        self, share: Tensor | None, states: Tensor, rotation: Rotation, memory: Memory
    ) -> None:
        """Give keys and values of rows to ``memory``, and compute nothing else."""
        shares = None if share is None else share[..., -2 * self.sizes[1] :].chunk(2, dim=-1)
        of_key, of_value = shares or (None, None)
        key = self.k_norm(self.add_state(of_key, states, self.k_proj))
        value = self.add_state(of_value, states, self.v_proj)
        memory.remember(rotation.rotate(key), value)

    def forward(
        self, share: Tensor | None, states: Tensor, rotation: Rotation, memory: Memory
    ) -> Tensor:
        """Rows that ``memory`` knows ask: share [..., (H + 2 Hkv) * Dh], states -> [..., D]."""
        of_query = None if share is None else share[..., : self.sizes[0]]
        query = self.q_norm(self.add_state(of_query, states, self.q_proj))
        output = memory.attend(rotation.rotate(query))  # [..., H, Dh]
        return self.o_proj(output.flatten(-2))


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        gate, up = self.gate_proj(states), self.up_proj(states)
        return _GatedDown.apply(gate, up, self.down_proj.weight)


class _GatedDown(torch.autograd.Function):
    """down(silu(gate) * up), keeping gate and up alone: autograd keeps two products more."""

    @staticmethod
    def forward(ctx, gate, up, weight):
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up, weight = ctx.saved_tensors
        active = F.silu(gate)
        inner = grad @ weight  # [..., inner], of the product
        product = active * up
        of_weight = grad.flatten(0, -2).T @ product.flatten(0, -2)
        of_gate = torch.ops.aten.silu_backward(torch.mul(inner, up, out=product), gate)
        return of_gate, inner.mul_(active), of_weight


class DraftLayer(nn.Module):
    """A decoder layer of the draft. The first reads the token's embedding beside the state.

    Later ones read the state alone: Llama's layer, as vLLM (llama_eagle3.py) and speculators
    (eagle3/core.py) have it. Their share is None, and ``input_layernorm`` is that of the state.
    """

    def __init__(
        self,
        attention: DraftAttention,
        mlp: GatedMLP,
        norms: list[nn.RMSNorm],
        normed: bool = False,
    ):
        """norms: of the embedding in the first layer, of the state, before the MLP. ``normed``:
        the residual is the normed state."""
        super().__init__()
        if attention.pair:
            self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        else:
            self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = attention
        self.mlp = mlp
        self.normed = normed

    @property
    def state_norm(self) -> nn.RMSNorm:
        return self.hidden_norm if self.self_attn.pair else self.input_layernorm

    @property
    def dtype(self) -> torch.dtype:
        """Of the products; the residual stream may be wider."""
        return self.self_attn.k_proj.weight.dtype

    def share_of(self, embedded: Tensor, asks: bool) -> Tensor:
        """Embeddings [..., D] -> their share of query, key and value, for all steps."""
        return self.self_attn.share_of(self.input_layernorm(embedded), asks)

    def remember(
        self, share: Tensor | None, hidden: Tensor, positions: Tensor, memory: Memory
    ) -> None:
        """Rows whose output nobody asks for: they give ``memory`` their keys, and cost no more."""
        with part("keys"):
            rotation = self.self_attn.rotary.at(positions, self.dtype)
            states = self.state_norm(hidden).to(self.dtype)
            self.self_attn.remember(share, states, rotation, memory)

    def forward(
        self, share: Tensor | None, hidden: Tensor, positions: Tensor, memory: Memory, known: bool
    ) -> Tensor:
        """share [..., (H + 2 Hkv) * Dh], hidden [..., D] -> [..., D].

        ``known``: ``memory`` has the keys of these rows already.
        """
        normed = self.state_norm(hidden)
        states = normed.to(self.dtype)
        rotation = self.self_attn.rotary.at(positions, self.dtype)
        if not known:
            self.self_attn.remember(share, states, rotation, memory)
        residual = normed if self.normed else hidden
        with part("attention"):
            residual = residual + self.self_attn(share, states, rotation, memory)
        with part("mlp"):
            return residual + self.mlp(self.post_attention_layernorm(residual).to(self.dtype))
