"""The shards of the hidden-state cache: how samples are dealt to them, and how one is written.

A shard is a plain safetensors file with S whole samples of N tokens together, unpadded:

    input_ids    int32 [N]     loss_mask         uint8 [N]     offsets  int64 [S+1]
    sample_index int64 [S]     held_out, greedy  uint8 [S]
    aux   [N, A*D]             last   [N, D]                   in the manifest's dtype
    argmax int32 [N]           lse  float32 [N]                of the verifier's own logits

Its header names the capture and the span it belongs to, and the sample ids.
"""

import hashlib
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.runtime import sync_folder
from data.manifest import Manifest, ShardEntry, shard_folder
from data.records import TokenizedSample
from models.bundled import sha256_of

ROW_BYTES = 13  # of a token, states apart: id 4, mask 1, argmax 4, lse 4
MIN_SHARDS = 16  # of a cache that would fit fewer
SAMPLE_BYTES = 18  # of a sample: offset 8, index 8, two flags
CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}


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


def plan_spans(lengths: list[int], state_bytes: int, limit: int) -> list[ShardSpan]:
    """Cut the samples, in order, into shards of at most ``limit`` bytes (one sample at least).

    ``state_bytes`` is what aux and last of one token take. A small cache is cut finer, so that
    several processes have work and a rerun keeps most of it. How many processes there are has no
    say: a rerun with more or fewer of them finds its shards.
    """
    sizes = [length * (state_bytes + ROW_BYTES) + SAMPLE_BYTES for length in lengths]
    limit = min(limit, -(-sum(sizes) // MIN_SHARDS))
    spans: list[ShardSpan] = []
    first, size = 0, 0
    for index, need in enumerate([*sizes, limit + 1]):  # the last one closes the last shard
        if index > first and size + need > limit:
            tokens = sum(lengths[first:index])
            spans.append(ShardSpan(len(spans), first, index - first, tokens, size))
            first, size = index, 0
        size += need
    return spans


@dataclass(frozen=True)
class SampleStates:
    """What the verifier says about one sample of T tokens."""

    aux: Tensor  # [T, A*D]
    last: Tensor  # [T, D]
    argmax: Tensor  # [T]
    lse: Tensor  # [T] fp32


@dataclass(frozen=True)
class HiddenStateShard:
    """One shard in memory, filled sample by sample in any order. Shapes: see the module."""

    input_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor
    sample_index: Tensor
    held_out: Tensor
    greedy: Tensor
    aux: Tensor
    last: Tensor
    argmax: Tensor
    lse: Tensor
    ids: list[str]

    @classmethod
    def empty(
        cls, samples: list[TokenizedSample], first: int, manifest: Manifest
    ) -> "HiddenStateShard":
        """Room for the states of ``samples``, the first of which is number ``first`` of all."""
        for sample in samples:
            if len(sample.input_ids) != len(sample.loss_mask):
                raise ValueError(
                    f"sample {sample.id}: {len(sample.input_ids)} ids and "
                    f"{len(sample.loss_mask)} mask entries must be equally many; prepare it again"
                )
        offsets = torch.tensor([0, *(len(sample.input_ids) for sample in samples)]).cumsum(0)
        rows, width = int(offsets[-1]), manifest.hidden_size
        dtype = getattr(torch, manifest.dtype)
        return cls(
            input_ids=torch.cat([sample.input_ids for sample in samples]).int(),
            loss_mask=torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
            offsets=offsets,
            sample_index=torch.arange(first, first + len(samples)),
            held_out=torch.tensor([sample.held_out for sample in samples], dtype=torch.uint8),
            greedy=torch.tensor([sample.greedy for sample in samples], dtype=torch.uint8),
            aux=torch.empty(rows, len(manifest.aux_layers) * width, dtype=dtype),
            last=torch.empty(rows, width, dtype=dtype),
            argmax=torch.empty(rows, dtype=torch.int32),
            lse=torch.empty(rows),
            ids=[sample.id for sample in samples],
        )

    def put(self, place: int, states: SampleStates) -> None:
        """Store the states of sample ``place`` of this shard. Raises ValueError if they misfit."""
        start, end = self.offsets[place : place + 2].tolist()
        for item in fields(states):
            rows: Tensor = getattr(states, item.name)
            if len(rows) != end - start:
                raise ValueError(
                    f"sample {self.ids[place]}: {len(rows)} rows of {item.name} for "
                    f"{end - start} tokens; the states are another sample's"
                )
            getattr(self, item.name)[start:end] = rows

    def tensors(self) -> dict[str, Tensor]:
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def write_shard(folder: Path, span: ShardSpan, shard: HiddenStateShard, capture: str) -> str:
    """Write a shard whole or not at all, and return the sha256 of what was written.

    The safetensors layout is written here: the library orders its header at random and tells a
    full disk by a text only. This way equal states are equal bytes, OSError keeps its number,
    and the checksum costs no second read.
    """
    tensors = shard.tensors()
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    about = {"format": "pt", "capture": capture, "span": span_text(span)}
    header = header_of(
        {name: tensors[name] for name in order}, about | {"ids": json.dumps(shard.ids)}
    )
    path = shard_folder(folder) / span.name
    temporary = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for block in (header, *(raw(tensors[name]) for name in order)):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return digest.hexdigest()


def header_of(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    """What a safetensors file begins with: its length, and JSON padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.flatten().view(torch.uint8).numpy().data


def span_text(span: ShardSpan) -> str:
    return f"{span.first}+{span.count}"


def is_whole(folder: Path, span: ShardSpan, capture: str) -> bool:
    """Whether the file of this shard is complete and holds this span of this capture."""
    try:
        with safe_open(shard_folder(folder) / span.name, framework="pt") as file:
            about = file.metadata() or {}  # opening compares header and file size
    except (FileNotFoundError, SafetensorError):
        return False
    return about.get("capture") == capture and about.get("span") == span_text(span)


def describe(folder: Path, name: str) -> ShardEntry:
    """Read a shard back as the manifest is to know it, its checksum from the file itself."""
    path = shard_folder(folder) / name
    with safe_open(path, framework="pt") as file:
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask").bool()
        argmax, starts = file.get_tensor("argmax"), file.get_tensor("offsets")[:-1]
    follows = mask.clone()
    follows[starts] = False  # the first token of a sample is nobody's prediction
    agreed = (argmax[:-1] == ids[1:]) & follows[1:]
    return ShardEntry(
        name=name,
        samples=len(starts),
        tokens=len(ids),
        supervised=int(mask.sum()),
        agreed=int(agreed.sum()),
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
    )
