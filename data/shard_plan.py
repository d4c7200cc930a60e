"""The plan of the shards: how prepared samples are dealt to them, and what each will weigh."""

from dataclasses import dataclass

import torch
from torch import Tensor

from data.fp8 import FP8

TOKEN_BYTES = 5  # of a token, states apart: id 4, mask 1
ASKING_BYTES = 8  # of a row that asks, its state apart: argmax 4, lse 4
SAMPLE_BYTES = 34  # of a sample: two offsets, index and digest of 8 bytes, two flags
SCALE_BYTES = 4  # of a state in fp8
MIN_SHARDS = 16  # of a cache that would fit fewer


@dataclass(frozen=True)
class ShardSpan:
    """Which samples a shard holds: a run of the prepared order."""

    number: int
    first: int
    count: int
    tokens: int
    bytes: int  # of its tensors

    @property
    def name(self) -> str:
        return f"{self.number:05d}.safetensors"


@dataclass(frozen=True)
class RowSizes:
    """Bytes of a token and, on top, of a row that asks."""

    token: int
    asking: int

    @classmethod
    def of(cls, hidden_size: int, aux_layers: int, dtype: torch.dtype) -> "RowSizes":
        state = hidden_size * dtype.itemsize + (SCALE_BYTES if dtype == FP8 else 0)
        return cls(TOKEN_BYTES + aux_layers * state, ASKING_BYTES + state)


def plan_spans(
    lengths: Tensor, asking: Tensor, sizes: RowSizes, limit: int, chunk: int = 0
) -> list[ShardSpan]:
    """Cut the samples, in order, into shards of at most ``limit`` bytes (one sample at least).

    lengths, asking [S]: tokens of each sample, and how many of its rows ask. A small cache is cut
    finer, so that several processes have work and a rerun keeps most of it. How many processes
    there are has no say: a rerun with more or fewer of them finds its shards.

    Up to ``chunk`` tokens a shard may weigh what it will: a source that computes so many at one go
    would otherwise do it for fewer.
    """
    needs = bytes_of(lengths, asking, sizes)
    limit = min(limit, -(-sum(needs) // MIN_SHARDS))
    counts: list[int] = []
    first, size, tokens = 0, 0, 0
    for index, (need, length) in enumerate(zip(needs, lengths.tolist(), strict=True)):
        if index > first and size + need > limit and tokens + length > chunk:
            counts.append(index - first)
            first, size, tokens = index, 0, 0
        size, tokens = size + need, tokens + length
    if needs:
        counts.append(len(needs) - first)
    return cut_spans(lengths, asking, sizes, counts)


def cut_spans(
    lengths: Tensor, asking: Tensor, sizes: RowSizes, counts: list[int]
) -> list[ShardSpan]:
    """The shards that hold ``counts`` samples each, in order."""
    needs = bytes_of(lengths, asking, sizes)
    spans: list[ShardSpan] = []
    first = 0
    for number, count in enumerate(counts):
        mine = slice(first, first + count)
        spans.append(ShardSpan(number, first, count, int(lengths[mine].sum()), sum(needs[mine])))
        first += count
    return spans


def bytes_of(lengths: Tensor, asking: Tensor, sizes: RowSizes) -> list[int]:
    return (lengths * sizes.token + asking * sizes.asking + SAMPLE_BYTES).tolist()
