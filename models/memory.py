"""Memories: which keys a row of the draft sees, in training and in decoding; one a layer."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import Diagonal, Kernel, attend
from models.runs import Runs


class Memory(Protocol):
    """Keys seen so far; leading dimensions are [B, T] in decoding, packed rows in training."""

    def remember(self, key: Tensor, value: Tensor) -> None:
        """Take the keys and values [..., Hkv, Dh] of new rows."""
        ...

    def attend(self, query: Tensor) -> Tensor:
        """query [..., H, Dh] of the rows remembered last (or of some) -> [..., H, Dh]."""
        ...


class TTTMemory:
    """Keys of one step of the training-time test; ``following`` makes that of the next step.

    What the first one remembers, for all packed rows, is the base that every step sees; what that
    of a later step remembers, for the rows that ask then, its row alone sees. A step may be
    computed twice (activation checkpointing) and remembers the same again.
    """

    def __init__(self, kernel: Kernel, runs: Runs | None = None, first: bool = True):
        self.kernel = kernel
        self.runs = runs  # of the rows that ask; None: none do
        self.first = first
        self.base: tuple[Tensor, Tensor] | None = None
        self.earlier: list[Diagonal] = []  # of the steps between
        self.own: list[Diagonal] = []

    def remember(self, key: Tensor, value: Tensor) -> None:
        if self.first:
            self.base = (key, value)
        else:
            self.own = [Diagonal(key, value)]

    def attend(self, query: Tensor) -> Tensor:
        assert self.base is not None and self.runs is not None
        return attend(query, self.base, self.runs, [*self.earlier, *self.own], self.kernel)

    def following(self, runs: Runs, kept: Tensor | None) -> "TTTMemory":
        """The memory of the next step, whose rows are rows ``kept`` of this one; None: all."""
        memory = TTTMemory(self.kernel, runs, first=False)
        memory.base = self.base
        known = [*self.earlier, *self.own]
        memory.earlier = known if kept is None else [diagonal.kept(kept) for diagonal in known]
        return memory


class DraftCache:
    """Keys of decoding, a logical length a sequence: appended row by row, dropped by ``truncate``.

    A row sees all rows of its sequence before it and itself. Rows that stand on branches see those
    before ``committed`` rows' end and, of the rows after them, what ``branches`` says.
    """

    def __init__(self, capacity: int, batch: int = 1):
        self.capacity = capacity
        self.ends = [0] * batch  # rows of each sequence
        self.branches: Tensor | None = None  # [B, T, S] bool: the T rows to come see of the last S
        self.keys: Tensor | None = None  # [B, Hkv, capacity, Dh], made at the first call
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Rows of the longest sequence."""
        return max(self.ends)

    @property
    def uniform(self) -> bool:
        return min(self.ends) == max(self.ends)

    def remember(self, key: Tensor, value: Tensor) -> None:
        """Append rows: key and value [B, T, Hkv, Dh]."""
        rows = key.shape[1]
        if self.length + rows > self.capacity:
            raise ValueError(
                f"draft cache of {self.capacity} rows cannot take row {self.length + rows}"
            )
        if self.keys is None or self.values is None:
            shape = (key.shape[0], key.shape[2], self.capacity, key.shape[3])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        if self.uniform:
            begin = self.length
            self.keys[:, :, begin : begin + rows] = key.transpose(1, 2)
            self.values[:, :, begin : begin + rows] = value.transpose(1, 2)
        else:
            slots = self.ends_on(key.device)[:, None] + torch.arange(rows, device=key.device)
            batch = torch.arange(len(self.ends), device=key.device)[:, None]
            self.keys[batch, :, slots] = key  # indexed dimensions lead: [B, T, Hkv, Dh]
            self.values[batch, :, slots] = value
        self.ends = [end + rows for end in self.ends]

    def attend(self, query: Tensor) -> Tensor:
        """query [B, T, H, Dh] of the rows appended last -> [B, T, H, Dh]."""
        assert self.keys is not None and self.values is not None
        rows, longest = query.shape[1], self.length
        causal = self.uniform and self.branches is None and rows == longest > 1
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            self.keys[:, :, :longest],
            self.values[:, :, :longest],
            attn_mask=None if causal else self._mask(rows, query.device),
            is_causal=causal,
            enable_gqa=self.keys.shape[1] != query.shape[2],
        )
        return output.transpose(1, 2)

    def _mask(self, rows: int, device: torch.device) -> Tensor | None:
        """[B, 1, T, S] bool, True is seen; None where all is."""
        if self.branches is None and self.uniform:
            if rows == 1:
                return None
            square = torch.ones(rows, self.length, dtype=torch.bool, device=device)
            return square.tril(self.length - rows)
        ends, keys = self.ends_on(device), torch.arange(self.length, device=device)
        if self.branches is None:
            last = ends[:, None] - rows + torch.arange(rows, device=device)  # [B, T] itself
            return (keys <= last[:, :, None])[:, None]
        recent = self.branches.shape[-1]
        committed = (ends - recent)[:, None, None]  # [B, 1, 1]
        seen = (keys < committed).expand(-1, rows, -1)  # [B, T, S]
        slots = (committed + torch.arange(recent, device=device)).expand(-1, rows, -1)
        return seen.scatter(2, slots, self.branches)[:, None]

    def ends_on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.ends, device=device)

    def truncate(self, ends: int | list[int]) -> None:
        """Forget every row from ``ends`` on, of all or of each sequence; they are overwritten."""
        wanted = [ends] * len(self.ends) if isinstance(ends, int) else ends
        assert all(0 <= new <= old for new, old in zip(wanted, self.ends, strict=True))
        self.ends, self.branches = list(wanted), None

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order; the others leave."""
        self.ends = [self.ends[row] for row in rows]
        if self.keys is not None and self.values is not None:
            chosen = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[chosen], self.values[chosen]
