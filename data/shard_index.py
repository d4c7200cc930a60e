"""The index of a shard file: where each sample's rows lie, and the reading of them."""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from data.shard_file import CODES, damaged
from data.shards import BY_TOKEN, INDEX, ROWS

DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Stretch:
    """Rows of one tensor, side by side in a shard file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # its first byte in the file

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, end: int) -> "Stretch":
        row = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (end - start, *self.shape[1:])
        return Stretch(self.name, self.dtype, shape, self.begin + start * row)


@dataclass(frozen=True)
class ShardIndex:
    """What stays in memory of a shard: some hundred bytes a sample, and no open file.

    A cache of 33 TB has 33,000 shards, more than a process may hold open or mapped; opening one
    takes microseconds beside reading a sample.
    """

    path: Path
    tensors: dict[str, Stretch]
    small: dict[str, Tensor]  # those of INDEX
    ids: list[str]

    @classmethod
    def of(cls, path: Path) -> "ShardIndex":
        """Raises SafetensorError when the file is cut or is not a shard of this format."""
        with safe_open(path, framework="pt") as file:  # compares header and file size
            small = {name: file.get_tensor(name).clone() for name in INDEX}  # or the map stays
            ids = json.loads(file.metadata()["ids"])
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        tensors = {
            name: Stretch(
                name, DTYPES[about["dtype"]], tuple(about["shape"]),
                8 + length + about["data_offsets"][0],
            )
            for name, about in header.items()
            if name != "__metadata__"
        }  # fmt: skip
        return cls(path, tensors, small, ids)

    def rows_of(self, place: int) -> list[Stretch]:
        """Where the rows of sample ``place`` of this shard lie, in the order of ROWS."""
        by_token = self.small["offsets"][place : place + 2].tolist()
        by_asking = self.small["last_offsets"][place : place + 2].tolist()
        return [
            self.tensors[name].rows(*(by_token if name in BY_TOKEN else by_asking))
            for name in ROWS
            if name in self.tensors
        ]

    def read(self, handle: int, stretch: Stretch, room: memoryview) -> None:
        """Fill ``room`` with the bytes of the stretch, from the open file ``handle``.

        One read takes it all: a mapped file would be fetched in pieces of some pages, each waited
        for. Raises ConfigError when the file ends before.
        """
        begin = stretch.begin
        while len(room):
            got = os.preadv(handle, [room], begin)
            if not got:
                raise damaged(self.path, f"ends before its {stretch.name} does")
            room, begin = room[got:], begin + got
