"""Attention of the draft: which keys a query sees, in training and in decoding."""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Memory(Protocol):
    """Keys seen so far."""

    def remember(self, key: Tensor, value: Tensor) -> None:
        """Take rows [B, Hkv, T, Dh] that ask nothing, only give keys to later ones."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Remember the new rows and answer them.

        query [B, H, T, Dh], key and value [B, Hkv, T, Dh] -> [B, H, T, Dh].
        """
        ...


class TTTMemory:
    """Keys of the training-time test (EAGLE-3, section 3.1).

    Step 0 is causal attention over the sample's rows. At step k, row t sees the step-0 keys 0..t
    and one key at row t from each step 1..k: a causal block and k diagonals, drawn here for T=3
    at step 2 (columns: step-0 keys, step-1 keys, step-2 keys):

        x . .   x . .   x . .
        x x .   . x .   . x .
        x x x   . . x   . . x

    Samples are right-padded, so causality alone keeps padding out of every real row. Rows that
    carry no loss themselves are remembered before step 0; the queries are the rows after them.
    """

    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None
        self.base: tuple[Tensor, Tensor] | None = None
        self.diagonals: list[tuple[Tensor, Tensor]] = []

    def remember(self, key: Tensor, value: Tensor) -> None:
        assert self.before is None and self.base is None
        self.before = (key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.base is not None:
            self.diagonals.append((key, value))
            return self._attend_block_and_diagonals(query)
        if self.before is None:
            self.base = (key, value)
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
            )
        keys, values = self.before
        self.base = (torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2))
        return self._attend_block_and_diagonals(query)

    def _attend_block_and_diagonals(self, query: Tensor) -> Tensor:
        assert self.base is not None
        keys, values = self.base
        batch, heads, rows, width = query.shape
        groups = keys.shape[1]
        query = query.view(batch, groups, heads // groups, rows, width) / math.sqrt(width)
        known = keys.shape[2]  # P remembered rows, then the T that ask
        block = query @ keys[:, :, None].transpose(-1, -2)  # [B, Hkv, G, T, P+T]
        future = torch.ones(rows, known, dtype=torch.bool, device=query.device)
        future = future.triu(known - rows + 1)
        block = block.masked_fill(future, float("-inf"))
        singles = [(query * key[:, :, None]).sum(-1, keepdim=True) for key, _ in self.diagonals]
        scores = torch.cat([block, *singles], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(query.dtype)
        output = weights[..., :known] @ values[:, :, None]
        for j, (_, value) in enumerate(self.diagonals):
            output = output + weights[..., known + j, None] * value[:, :, None]
        return output.reshape(batch, heads, rows, width)


class DraftCache:
    """Keys of decoding: appended row by row, dropped again by ``truncate``."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # [B, Hkv, capacity, Dh], made at the first call
        self.values: Tensor | None = None

    def remember(self, key: Tensor, value: Tensor) -> None:
        end = self.length + key.shape[2]
        if end > self.capacity:
            raise ValueError(f"draft cache of {self.capacity} rows cannot take row {end}")
        if self.keys is None or self.values is None:
            shape = (key.shape[0], key.shape[1], self.capacity, key.shape[3])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the new rows; each sees everything before it and itself."""
        start, rows = self.length, key.shape[2]
        self.remember(key, value)
        assert self.keys is not None and self.values is not None
        end = self.length
        mask = None
        if rows > 1 and start > 0:
            mask = torch.ones(rows, end, dtype=torch.bool, device=query.device).tril(start)
        return F.scaled_dot_product_attention(
            query,
            self.keys[:, :, :end],
            self.values[:, :, :end],
            attn_mask=mask,
            is_causal=rows > 1 and start == 0,
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def truncate(self, length: int) -> None:
        """Forget every row from ``length`` on; they will be overwritten."""
        assert 0 <= length <= self.length
        self.length = length
