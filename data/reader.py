"""The reader of a complete hidden-state cache: checked when opened, then read sample by sample."""

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from conf.schema import ConfigError
from data.fp8 import FP8
from data.manifest import ShardEntry, open_manifest, shard_folder
from data.records import CachedSample, TokenizedSample
from data.shard_file import damaged, index_digest
from data.shard_index import ShardIndex
from data.shards import digest_of


class ShardReader:
    """Samples by their prepared order. Opening reads headers and small tensors, never states.

    Nothing unchecked is handed out: headers and small tensors are compared with the manifest when
    opened, and a sample's rows with their digest whenever they are read (at some 20 GB/s).
    ``lengths`` [S] int64, ``held_out`` and ``greedy`` [S] bool describe all samples.
    """

    def __init__(self, folder: Path, verifier: str | None = None):
        """Raises ConfigError: another verifier or format, a missing, cut or torn shard.

        ``verifier`` is the weights_fingerprint that the states must come from; None: any.
        """
        self.folder = folder
        self.manifest = open_manifest(folder, verifier)
        self._shards = [self._open(entry) for entry in self.manifest.shards]
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
        self._firsts: list[int] = counts.cumsum(0)[:-1].tolist()

    def __str__(self) -> str:
        return str(self.folder)

    def __len__(self) -> int:
        return len(self.lengths)

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
        return self.read_all([index])[0]

    def read_all(self, indices: Sequence[int]) -> list[CachedSample]:
        """The samples, in the order asked for; they are read in the order of the files."""
        found: dict[int, CachedSample] = {}
        for shard, chosen in self._by_shard(indices):
            with shard.path.open("rb", buffering=0) as file:
                for index in chosen:
                    found[index] = self._read(shard, file.fileno(), index)
        return [found[index] for index in indices]

    def expect(self, indices: Sequence[int]) -> None:
        """Ask the system to fetch the samples from the disk, and do not wait for it.

        All of it is asked for at once, so the disk works on many reads side by side.
        """
        for shard, chosen in self._by_shard(indices):
            with shard.path.open("rb", buffering=0) as file:
                for index in chosen:
                    for part in shard.rows_of(self._place(index)):
                        os.posix_fadvise(
                            file.fileno(), part.begin, part.bytes, os.POSIX_FADV_WILLNEED
                        )

    def _read(self, shard: ShardIndex, handle: int, index: int) -> CachedSample:
        place = self._place(index)
        rows = {part.name: shard.read(handle, part) for part in shard.rows_of(place)}
        if digest_of(list(rows.values())) != self._digests[index]:
            raise damaged(shard.path, f"sample {shard.ids[place]} is not as it was written")
        sample = TokenizedSample(
            id=shard.ids[place],
            input_ids=rows["input_ids"].long(),
            loss_mask=rows["loss_mask"].bool(),
            greedy=bool(self.greedy[index]),
            held_out=bool(self.held_out[index]),
        )
        return CachedSample(
            sample=sample,
            aux=rows["aux"],
            last=rows["last"],
            argmax=rows["argmax"].long(),
            lse=rows["lse"],
            aux_scales=rows.get("aux_scales"),
            last_scales=rows.get("last_scales"),
        )

    def _by_shard(self, indices: Sequence[int]) -> Iterator[tuple[ShardIndex, list[int]]]:
        """The shards that hold the samples, each with its own of them, ascending."""
        for number, chosen in groupby(sorted(set(indices)), self._shard_number):
            yield self._shards[number], list(chosen)

    def _shard_number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return bisect_right(self._firsts, index) - 1

    def _place(self, index: int) -> int:
        """The number of the sample inside its shard."""
        return index - self._firsts[self._shard_number(index)]

    def _joined(self, name: str) -> Tensor:
        return torch.cat([shard.small[name] for shard in self._shards])

    def _open(self, entry: ShardEntry) -> ShardIndex:
        """Read one shard's index and compare the lengths of all its parts with the manifest."""
        path = shard_folder(self.folder) / entry.name
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
