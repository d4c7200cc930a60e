"""The reader of a complete hidden-state cache: checked when opened, then read sample by sample."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import accumulate, groupby, pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from conf.runtime import note_once
from conf.schema import ConfigError, JobError
from data.fp8 import FP8
from data.manifest import Manifest, ShardEntry, fitting_manifest, open_manifest, shard_folder
from data.records import CachedPack, CachedSample, TokenizedSample, named
from data.room import Room
from data.shard_file import damaged, index_digest
from data.shard_index import ShardIndex, Stretch
from data.shards import digest_of, raw
from data.staging import GIB, Staging

Place = tuple[Stretch, memoryview]  # rows in a file, and where they are read to
READERS = 16  # threads that fetch indexes from a store: each waits for the network


class ShardReader:
    """Samples by their prepared order. Opening reads headers and small tensors, never states.

    Nothing unchecked is handed out: headers and small tensors are compared with the manifest when
    opened, and a sample's rows with their digest whenever they are read (at some 20 GB/s).
    With a ``stage`` the shards lie in its store, and each is fetched when a sample of it is read.
    ``lengths`` [S] int64, ``held_out`` and ``greedy`` [S] bool describe all samples.
    """

    def __init__(self, folder: Path, wanted: Manifest | None = None, stage: Staging | None = None):
        """Raises ConfigError: other states or format than wanted, a missing, cut or torn shard.

        What is wanted: see open_manifest; None: any.
        """
        self.folder = folder
        self.stage = stage
        if stage is None:
            self.manifest = open_manifest(folder, wanted)
        else:
            self.manifest = fitting_manifest(folder, wanted)
            note_room(stage, self.manifest)
        self._shards = self._open_all()
        self._digests = self._joined("digests").tolist()
        self.lengths = torch.cat([shard.small["offsets"].diff() for shard in self._shards])
        self.held_out = self._joined("held_out").bool()
        self.greedy = self._joined("greedy").bool()
        index = self._joined("sample_index")
        if not torch.equal(index, torch.arange(len(index))):
            raise ConfigError(
                f"{folder}: samples are missing or doubled between its shards; delete the folder "
                "and run data.capture"
            )
        counts = torch.tensor([0, *(entry.samples for entry in self.manifest.shards)])
        self._count = len(index)  # a tensor's own length takes a microsecond
        self._room = Room()
        self._firsts: list[int] = counts.cumsum(0)[:-1].tolist()

    def __str__(self) -> str:
        return str(self.folder)

    def __len__(self) -> int:
        return self._count

    @property
    def train_indices(self) -> list[int]:
        return (~self.held_out).nonzero()[:, 0].tolist()

    @property
    def valid_indices(self) -> list[int]:
        return self.held_out.nonzero()[:, 0].tolist()

    @property
    def token_bytes(self) -> float:
        """What a token takes in the files, on average."""
        shards = self.manifest.shards
        return sum(entry.bytes for entry in shards) / sum(entry.tokens for entry in shards)

    def read(self, index: int) -> CachedSample:
        """Sample ``index`` of the prepared order, aux and last in the manifest's dtype.

        Raises ConfigError when a byte of it is not what capture wrote.
        """
        pack = self.read_pack([index])
        (sample,) = pack.samples
        return CachedSample(sample=sample, **dict(named(pack)))

    def read_pack(self, indices: Sequence[int]) -> CachedPack:
        """The samples end to end, each read into its place; in the order of the files."""
        parts = [self._shard(index).rows_of(self._place(index)) for index in indices]
        columns = list(zip(*parts, strict=True))  # one tensor's rows, by sample
        whole = [column[0].rows(0, sum(part.shape[0] for part in column)) for column in columns]
        found = self._room.tensors(whole)
        cut = (pieces(block, column) for block, column in zip(found, columns, strict=True))
        rooms = list(zip(*cut, strict=True))  # by sample, then in the order of ROWS
        blocks = {one.name: block for one, block in zip(whole, found, strict=True)}
        for number, handle in self._opened(indices):
            index = indices[number]
            places = list(zip(parts[number], rooms[number], strict=True))
            if not self._filled(index, handle, places):
                self._read_anew(index, places)
        lengths = [int(self.lengths[index]) for index in indices]
        ids = blocks["input_ids"].long().split(lengths)
        masks = blocks["loss_mask"].bool().split(lengths)
        return CachedPack(
            samples=[
                TokenizedSample(
                    id=self._shard(index).ids[self._place(index)],
                    input_ids=ids[number],
                    loss_mask=masks[number],
                    greedy=bool(self.greedy[index]),
                    held_out=bool(self.held_out[index]),
                )
                for number, index in enumerate(indices)
            ],
            aux=blocks["aux"],
            last=blocks["last"],
            argmax=blocks["argmax"].long(),
            lse=blocks["lse"],
            aux_scales=blocks.get("aux_scales"),
            last_scales=blocks.get("last_scales"),
        )

    def _filled(self, index: int, handle: int, places: Sequence[Place]) -> bool:
        """Read the rows of a sample into their places -> whether they fit their digest."""
        shard = self._shard(index)
        for part, room in places:
            shard.read(handle, part, room)
        return digest_of(room for _, room in places) == self._digests[index]

    def _read_anew(self, index: int, places: Sequence[Place]) -> None:
        """A damaged sample again, from a shard fetched anew. Raises ConfigError without a store."""
        shard, entry = self._shard(index), self.manifest.shards[self._shard_number(index)]
        if self.stage is not None:
            self.stage.drop(entry)
            with self.stage.open(entry) as file:
                if self._filled(index, file.fileno(), places):
                    return
        name = shard.ids[self._place(index)]
        raise damaged(shard.path, f"sample {name} is not as it was written")

    def expect(self, indices: Sequence[int]) -> None:
        """Ask the system to fetch the samples from the disk, and do not wait for it.

        All of it is asked for at once, so the disk works on many reads side by side. Shards that
        are not on the disk are left to the reading: fetched too early they might be gone again.
        """
        if self.stage is not None:
            shards = {self._shard_number(index) for index in indices}
            there = {shard for shard in shards if self.stage.has(self.manifest.shards[shard])}
            indices = [index for index in indices if self._shard_number(index) in there]
        for number, handle in self._opened(indices):
            index = indices[number]
            for part in self._shard(index).rows_of(self._place(index)):
                os.posix_fadvise(handle, part.begin, part.bytes, os.POSIX_FADV_WILLNEED)

    def _opened(self, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(place in ``indices``, its open shard) of each, in the order of the files."""
        order = sorted(range(len(indices)), key=lambda number: indices[number])
        for _, chosen in groupby(order, lambda number: self._shard_number(indices[number])):
            numbers = list(chosen)
            with self._file(self._shard_number(indices[numbers[0]])) as file:
                for number in numbers:
                    yield number, file.fileno()

    def _file(self, shard: int) -> FileIO:
        if self.stage is None:
            return opened(self._shards[shard].path)
        return self.stage.open(self.manifest.shards[shard])

    def _shard(self, index: int) -> ShardIndex:
        return self._shards[self._shard_number(index)]

    def _shard_number(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        return bisect_right(self._firsts, index) - 1

    def _place(self, index: int) -> int:
        """The number of the sample inside its shard."""
        return index - self._firsts[self._shard_number(index)]

    def _joined(self, name: str) -> Tensor:
        return torch.cat([shard.small[name] for shard in self._shards])

    def _open_all(self) -> list[ShardIndex]:
        if self.stage is None:
            return [self._open(entry) for entry in self.manifest.shards]
        with ThreadPoolExecutor(READERS, "indexes", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(self._open, self.manifest.shards))

    def _open(self, entry: ShardEntry) -> ShardIndex:
        """Read one shard's index and compare the lengths of all its parts with the manifest."""
        stage = self.stage
        path = shard_folder(self.folder) / entry.name if stage is None else stage.index(entry)
        try:
            digest = index_digest(path)
            if digest != entry.index:
                raise damaged(path, f"its index is {digest}, must be {entry.index} by the manifest")
            shard = ShardIndex.of(path)
        except SafetensorError as error:
            raise damaged(path, f"not a shard of this format ({error})") from error
        for name, shape in self._shapes(entry).items():
            found = shard.tensors[name].shape if name in shard.tensors else None
            if found != shape:
                raise damaged(path, f"{name} is {found}, must be {shape} by the manifest")
        for name, total in (("offsets", entry.tokens), ("last_offsets", entry.asking)):
            found = shard.small[name]
            if found[0] != 0 or found[-1] != total or bool((found.diff() < 0).any()):
                raise damaged(path, f"{name} must rise from 0 to {total}")
        return shard

    def _shapes(self, entry: ShardEntry) -> dict[str, tuple[int, ...]]:
        width, layers = self.manifest.hidden_size, len(self.manifest.aux_layers)
        one_a_token = dict.fromkeys(("input_ids", "loss_mask"), (entry.tokens,))
        one_a_row = dict.fromkeys(("argmax", "lse"), (entry.asking,))
        samples = dict.fromkeys(("sample_index", "held_out", "greedy", "digests"), (entry.samples,))
        states = {"aux": (entry.tokens, layers * width), "last": (entry.asking, width)}
        if getattr(torch, self.manifest.dtype) == FP8:
            states |= {"aux_scales": (entry.tokens, layers), "last_scales": (entry.asking, 1)}
        offsets = dict.fromkeys(("offsets", "last_offsets"), (entry.samples + 1,))
        return {**one_a_token, **one_a_row, **samples, **states, **offsets}


def note_room(stage: Staging, manifest: Manifest) -> None:
    """Say what a small stage costs. Raises ConfigError for one that holds not even each shard."""
    stage.stored.update(entry.name for entry in manifest.shards)
    if not stage.holds(manifest.shards):
        total = sum(entry.bytes for entry in manifest.shards)
        assert stage.limit is not None
        note_once(
            f"capture.stage_gib={stage.limit / GIB:g} of the {total / GIB:.3g} GiB in {stage.store}"
            " fit on this machine, and a step reads from many shards: about "
            f"{1 - stage.limit / total:.0%} of them are fetched again each time"
        )


def opened(path: Path) -> FileIO:
    """Raises JobError when the file has gone since the cache was opened."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise JobError(
            f"{path}: this shard of the cache was there and is gone; run the same command again, "
            "which captures it anew and goes on from the newest checkpoint"
        ) from error


def pieces(block: Tensor, parts: Sequence[Stretch]) -> list[memoryview]:
    """The bytes of ``block`` that each of ``parts`` is read into, one behind the other.

    No tensors: making some for every sample would cost half of what reading it does.
    """
    room = raw(block)
    ends = [0, *accumulate(part.bytes for part in parts)]
    return [room[start:end] for start, end in pairwise(ends)]
