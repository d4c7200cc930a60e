"""Attention of the training-time test: causal over step-0 keys, plus one key a later step.

At step k, row t sees the step-0 keys of its document up to t and one key at row t from each step
1..k: a causal block and k diagonals, drawn here for three rows at step 2 (columns: step-0 keys,
step-1 keys, step-2 keys):

    x . .   x . .   x . .
    x x .   . x .   . x .
    x x x   . . x   . . x

The block runs through a flash kernel, the diagonals are elementwise, and the two are merged by
their log-sum-exp. The backward hands the flash kernel the *merged* output and the *merged*
log-sum-exp: its probabilities are then those of the whole row, and so is the row sum of
grad * output that it subtracts. Left to autograd the merge would need the kernel's gradient of the
log-sum-exp, which flash kernels ignore.

Shapes: R rows that ask, T packed rows of keys, H heads, Hkv key heads, G = H / Hkv, Dh width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from models.runs import Runs


@dataclass(frozen=True)
class Attended:
    output: Tensor  # [R, H, Dh]
    lse: Tensor  # [R, H] log-sum-exp of the scaled scores, fp32 or wider


@dataclass(frozen=True)
class Gradients:
    query: Tensor  # [R, H, Dh]
    key: Tensor  # [T, Hkv, Dh]
    value: Tensor  # [T, Hkv, Dh]


@dataclass(frozen=True)
class Question:
    """What a kernel is asked: query [R, H, Dh] in ``runs`` over key and value [T, Hkv, Dh]."""

    query: Tensor
    key: Tensor
    value: Tensor
    runs: Runs

    def __post_init__(self) -> None:
        for states in (self.query, self.key, self.value):
            assert states.stride(-1) == 1, "kernels read heads as they lie in memory"

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1])


@dataclass(frozen=True)
class Kernel:
    """Causal attention of runs. ``backward`` takes the output and lse of the whole row."""

    name: str
    forward: Callable[[Question], Attended]
    backward: Callable[[Question, Attended, Tensor], Gradients]


@dataclass(frozen=True)
class Diagonal:
    """The keys of one later step: each row that asks sees one of its N rows.

    ``rows`` [R] says which; None: they are the rows that ask. The rows are gathered inside the
    attention, so that a step keeps no copy of the keys of those before it.
    """

    key: Tensor  # [N, Hkv, Dh]
    value: Tensor  # [N, Hkv, Dh]
    rows: Tensor | None = None

    def kept(self, rows: Tensor) -> "Diagonal":
        """For those among the rows that ask which go on asking."""
        return Diagonal(self.key, self.value, rows if self.rows is None else self.rows[rows])

    def at(self, states: Tensor) -> Tensor:
        """[N, ...] -> [R, ...]."""
        return states if self.rows is None else states[self.rows]

    def back(self, grad: Tensor) -> Tensor:
        """Gradient of what ``at`` gave [R, ...] -> [N, ...]."""
        if self.rows is None:
            return grad
        return grad.new_zeros(len(self.key), *grad.shape[1:]).index_copy_(0, self.rows, grad)


def attend(
    query: Tensor,
    base: tuple[Tensor, Tensor],
    runs: Runs,
    diagonals: list[Diagonal],
    kernel: Kernel,
) -> Tensor:
    """query [R, H, Dh], base: step-0 key and value [T, Hkv, Dh] -> [R, H, Dh]."""
    own = [states for diagonal in diagonals for states in (diagonal.key, diagonal.value)]
    seen = Seen(runs, [diagonal.rows for diagonal in diagonals], kernel)
    return _Attention.apply(query, *base, seen, *own)


@dataclass(frozen=True)
class Seen:
    """What gets no gradient: the runs, the rows of each diagonal, and the kernel of the block."""

    runs: Runs
    rows: list[Tensor | None]
    kernel: Kernel


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, seen, *own):
        asked = Question(query, key, value, seen.runs)
        block = seen.kernel.forward(asked)
        diagonals = diagonals_of(own, seen.rows)
        grouped = by_group(query, key)  # [R, Hkv, G, Dh]
        scores = [dot(grouped, d.at(d.key))[..., 0].flatten(1) * asked.scale for d in diagonals]
        whole = merge(block, scores, diagonals)
        ctx.save_for_backward(query, key, value, whole.output, whole.lse, *scores, *own)
        ctx.seen = seen
        return whole.output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, output, lse, *rest = ctx.saved_tensors
        asked, whole = Question(query, key, value, ctx.seen.runs), Attended(output, lse)
        grads = ctx.seen.kernel.backward(asked, whole, grad)
        scores, own = rest[: len(ctx.seen.rows)], rest[len(ctx.seen.rows) :]
        grouped, grouped_grad = by_group(query, key), by_group(grad, key)
        grad_query = by_group(grads.query, key)
        share = dot(grouped_grad, by_group(output, key))  # [R, Hkv, G, 1]
        grad_own = []
        for score, diagonal in zip(scores, diagonals_of(own, ctx.seen.rows), strict=True):
            weight = (score - lse).exp().view_as(share)
            inner = weight * (dot(grouped_grad, diagonal.at(diagonal.value)) - share) * asked.scale
            weight, inner = weight.to(grad.dtype), inner.to(grad.dtype)
            grad_query.addcmul_(inner, diagonal.at(diagonal.key)[:, :, None])
            grad_own.append(diagonal.back((inner * grouped).sum(2)))
            grad_own.append(diagonal.back((weight * grouped_grad).sum(2)))
        return grads.query, grads.key, grads.value, None, *grad_own


def diagonals_of(own: Sequence[Tensor], rows: list[Tensor | None]) -> list[Diagonal]:
    """``own``: key and value of each step, in turn."""
    return [Diagonal(*three) for three in zip(own[::2], own[1::2], rows, strict=True)]


def by_group(states: Tensor, key: Tensor) -> Tensor:
    """[R, H, Dh] -> [R, Hkv, G, Dh]: the heads that share a key head side by side."""
    return states.unflatten(1, (key.shape[1], -1))


def dot(grouped: Tensor, other: Tensor) -> Tensor:
    """[R, Hkv, G, Dh] times [R, Hkv, Dh] or [R, Hkv, G, Dh] -> [R, Hkv, G, 1], fp32 or wider."""
    other = other[:, :, None] if other.dim() == 3 else other
    wide = torch.promote_types(grouped.dtype, torch.float32)
    return torch.linalg.vecdot(grouped.to(wide), other.to(wide))[..., None]


def merge(block: Attended, scores: list[Tensor], diagonals: list[Diagonal]) -> Attended:
    """The block and one more key a later step -> what softmax over all of them gives."""
    if not scores:
        return block
    lse = torch.stack([block.lse, *scores]).logsumexp(0)  # [R, H]
    output = block.output * (block.lse - lse).exp()[..., None]
    grouped = by_group(output, diagonals[0].value)
    for score, diagonal in zip(scores, diagonals, strict=True):
        weight = (score - lse).exp().view(*grouped.shape[:3], 1)
        grouped.addcmul_(weight, diagonal.at(diagonal.value)[:, :, None].to(weight.dtype))
    return Attended(output.to(block.output.dtype), lse)
