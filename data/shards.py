"""The shards of the hidden-state cache: what one holds, and how it is filled.

A shard is a plain safetensors file with S whole samples of N tokens together, unpadded. L of the
rows ask: their next token is supervised, so the verifier's own distribution there is of use.

    input_ids    int32 [N]     loss_mask         uint8 [N]     offsets       int64 [S+1]
    sample_index int64 [S]     held_out, greedy  uint8 [S]     last_offsets  int64 [S+1]
    aux   [N, A*D]             last   [L, D]                   in the manifest's dtype
    argmax int32 [L]           lse  float32 [L]                of the verifier's own logits
    digests int64 [S]          xxh3 of each sample's rows, in the order of ROWS
    aux_scales float32 [N, A]  last_scales float32 [L, 1]      in fp8 alone

Its header names the capture and the span it belongs to, and the sample ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
import xxhash
from torch import Tensor

from conf.schema import JobError
from data.chains import asking_rows
from data.fp8 import FP8
from data.manifest import Manifest
from data.records import SampleStates, TokenizedSample

BY_TOKEN = ("input_ids", "loss_mask", "aux", "aux_scales")  # rows by ``offsets``
BY_ASKING = ("last", "last_scales", "argmax", "lse")  # rows by ``last_offsets``
ROWS = (*BY_TOKEN, *BY_ASKING)
INDEX = ("offsets", "last_offsets", "sample_index", "held_out", "greedy", "digests")


@dataclass(frozen=True)
class HiddenStateShard:
    """One shard in memory, filled sample by sample in any order. Shapes: see the module."""

    input_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor
    last_offsets: Tensor
    sample_index: Tensor
    held_out: Tensor
    greedy: Tensor
    digests: Tensor
    aux: Tensor
    last: Tensor
    argmax: Tensor
    lse: Tensor
    aux_scales: Tensor | None
    last_scales: Tensor | None
    ids: list[str]

    @classmethod
    def empty(
        cls, samples: list[TokenizedSample], first: int, manifest: Manifest
    ) -> "HiddenStateShard":
        """Room for the states of ``samples``, the first of which is number ``first`` of all.

        Raises JobError when a sample has not one mask entry an id.
        """
        for sample in samples:
            if len(sample.input_ids) != len(sample.loss_mask):
                raise JobError(
                    f"sample {sample.id}: {len(sample.input_ids)} ids and "
                    f"{len(sample.loss_mask)} mask entries must be equally many; prepare it again"
                )
        mask = torch.cat([sample.loss_mask for sample in samples])
        offsets = torch.tensor([0, *(len(sample.input_ids) for sample in samples)]).cumsum(0)
        asking = asking_rows(mask, offsets)
        before = torch.cat([torch.zeros(1, dtype=torch.int64), asking.cumsum(0)])
        rows, asked = len(mask), int(asking.sum())
        width, layers = manifest.hidden_size, len(manifest.aux_layers)
        dtype = getattr(torch, manifest.dtype)
        scaled = dtype == FP8
        return cls(
            input_ids=torch.cat([sample.input_ids for sample in samples]).int(),
            loss_mask=mask.to(torch.uint8),
            offsets=offsets,
            last_offsets=before[offsets],
            sample_index=torch.arange(first, first + len(samples)),
            held_out=torch.tensor([sample.held_out for sample in samples], dtype=torch.uint8),
            greedy=torch.tensor([sample.greedy for sample in samples], dtype=torch.uint8),
            digests=torch.zeros(len(samples), dtype=torch.int64),
            aux=torch.empty(rows, layers * width, dtype=dtype),
            last=torch.empty(asked, width, dtype=dtype),
            argmax=torch.empty(asked, dtype=torch.int32),
            lse=torch.empty(asked),
            aux_scales=torch.empty(rows, layers) if scaled else None,
            last_scales=torch.empty(asked, 1) if scaled else None,
            ids=[sample.id for sample in samples],
        )

    def put(self, place: int, states: SampleStates) -> None:
        """Store the states of sample ``place`` of this shard. Raises JobError if they misfit."""
        for item in fields(states):
            rows: Tensor | None = getattr(states, item.name)
            room: Tensor | None = getattr(self, item.name)
            if rows is None or room is None:
                if rows is not room:
                    raise JobError(
                        f"sample {self.ids[place]}: the states and the shard must both be fp8 or "
                        f"neither ({item.name}); delete the cache and capture again"
                    )
                continue
            start, end = self.bounds(item.name, place)
            if len(rows) != end - start:
                raise JobError(
                    f"sample {self.ids[place]}: {len(rows)} rows of {item.name}, must be "
                    f"{end - start}; the states are another sample's, have another capture.backend "
                    "compute them"
                )
            room[start:end] = rows
        self.digests[place] = digest_of([raw(rows) for _, rows in self.rows_of(place)])

    def bounds(self, name: str, place: int) -> tuple[int, int]:
        """The rows of sample ``place`` in tensor ``name``: the first, and the one behind."""
        offsets = self.offsets if name in BY_TOKEN else self.last_offsets
        start, end = offsets[place : place + 2].tolist()
        return start, end

    def rows_of(self, place: int) -> list[tuple[str, Tensor]]:
        tensors = self.tensors()
        return [
            (name, tensors[name][slice(*self.bounds(name, place))])
            for name in ROWS
            if name in tensors
        ]

    def tensors(self) -> dict[str, Tensor]:
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def digest_of(parts: Iterable[memoryview]) -> int:
    """xxh3 of the bytes of ``parts`` one after the other, as a signed 64-bit number."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    value = digest.intdigest()
    return value - (1 << 64) if value >> 63 else value


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, without a copy."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
