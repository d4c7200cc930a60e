"""Memories: which keys a row of the draft sees, in training and in decoding."""

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

    What is remembered first, for all packed rows, is the base that every step sees; what a later
    step remembers, for the rows that ask then, its row alone sees. A step may be computed twice
    (activation checkpointing) and remembers the same again.
    """

    def __init__(self, kernel: Kernel, runs: Runs | None = None):
        self.kernel = kernel
        self.runs = runs
        self.base: tuple[Tensor, Tensor] | None = None
        self.earlier: list[Diagonal] = []  # of the steps between
        self.own: list[Diagonal] = []

    def remember(self, key: Tensor, value: Tensor) -> None:
        if self.runs is None:
            self.base = (key, value)
        else:
            self.own = [Diagonal(key, value)]

    def attend(self, query: Tensor) -> Tensor:
        assert self.base is not None and self.runs is not None
        return attend(query, self.base, self.runs, [*self.earlier, *self.own], self.kernel)

    def following(self, runs: Runs, kept: Tensor | None) -> "TTTMemory":
        """The memory of the next step, whose rows are rows ``kept`` of this one; None: all."""
        memory = TTTMemory(self.kernel, runs)
        memory.base = self.base
        known = [*self.earlier, *self.own]
        memory.earlier = known if kept is None else [diagonal.kept(kept) for diagonal in known]
        return memory


class DraftCache:
    """Keys of decoding: appended row by row, dropped again by ``truncate``."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # [B, Hkv, capacity, Dh], made at the first call
        self.values: Tensor | None = None

    def remember(self, key: Tensor, value: Tensor) -> None:
        """Append rows: key and value [B, T, Hkv, Dh]."""
        end = self.length + key.shape[1]
        if end > self.capacity:
            raise ValueError(f"draft cache of {self.capacity} rows cannot take row {end}")
        if self.keys is None or self.values is None:
            shape = (key.shape[0], key.shape[2], self.capacity, key.shape[3])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        self.keys[:, :, self.length : end] = key.transpose(1, 2)
        self.values[:, :, self.length : end] = value.transpose(1, 2)
        self.length = end

    def attend(self, query: Tensor) -> Tensor:
        """query [B, T, H, Dh] of the rows appended last; each sees all before it and itself."""
        assert self.keys is not None and self.values is not None
        end, rows = self.length, query.shape[1]
        mask = None
        if 1 < rows < end:
            mask = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(end - rows)
        output = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            self.keys[:, :, :end],
            self.values[:, :, :end],
            attn_mask=mask,
            is_causal=rows == end > 1,
            enable_gqa=self.keys.shape[1] != query.shape[2],
        )
        return output.transpose(1, 2)

    def truncate(self, length: int) -> None:
        """Forget every row from ``length`` on; they will be overwritten."""
        assert 0 <= length <= self.length
        self.length = length
