"""Attention of the draft: which keys a query sees, in training and in decoding."""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Memory(Protocol):
    """Keys seen so far. ``attend`` takes the new rows' query, key and value and remembers them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, H, T, Dh], key and value [B, Hkv, T, Dh] -> [B, H, T, Dh]."""
        ...


class TTTMemory:
    """Keys of the training-time test (EAGLE-3, section 3.1).

    Step 0 is causal attention over the sample's rows. At step k, row t sees the step-0 keys 0..t
    and one key at row t from each step 1..k: a causal block and k diagonals, drawn here for T=3
    at step 2 (columns: step-0 keys, step-1 keys, step-2 keys):

        x . .   x . .   x . .
        x x .   . x .   . x .
        x x x   . . x   . . x

    Samples are right-padded, so causality alone keeps padding out of every real row.
    """

    def __init__(self) -> None:
        self.base: tuple[Tensor, Tensor] | None = None
        self.diagonals: list[tuple[Tensor, Tensor]] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.base is None:
            self.base = (key, value)
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
            )
        self.diagonals.append((key, value))
        return self._attend_block_and_diagonals(query)

    def _attend_block_and_diagonals(self, query: Tensor) -> Tensor:
        assert self.base is not None
        keys, values = self.base
        batch, heads, rows, width = query.shape
        groups = keys.shape[1]
        query = query.view(batch, groups, heads // groups, rows, width) / math.sqrt(width)
        block = query @ keys[:, :, None].transpose(-1, -2)  # [B, Hkv, G, T, T]
        future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        block = block.masked_fill(future, float("-inf"))
        singles = [(query * key[:, :, None]).sum(-1, keepdim=True) for key, _ in self.diagonals]
        scores = torch.cat([block, *singles], dim=-1)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(query.dtype)
        output = weights[..., :rows] @ values[:, :, None]
        for j, (_, value) in enumerate(self.diagonals):
            output = output + weights[..., rows + j, None] * value[:, :, None]
        return output.reshape(batch, heads, rows, width)


class DraftCache:
    """Keys of decoding: appended row by row, dropped again by ``truncate``."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None  # [B, Hkv, capacity, Dh], made at the first call
        self.values: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append the new rows; each sees everything before it and itself."""
        start, rows = self.length, key.shape[2]
        end = start + rows
        if end > self.capacity:
            raise ValueError(f"draft cache of {self.capacity} rows cannot take row {end}")
        if self.keys is None or self.values is None:
            shape = (key.shape[0], key.shape[1], self.capacity, key.shape[3])
            self.keys, self.values = key.new_zeros(shape), value.new_zeros(shape)
        self.keys[:, :, start:end] = key
        self.values[:, :, start:end] = value
        self.length = end
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
