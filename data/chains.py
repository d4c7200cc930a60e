"""Chains: which rows of a pack are unrolled, how far, and what each of their guesses is worth.

A chain starts at row t of a document; step k guesses x[t+2+k] from x[t+1+k] (see train/ttt.py).
All of it follows from the loss mask, so it is worked out once a pack, on the CPU, ahead of the
step. A chain that will never again be supervised stops: rows of step k+1 are among those of step k.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.schema import Supervise
from models.runs import Runs, with_moved


@dataclass(frozen=True)
class ChainStep:
    """One step of all chains that are still needed: R rows."""

    kept: Tensor | None  # [R] which rows of the step before go on; None: all
    rows: Tensor  # [R] packed row t, ascending
    positions: Tensor  # [R] place of t in its document, plus k
    tokens: Tensor  # [R] place of packed row t+k among Chains.near
    emits: Tensor | None  # [E] rows of this step whose guess is supervised; None: all
    slots: Tensor  # [E] place of those guesses among Chains.targets_of
    runs: Runs


@dataclass(frozen=True)
class Chains:
    """K steps, and the P supervised guesses of all steps sorted by the position they predict.

    The target of row t at step k is position t+1+k, whose verifier state gives the distribution of
    x[t+2+k]. Guesses of one target lie side by side, so its teacher is computed once; targets with
    equally many guesses lie side by side, so nearly all of them form blocks of one size.
    """

    steps: list[ChainStep]
    near: Tensor  # [I] packed rows whose token some chain is fed
    targets: Tensor  # [M] packed positions that are predicted, those with most guesses first
    targets_of: Tensor  # [P] place of a guess's target in ``targets``
    depths: Tensor  # [P] step of a guess
    documents: Tensor  # [P] document of a guess
    roots: Tensor  # [B] guesses at depth 0 of each document, by which losses are normalised
    ends: list[int]  # [M+1] where the guesses of each target begin and end
    counts: list[int]  # [K] guesses by step
    whole: Runs  # of all packed rows

    @classmethod
    def of(cls, loss_mask: Tensor, starts: Tensor, depth: int, rule: Supervise) -> "Chains":
        """loss_mask [T] bool, starts [B+1] of the documents -> the chains of ``depth`` steps."""
        emits = supervised_rows(loss_mask, starts, depth, rule)  # [K, T]
        needed = emits.flip(0).cumsum(0).flip(0) > 0  # supervised at this step or a later one
        return cls.build(emits, needed, starts)

    @classmethod
    def of_answers(cls, loss_mask: Tensor, starts: Tensor) -> "Chains":
        """One step of the rows from which a decoding loop can ask; nothing is supervised."""
        asks = asking_rows(loss_mask, starts)
        return cls.build(torch.zeros_like(asks)[None], asks[None], starts)

    @classmethod
    def build(cls, emits: Tensor, needed: Tensor, starts: Tensor) -> "Chains":
        """emits, needed [K, T] bool: rows supervised at a step, and rows that it runs."""
        documents = document_of(starts) - 1
        rows = rows_of(needed)
        fed = [(step + k).clamp_max(needed.shape[1] - 1) for k, step in enumerate(rows)]
        supervised = emits.nonzero()  # [P, 2]: step, row; by step
        depths, places = supervised[:, 0], supervised[:, 1]
        targets, inverse = dense(places + 1 + depths)
        sizes = torch.bincount(inverse, minlength=len(targets))
        by_size = sizes.argsort(descending=True, stable=True)
        order = inverse_of(by_size)[inverse].argsort(stable=True)  # by target, then by step
        sizes, counts = sizes[by_size], emits.sum(1).tolist()
        near, tokens = dense(torch.cat(fed))
        tokens = tokens.split([len(step) for step in rows])
        slots = inverse_of(order).split(counts)
        return cls(
            steps=[
                step_of(k, rows, emits[k], slots[k], tokens[k], starts) for k in range(len(rows))
            ],
            near=near,
            targets=targets[by_size],
            targets_of=torch.repeat_interleave(torch.arange(len(targets)), sizes),
            depths=depths[order],
            documents=documents[places[order]],
            roots=torch.bincount(documents[places[depths == 0]], minlength=len(starts) - 1),
            ends=[0, *sizes.cumsum(0).tolist()],
            counts=counts,
            whole=Runs.of(torch.arange(needed.shape[1]), starts),
        )

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Chains":
        """The same with ``move`` applied to every tensor."""
        steps = [replace(with_moved(s, move), runs=s.runs.moved(move)) for s in self.steps]
        return replace(with_moved(self, move), steps=steps, whole=self.whole.moved(move))


def asking_rows(loss_mask: Tensor, starts: Tensor) -> Tensor:
    """loss_mask [T] bool, starts [B+1] -> [T] bool: the rows whose next token is supervised.

    The verifier's own distribution is of use at these alone: as a target, or (before an answer's
    first token) to see whether the answer is the verifier's.
    """
    documents = document_of(starts)
    return shifted(loss_mask, 1) & (shifted(documents, 1) == documents)


def rows_of(needed: Tensor) -> list[Tensor]:
    """needed [K, T] bool -> the rows of each step; one idle row where no chain is left.

    So every pack calls the same layers as often, and ranks that shard the weights (ZeRO-3) gather
    them in one order.
    """
    rows = [torch.zeros(1, dtype=torch.int64)]
    for step in needed:
        rows.append(step.nonzero().flatten() if step.any() else rows[-1][:1])
    return rows[1:]


def step_of(
    k: int, rows: list[Tensor], emits: Tensor, slots: Tensor, tokens: Tensor, starts: Tensor
) -> ChainStep:
    """Step ``k`` of chains that run ``rows`` [R] by step; ``emits`` [T] says which rows emit."""
    now, before = rows[k], rows[max(k - 1, 0)]
    emitting = emits[now].nonzero().flatten()
    firsts = starts[torch.searchsorted(starts, now, right=True) - 1]
    return ChainStep(
        kept=None if len(now) == len(before) else torch.searchsorted(before, now),
        rows=now,
        positions=now - firsts + k,
        tokens=tokens,
        emits=None if len(emitting) == len(now) else emitting,
        slots=slots,
        runs=Runs.of(now, starts),
    )


def dense(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [N] from 0 on -> the distinct ones, ascending, and the place of each value among them.

    ``unique`` would sort them, which takes ten times as long.
    """
    there = torch.bincount(values) > 0
    return there.nonzero().flatten(), (there.cumsum(0) - 1)[values]


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places


