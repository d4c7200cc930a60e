"""Runs: the rows that ask in attention, as stretches of consecutive rows of one document each."""

from dataclasses import dataclass, field

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

    A run asks the prefix of its document that ends with its own last row. Prefixes of one
    document overlap, so the keys are gathered (``keys`` None: they lie as needed already).
    """

    query_ends: Tensor  # [N+1] int32, cumulative
    key_ends: Tensor  # [N+1] int32, cumulative
    longest_query: int
    longest_key: int
    keys: Tensor | None  # [sum of prefix lengths] int64, packed row of each key


@dataclass(frozen=True)
class Runs:
    """All rows that ask at one step, in order."""

    runs: list[Run]
    cached: list[Sequences] = field(default_factory=list, compare=False)  # made once, on the device

    @classmethod
    def of(cls, rows: Tensor, starts: Tensor) -> "Runs":
        """rows [R] int64 ascending, packed; starts [B+1] of the documents -> their runs. CPU."""
        if not len(rows):
            return cls([])
        documents = torch.searchsorted(starts, rows, right=True) - 1
        breaks = (rows.diff() != 1) | (documents.diff() != 0)
        edges = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
        firsts = rows[edges[:-1]].tolist()
        begins = starts[documents[edges[:-1]]].tolist()
        bounds = zip(edges[:-1], edges[1:], firsts, begins, strict=True)
        return cls([Run(*bound) for bound in bounds])

    def sequences(self, device: torch.device, rows: int) -> Sequences:
        """For ``rows`` packed rows of keys; the index tensors are made at the first call."""
        if not self.cached:
            self.cached.append(self._sequences(device, rows))
        return self.cached[0]

    def _sequences(self, device: torch.device, rows: int) -> Sequences:
        spans = [(run.document, run.own.stop) for run in self.runs]
        lengths = [end - begin for begin, end in spans]
        keys = torch.cat([torch.arange(begin, end) for begin, end in spans])
        in_place = torch.equal(keys, torch.arange(rows))
        queries = [run.end - run.start for run in self.runs]

        def cumulative(values: list[int]) -> Tensor:
            ends = torch.tensor([0, *values]).cumsum(0)
            return ends.to(device, torch.int32, non_blocking=True)

        return Sequences(
            query_ends=cumulative(queries),
            key_ends=cumulative(lengths),
            longest_query=max(queries),
            longest_key=max(lengths),
            keys=None if in_place else keys.to(device, non_blocking=True),
        )
