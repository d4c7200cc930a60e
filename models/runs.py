"""Runs: the rows that ask in attention, as stretches of consecutive rows of one document each."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Queries start..end-1 of the gathered rows; the first of them sits at packed row ``first``."""

    start: int
    end: int
    first: int
    document: int  # packed row at which its document begins

    @property
    def own(self) -> slice:
        """The keys of the run's own rows: row i of the run sees the first i+1 of them."""
        return slice(self.first, self.first + self.end - self.start)

    @property
    def before(self) -> slice:
        """The keys of its document before the run: every row of the run sees them all."""
        return slice(self.document, self.first)


@dataclass(frozen=True)
class Sequences:
    """Runs for kernels that take sequences of varying length, causal from the bottom right.

    A run asks the prefix of its document that ends with its own last row. Prefixes of one document
    overlap, and the last rows of a document ask nothing, so the keys are gathered.
    """

    query_ends: Tensor  # [N+1] int32, cumulative
    key_ends: Tensor  # [N+1] int32, cumulative
    keys: Tensor  # [sum of prefix lengths] int64, packed row of each key
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, runs: list[Run]) -> "Sequences":
        spans = [torch.arange(run.document, run.own.stop) for run in runs]
        queries, keys = [run.end - run.start for run in runs], [len(span) for span in spans]
        return cls(
            query_ends=torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
            key_ends=torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
            keys=torch.cat([torch.zeros(0, dtype=torch.int64), *spans]),
            longest_query=max(queries, default=0),
            longest_key=max(keys, default=0),
        )


@dataclass(frozen=True)
class Runs:
    """All rows that ask at one step, in order, in both shapes that kernels take."""

    runs: list[Run]
    sequences: Sequences

    @classmethod
    def of(cls, rows: Tensor, starts: Tensor) -> "Runs":
        """rows [R] int64 ascending, packed; starts [B+1] of the documents. CPU."""
        if not len(rows):
            return cls([], Sequences.of([]))
        begins = torch.zeros(int(starts[-1]) + 1, dtype=torch.bool)
        begins[starts] = True
        breaks = (rows.diff() != 1) | begins[rows[1:]]
        edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
        firsts = rows[edges[:-1]]
        documents = starts[torch.searchsorted(starts, firsts, right=True) - 1]
        bounds = zip(edges[:-1], edges[1:], firsts.tolist(), documents.tolist(), strict=True)
        runs = [Run(*bound) for bound in bounds]
        return cls(runs, Sequences.of(runs))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Runs":
        return replace(self, sequences=with_moved(self.sequences, move))


def with_moved(item: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A dataclass with ``move`` applied to the tensors among its fields: to a device, into pinned
    memory."""
    values = {part.name: getattr(item, part.name) for part in fields(item)}
    return replace(item, **{k: move(v) for k, v in values.items() if isinstance(v, Tensor)})