def document_of(starts: Tensor) -> Tensor:
    """starts [B+1] -> [T] number of each row's document, from 1, so that 0 is none."""
    return torch.repeat_interleave(torch.arange(1, len(starts)), starts.diff())


def shifted(values: Tensor, by: int) -> Tensor:
    """values [T] -> [T] with entry t holding values[t + by], and zero beyond the end."""
    result = torch.zeros_like(values)
    if by < len(values):
        result[: len(values) - by] = values[by:]
    return result


def supervised_rows(loss_mask: Tensor, starts: Tensor, depth: int, rule: Supervise) -> Tensor:
    """Which rows carry loss at which step: loss_mask [T] bool, starts [B+1] -> [K, T] bool.

    Labels of an answer [a, b) are x[a+1..b-1]: at serving the verifier gives x[a]. ``span``: rows
    a-1 <= t <= b-3-k, so that x[t+1..t+2+k] lie in one answer. ``any``: every row whose x[t+2+k]
    is a label. Nothing runs from one document into another.
    """
    document = document_of(starts)
    before = torch.cat([torch.zeros(1, dtype=torch.bool), loss_mask[:-1]])
    before[starts[:-1]] = False
    begins = loss_mask & ~before
    span = begins.cumsum(0) * loss_mask  # [T] number of the answer a token is in, 0 outside
    label = loss_mask & ~begins
    rows = []
    for k in range(depth):
        if rule is Supervise.span:
            first, end = shifted(span, 1), shifted(span, 2 + k)
            inside = shifted(document, 1) == document
            rows.append((end > 0) & (first == end) & inside)
        else:
            rows.append(shifted(label, 2 + k) & (shifted(document, 2 + k) == document))
    return torch.stack(rows)
