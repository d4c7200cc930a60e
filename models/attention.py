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
from collections.abc import Callable
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


def attend(
    query: Tensor, base: tuple[Tensor, Tensor], runs: Runs, own: list[Tensor], kernel: Kernel
) -> Tensor:
    """query [R, H, Dh], base: step-0 key and value [T, Hkv, Dh] -> [R, H, Dh].

    ``own``: key and value [R, Hkv, Dh] of each later step, in turn.
    """
    return _Attention.apply(query, *base, runs, kernel, *own)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, runs, kernel, *own):
        asked = Question(query, key, value, runs)
        block = kernel.forward(asked)
        grouped = by_group(query, key)  # [R, Hkv, G, Dh]
        scores = [dot(grouped, key)[..., 0].flatten(1) * asked.scale for key in own[::2]]
        whole = merge(block, scores, own[1::2])
        ctx.save_for_backward(query, key, value, whole.output, whole.lse, *scores, *own)
        ctx.runs, ctx.kernel, ctx.steps = runs, kernel, len(scores)
        return whole.output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, output, lse, *rest = ctx.saved_tensors
        asked, whole = Question(query, key, value, ctx.runs), Attended(output, lse)
        grads = ctx.kernel.backward(asked, whole, grad)
        scores, own = rest[: ctx.steps], rest[ctx.steps :]
        grouped, grouped_grad = by_group(query, key), by_group(grad, key)
        grad_query = by_group(grads.query, key)
        share = dot(grouped_grad, by_group(output, key))  # [R, Hkv, G, 1]
        grad_own = []
        for score, own_key, own_value in zip(scores, own[::2], own[1::2], strict=True):
            weight = (score - lse).exp().view_as(share)
            inner = weight * (dot(grouped_grad, own_value) - share) * asked.scale
            weight, inner = weight.to(grad.dtype), inner.to(grad.dtype)
            grad_query.addcmul_(inner, own_key[:, :, None])
            grad_own.append((inner * grouped).sum(2))
            grad_own.append((weight * grouped_grad).sum(2))
        return grads.query, grads.key, grads.value, None, None, *grad_own


def by_group(states: Tensor, key: Tensor) -> Tensor:
    """[R, H, Dh] -> [R, Hkv, G, Dh]: the heads that share a key head side by side."""
    return states.view(len(states), key.shape[1], -1, states.shape[-1])


def dot(grouped: Tensor, other: Tensor) -> Tensor:
    """[R, Hkv, G, Dh] times [R, Hkv, Dh] or [R, Hkv, G, Dh] -> [R, Hkv, G, 1], fp32 or wider."""
    other = other[:, :, None] if other.dim() == 3 else other
    wide = torch.promote_types(grouped.dtype, torch.float32)
    return torch.linalg.vecdot(grouped.to(wide), other.to(wide))[..., None]


def merge(block: Attended, scores: list[Tensor], values: tuple[Tensor, ...]) -> Attended:
    """The block and one more key a later step -> what softmax over all of them gives."""
    if not scores:
        return block
    lse = torch.stack([block.lse, *scores]).logsumexp(0)  # [R, H]
    output = block.output * (block.lse - lse).exp()[..., None]
    grouped = by_group(output, values[0])
    for score, value in zip(scores, values, strict=True):
        weight = (score - lse).exp().view(*grouped.shape[:3], 1)
        grouped.addcmul_(weight, value[:, :, None].to(weight.dtype))
    return Attended(output.to(block.output.dtype), lse)
