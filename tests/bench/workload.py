"""The one problem that every contender of the step benchmark solves: sizes, data and weights.

It loads in the peers' environments too, so it imports torch and the standard library alone.
B samples, T tokens, D width, A aux layers, V verifier vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5  # of every norm
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    batch: int = 4
    tokens: int = 512
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    mlp: int = 1536
    vocab: int = 49152
    draft_vocab: int = 8192
    aux: int = 3


TINY = Shape(
    batch=2,
    tokens=48,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=64,
    vocab=256,
    draft_vocab=64,
)


@dataclass(frozen=True)
class Case:
    share: int  # per cent of each sample's tokens that its answer holds
    depth: int  # K
    dtype: str = "float32"  # of weights and states


@dataclass(frozen=True)
class Workload:
    """Random verifier states, and weights of a draft that all contenders start from."""

    shape: Shape
    input_ids: Tensor  # [B, T] int64
    aux: Tensor  # [B, T, A*D]
    before_norm: Tensor  # [B, T, D] the verifier's last state before its final norm of weight 1
    last: Tensor  # [B, T, D] and after it
    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]
    members: Tensor  # [Vd] int64, ascending: the draft vocabulary
    draft: dict[str, Tensor]  # names as in EAGLE-3 files

    @property
    def t2d(self) -> Tensor:
        """[V] bool."""
        member = torch.zeros(self.shape.vocab, dtype=torch.bool)
        member[self.members] = True
        return member

    @property
    def d2t(self) -> Tensor:
        """[Vd] int64 offsets: target id minus draft id."""
        return self.members - torch.arange(len(self.members))

    def loss_mask(self, share: int) -> Tensor:
        """[B, T] bool: one answer at the end of each sample."""
        mask = torch.zeros(self.shape.batch, self.shape.tokens, dtype=torch.bool)
        mask[:, self.shape.tokens - answer_length(self.shape, share) :] = True
        return mask


def answer_length(shape: Shape, share: int) -> int:
    return max(2, round(shape.tokens * share / 100))


def make_workload(shape: Shape, seed: int) -> Workload:
    """The same numbers in every process with the same torch."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    rows = (shape.batch, shape.tokens)
    before = normal(*rows, shape.hidden)
    members = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
    # Members get the larger logits, so that nearly every argmax is in the draft vocabulary, as
    # with a vocabulary of frequent tokens. (A row whose argmax is outside has no loss in one peer.)
    head = normal(shape.vocab, shape.hidden) * (1.5 / shape.hidden**0.5)
    head[members] *= 2
    return Workload(
        shape=shape,
        input_ids=torch.randint(shape.vocab, rows, generator=generator),
        aux=normal(*rows, shape.aux * shape.hidden),
        before_norm=before,
        last=before * (before.square().mean(-1, keepdim=True) + EPS).rsqrt(),
        embedding=normal(shape.vocab, shape.hidden) * 0.1,
        head=head,
        members=members,
        draft=draft_weights(shape, generator) | {"lm_head.weight": head[members]},
    )


def draft_weights(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """A draft as training starts it: small random matrices, norms of weight 1."""
    width, queries = shape.hidden, shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    sizes = {
        "fc": (width, shape.aux * width),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (shape.mlp, width),
        "midlayer.mlp.up_proj": (shape.mlp, width),
        "midlayer.mlp.down_proj": (width, shape.mlp),
    }
    weights = {
        f"{name}.weight": torch.randn(*size, generator=generator) * 0.02
        for name, size in sizes.items()
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[f"{name}.weight"] = torch.ones(width)
    return weights
