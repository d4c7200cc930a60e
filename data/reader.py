"""The reader of a complete hidden-state cache: checked when opened, then read sample by sample."""

import json
from bisect import bisect_right
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.schema import ConfigError
from data.fp8 import FP8
from data.manifest import ShardEntry, open_manifest, shard_folder
from data.records import CachedSample, TokenizedSample
from data.shard_file import damaged, index_digest
from data.shards import BY_TOKEN, ROWS, digest_of


class ShardReader:
    """Samples by their prepared order. Opening reads headers and small tensors; states are mapped.

    Nothing unchecked is handed out: headers and small tensors are compared with the manifest when
    opened, and a sample's rows with their digest whenever they are read (at some 20 GB/s).
    ``lengths`` [S] int64, ``held_out`` and ``greedy`` [S] bool describe all samples.
    """

    def __init__(
        self,
        folder: Path,
        verifier: str | None = None,
        dtype: str | None = None,
        aux_layers: list[int] | None = None,
    ):
        """Raises ConfigError: other states or format than wanted, a missing, cut or torn shard.

        What is wanted: see open_manifest; None: any.
        """
        self.folder = folder
        self.manifest = open_manifest(folder, verifier, dtype, aux_layers)
        self._files = [self._open(entry) for entry in self.manifest.shards]
        self._offsets = [file.get_tensor("offsets") for file in self._files]
        self._last_offsets = [file.get_tensor("last_offsets") for file in self._files]
        self._digests = self._joined("digests").tolist()
        self._ids = [json.loads(file.metadata()["ids"]) for file in self._files]
        self.lengths = torch.cat([offsets.diff() for offsets in self._offsets])
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

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def train_indices(self) -> list[int]:
        return (~self.held_out).nonzero()[:, 0].tolist()

    @property
    def valid_indices(self) -> list[int]:
        return self.held_out.nonzero()[:, 0].tolist()

    def is_greedy(self, index: int) -> bool:
        """Whether the sample's last answer is the verifier's own greedy text."""
        return bool(self.greedy[index])

    def read_tokens(self, index: int) -> TokenizedSample:
        """Sample ``index`` of the prepared order, without its states."""
        shard, place = self._find(index)
        return TokenizedSample(
            id=self._ids[shard][place],
            input_ids=self._rows(index, "input_ids").long(),
            loss_mask=self._rows(index, "loss_mask").bool(),
            greedy=self.is_greedy(index),
            held_out=bool(self.held_out[index]),
        )

    def read(self, index: int) -> CachedSample:
        """Sample ``index`` of the prepared order, aux and last in the manifest's dtype.

        Raises ConfigError when a byte of it is not what capture wrote.
        """
        scaled = getattr(torch, self.manifest.dtype) == FP8
        names = [name for name in ROWS if scaled or not name.endswith("_scales")]
        rows = {name: self._rows(index, name) for name in names}
        shard, place = self._find(index)
        if digest_of(list(rows.values())) != self._digests[index]:
            path = shard_folder(self.folder) / self.manifest.shards[shard].name
            raise damaged(path, f"sample {self._ids[shard][place]} is not as it was written")
        return CachedSample(
            sample=self.read_tokens(index),
            aux=rows["aux"],
            last=rows["last"],
            argmax=rows["argmax"].long(),
            lse=rows["lse"],
            aux_scales=rows.get("aux_scales"),
            last_scales=rows.get("last_scales"),
        )

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._firsts, index) - 1
        return shard, index - self._firsts[shard]

    def _rows(self, index: int, name: str) -> Tensor:
        shard, place = self._find(index)
        offsets = self._offsets if name in BY_TOKEN else self._last_offsets
        start, end = offsets[shard][place : place + 2].tolist()
        return self._files[shard].get_slice(name)[start:end]

    def _joined(self, name: str) -> Tensor:
        return torch.cat([file.get_tensor(name) for file in self._files])

    def _open(self, entry: ShardEntry) -> safe_open:
        """Open one shard and compare the lengths of all its parts with the manifest."""
        path = shard_folder(self.folder) / entry.name
        expected = self._shapes(entry)
        try:
            file = safe_open(path, framework="pt")
            found = {name: tuple(file.get_slice(name).get_shape()) for name in expected}
            offsets = {name: file.get_tensor(name) for name in ("offsets", "last_offsets")}
            index = index_digest(path)
        except SafetensorError as error:
            raise damaged(path, f"not a shard of this format ({error})") from error
        for name, shape in expected.items():
            if found[name] != shape:
                raise damaged(path, f"{name} is {found[name]}, must be {shape} by the manifest")
        for name, total in (("offsets", entry.tokens), ("last_offsets", entry.asking)):
            found = offsets[name]
            if found[0] != 0 or found[-1] != total or bool((found.diff() < 0).any()):
                raise damaged(path, f"{name} must rise from 0 to {total}")
        if index != entry.index:
            raise damaged(path, f"its index is {index}, must be {entry.index} by the manifest")
        return file

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
