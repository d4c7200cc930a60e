"""The distillation loss: how far the draft's guesses are from the verifier's distributions.

One fused function over all steps: guesses are taken in chunks, sorted by the position they predict;
a chunk's teacher is computed once a target, its draft logits live inside the chunk, and their
gradient is made in the same pass. Nothing of size guesses x vocabulary is kept.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from conf.schema import LossKind
from data.chains import Chains
from data.records import TTTBatch
from models.verifier import scaled_logits
from train.grade import NONE, Looked, Teacher, grade

CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}  # of a chunk: 32 MB in fp32 on a CPU
ETA = 3.0  # of mix: how fast the agreement takes the weight from KL; the paper's for EAGLE-3


class Guesser(Protocol):
    """What the loss reads of a draft: its rows, and which of the verifier's tokens they are."""

    @property
    def lm_head(self) -> nn.Linear: ...  # [Vd, D]
    @property
    def t2d(self) -> Tensor: ...  # [V] bool
    def to_target_ids(self, draft_ids: Tensor) -> Tensor: ...
    def to_draft_ids(self, target_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Guesses:
    """What became of the P supervised guesses, in the order of Chains.targets_of."""

    loss: Tensor  # [] weighted sum
    losses: Tensor  # [P] fp32, unweighted, no gradient
    hits: Tensor  # [P] bool: the draft's argmax is the verifier's over the full vocabulary


class Distillation:
    """Holds the verifier's head rows of the draft vocabulary; frozen, outside the optimizer."""

    def __init__(self, kind: LossKind, head: Tensor, config: PreTrainedConfig):
        self.kind = kind
        self.head = head  # [Vd, D]
        self.config = config
        self.grade = grade

    def __call__(
        self,
        draft: Guesser,
        batch: TTTBatch,
        steps: list[Tensor],
        weights: Tensor,
        first: Guesses | None = None,
    ) -> Guesses:
        """steps K x [R, D], what the head reads; weights [P] of the guesses' losses.

        ``first``: what ``look`` said of them by tv, where that is known; mix reads it.
        """
        shares = NONE
        if self.kind is LossKind.mix:
            first = first or self.look(LossKind.tv, draft, batch, steps)
            shares = kl_shares(1 - first.losses, batch.chains)
        known = Fused(self, draft, batch, weights, shares, torch.is_grad_enabled())
        return Guesses(*_ChunkedLoss.apply(known, draft.lm_head.weight, *steps))

    @torch.no_grad()
    def look(self, kind: LossKind, draft: Guesser, batch: TTTBatch, steps: list[Tensor]) -> Guesses:
        """The guesses by another kind of loss, ahead of the one that is trained: the head once
        more, which costs a third of the loss."""
        other = Distillation(kind, self.head, self.config)
        other.grade = self.grade
        return other(draft, batch, steps, self.head.new_zeros(len(batch.chains.targets_of)))

    def teacher(self, batch: TTTBatch, targets: Tensor, draft: Guesser) -> Teacher:
        """targets [M]: packed positions, at which the verifier's states give the distributions."""
        targets = targets if batch.asking is None else batch.asking[targets]
        ids = batch.argmax[targets]
        if self.kind is LossKind.ce:
            return Teacher(ids, draft_ids=draft.to_draft_ids(ids), inside=draft.t2d[ids])
        last = batch.last[targets].to(self.head.dtype)  # [M, D]
        logits = scaled_logits(product(last, self.head.T), self.config)
        whole = batch.lse[targets].to(logits.dtype)  # over the verifier's vocabulary
        if self.kind in (LossKind.tv, LossKind.lk):
            return Teacher(ids, logits.sub_(whole[:, None]).exp_())
        probs = logits.softmax(-1)
        lse = logits.amax(-1) - probs.amax(-1).log()
        negentropy = torch.linalg.vecdot(probs, logits) - lse
        mass = (lse - whole).exp() if self.kind is LossKind.mix else NONE
        return Teacher(ids, probs, negentropy, mass)


def kl_shares(overlaps: Tensor, chains: Chains) -> Tensor:
    """overlaps [P] -> [P] what KL weighs in the mix of each guess, the same at one depth.

    exp(-eta * alpha), alpha the mean overlap of a depth's guesses in the batch, not differentiated
    (2602.23881, section 4.2): the more of a depth is accepted, the more counts the overlap itself.
    """
    totals = overlaps.new_zeros(2, len(chains.counts))
    figures = torch.stack((overlaps, torch.ones_like(overlaps)))
    sums, counts = totals.index_add_(1, chains.depths, figures)
    return torch.exp(-ETA * sums / counts.clamp_min(1))[chains.depths]


@dataclass(frozen=True)
class Fused:
    """What the fused function reads beside the states: nothing here gets a gradient."""

    distillation: Distillation
    draft: Guesser
    batch: TTTBatch
    weights: Tensor  # [P]
    shares: Tensor  # [P] of mix
    trained: bool


@dataclass(frozen=True)
class Chunk:
    targets: slice
    guesses: slice
    even: bool  # every target has equally many guesses


def chunks_of(chains: Chains, most: int) -> Iterator[Chunk]:
    """Whole targets, as many as have ``most`` guesses together, one at least."""
    first = 0
    while first + 1 < len(chains.ends):
        end = max(first + 1, bisect_right(chains.ends, chains.ends[first] + most) - 1)
        most_of_one = chains.ends[first + 1] - chains.ends[first]  # they fall along the targets
        even = chains.ends[end] - chains.ends[end - 1] == most_of_one
        yield Chunk(slice(first, end), slice(chains.ends[first], chains.ends[end]), even)
        first = end


class _ChunkedLoss(torch.autograd.Function):
    """Gradients of the states overwrite the gathered states, chunk by chunk."""

    @staticmethod
    def forward(ctx, known, head, *steps):
        chains, draft = known.batch.chains, known.draft
        states = steps[0].new_empty(len(chains.targets_of), head.shape[1])  # [P, D]
        for step, normed in zip(chains.steps, steps, strict=True):
            emitted = normed if step.emits is None else normed[step.emits]
            states.index_copy_(0, step.slots, emitted)
        wide = torch.promote_types(head.dtype, torch.float32)
        losses = states.new_empty(len(states), dtype=wide)
        hits = torch.empty_like(losses, dtype=torch.bool)
        trains_head = known.trained and ctx.needs_input_grad[1]
        of_head = torch.zeros_like(head, dtype=wide) if trains_head else None
        chunks = list(chunks_of(chains, CHUNK_LOGITS[states.device.type] // len(head)))
        room = Room.of(chunks, head, wide)
        for chunk in chunks:
            rows, weights = states[chunk.guesses], known.weights[chunk.guesses, None]
            teacher = known.distillation.teacher(known.batch, chains.targets[chunk.targets], draft)
            if not chunk.even:
                teacher = teacher.repeated(chains.targets_of[chunk.guesses] - chunk.targets.start)
            found = room.look(rows, head, len(teacher.ids))
            if known.shares is not NONE:
                shares = known.shares[chunk.guesses].view(found.best.shape)
                found = replace(found, shares=shares)
            right = draft.to_target_ids(found.best) == teacher.ids[:, None]
            hits[chunk.guesses] = right.flatten()
            graded = known.distillation.grade(known.distillation.kind, found, teacher)
            losses[chunk.guesses] = graded.losses.flatten()
            if not known.trained:
                continue
            of_logits = graded.of_logits.view(-1, len(head)).to(head.dtype)
            if of_head is not None:
                add_product(of_head, of_logits.T, (rows * weights).to(head.dtype))
            torch.mm(of_logits, head, out=rows).mul_(weights)
        ctx.save_for_backward(states, None if of_head is None else of_head.to(head.dtype))
        ctx.chains = chains
        ctx.mark_non_differentiable(losses, hits)
        return (losses * known.weights).sum(), losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        states, of_head = ctx.saved_tensors
        of_steps = []
        for step in ctx.chains.steps:
            of_step = states[step.slots].mul_(grad)
            if step.emits is not None:
                whole = of_step.new_zeros(len(step.rows), of_step.shape[1])
                of_step = whole.index_copy_(0, step.emits, of_step)
            of_steps.append(of_step)
        return None, None if of_head is None else of_head * grad, *of_steps


@dataclass(frozen=True)
class Room:
    """Logits and probabilities of the largest chunk, used by all in turn.

    Memory that is new each time costs a page fault per 4 kB, a tenth of a CPU's step.
    """

    logits: Tensor  # [P, Vd]
    probs: Tensor  # [P, Vd]

    @classmethod
    def of(cls, chunks: list[Chunk], head: Tensor, dtype: torch.dtype) -> "Room":
        most = max((c.guesses.stop - c.guesses.start for c in chunks), default=0)
        shape = (most, len(head))
        return cls(head.new_empty(shape, dtype=dtype), head.new_empty(shape, dtype=dtype))

    def look(self, rows: Tensor, head: Tensor, targets: int) -> Looked:
        """rows [P, D] on ``head`` [Vd, D]; overwrites the chunk before."""
        logits, probs = self.logits[: len(rows)], self.probs[: len(rows)]
        product(rows, head.T, logits)
        torch.softmax(logits, -1, out=probs)
        shape = (targets, -1, len(head))
        return Looked(logits.view(shape), probs.view(shape), logits.argmax(-1).view(targets, -1))


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right in fp32 at least: softmax and its gradient need it. The CPU's product rounds to
    bf16 first, CUDA's does not."""
    if out is None:
        wide = torch.promote_types(left.dtype, torch.float32)
        out = left.new_empty(len(left), right.shape[1], dtype=wide)
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return out.copy_(left @ right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one product where dtypes agree."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(product(left, right))
