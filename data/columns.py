"""The columns of the prepared samples while they grow: a file each, so that memory stays flat."""

import errno
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.runtime import sync_folder
from conf.scratch import Scratch
from data.encoder import SampleBlock

BLOCK = 1 << 20  # items
DTYPES = {
    **dict.fromkeys(("tokens",), np.int32),
    **dict.fromkeys(("mask", "greedy", "id_text"), np.uint8),
    **dict.fromkeys(("lengths", "id_lengths", "source", "digest", "prompt", "base"), np.int64),
    **dict.fromkeys(("place",), np.float64),
}
Kept = NDArray[np.bool_]


class Columns:
    """A scratch folder with a file a column, to append to and then to read back in blocks."""

    def __init__(self, folder: Path):
        self.scratch = Scratch(folder.parent, folder.name)
        self.folder = self.scratch.folder
        self.files = {item.name: self.path(item.name).open("wb") for item in fields(SampleBlock)}

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.column"

    def add(self, block: SampleBlock) -> None:
        for name, file in self.files.items():
            values: NDArray[Any] = getattr(block, name)
            assert values.dtype == DTYPES[name]
            file.write(values.data)

    def finish(self) -> None:
        """Nothing more is added; from now on the columns can be read."""
        for file in self.files.values():
            file.close()

    def read(self, name: str) -> NDArray[Any]:
        """A whole column: one of those with an entry a sample."""
        return np.fromfile(self.path(name), DTYPES[name])

    def id_of(self, index: int) -> str:
        """The id of one sample."""
        lengths = self.read("id_lengths")
        start = int(lengths[:index].sum())
        with self.path("id_text").open("rb") as file:
            file.seek(start)
            return file.read(int(lengths[index])).decode("utf-8", "surrogatepass")

    def blocks(self, name: str, runs: list[range]) -> Iterator[NDArray[Any]]:
        """The items of a column that lie in ``runs``, in blocks."""
        item = np.dtype(DTYPES[name]).itemsize
        with self.path(name).open("rb") as file:
            for run in runs:
                file.seek(run.start * item)
                for start in range(run.start, run.stop, BLOCK):
                    yield np.fromfile(file, DTYPES[name], min(BLOCK, run.stop - start))

    def publish(self, folder: Path) -> None:
        """Give the folder its name, without the columns.

        Another process that was first made the same samples: then its folder stays.
        """
        self.finish()
        for name in self.files:
            self.path(name).unlink()
        try:
            self.scratch.publish(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_folder(folder.parent)

    def close(self) -> None:
        """Remove the folder, if it still has its temporary name."""
        self.finish()
        self.scratch.close()


def runs_of(kept: Kept, lengths: NDArray[np.int64]) -> list[range]:
    """The items of the kept samples as runs; sample i has ``lengths[i]`` items."""
    ends = np.concatenate([[0], lengths.cumsum()])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    return [range(int(ends[a]), int(ends[b])) for a, b in edges.reshape(-1, 2)]
