"""The reader of a complete hidden-state cache: checked when opened, then read sample by sample."""

import json
from bisect import bisect_right
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.schema import ConfigError
from data.manifest import ShardEntry, open_manifest, shard_folder
from data.records import CachedSample, TokenizedSample


class ShardReader:
    """Samples by their prepared order. Opening reads headers and small tensors; states are mapped.

    ``lengths`` [S] int64, ``held_out`` and ``greedy`` [S] bool describe all samples.
    """

    def __init__(self, folder: Path, verifier: str | None = None):
        """Raises ConfigError: another verifier or format, a missing, cut or torn shard.

        ``verifier`` is the weights_fingerprint that the states must come from; None: any.
        """
        self.folder = folder
        self.manifest = open_manifest(folder, verifier)
        self._files = [self._open(entry) for entry in self.manifest.shards]
        self._offsets = [file.get_tensor("offsets") for file in self._files]
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
        """Sample ``index`` of the prepared order, aux and last in the manifest's dtype."""
        return CachedSample(
            sample=self.read_tokens(index),
            aux=self._rows(index, "aux"),
            last=self._rows(index, "last"),
            argmax=self._rows(index, "argmax").long(),
            lse=self._rows(index, "lse"),
        )

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = bisect_right(self._firsts, index) - 1
        return shard, index - self._firsts[shard]

    def _rows(self, index: int, name: str) -> Tensor:
        shard, place = self._find(index)
        start, end = self._offsets[shard][place : place + 2].tolist()
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
            offsets = file.get_tensor("offsets")
        except SafetensorError as error:
            raise damaged(path, f"not a shard of this format ({error})") from error
        for name, shape in expected.items():
            if found[name] != shape:
                raise damaged(path, f"{name} is {found[name]}, must be {shape} by the manifest")
        if offsets[0] != 0 or offsets[-1] != entry.tokens or bool((offsets.diff() < 0).any()):
            raise damaged(path, f"offsets must rise from 0 to {entry.tokens}")
        return file

    def _shapes(self, entry: ShardEntry) -> dict[str, tuple[int, ...]]:
        width, layers = self.manifest.hidden_size, len(self.manifest.aux_layers)
        rows = dict.fromkeys(("input_ids", "loss_mask", "argmax", "lse"), (entry.tokens,))
        samples = dict.fromkeys(("sample_index", "held_out", "greedy"), (entry.samples,))
        states = {"aux": (entry.tokens, layers * width), "last": (entry.tokens, width)}
        return {**rows, **samples, **states, "offsets": (entry.samples + 1,)}


def damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}; delete the file and run data.capture, which renews it")
