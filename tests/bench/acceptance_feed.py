"""The frozen training samples of the acceptance bench in one file, and the order they come in.

The bench writes the file once from Eyrie's cache; every trainer that is compared reads it. It loads
in the peers' environments too, so it imports torch, safetensors and the standard library alone.

One safetensors file a split. S samples lie end to end, N tokens in all; D verifier width, A aux
layers, V verifier vocabulary, Vd draft vocabulary:

    starts     int64 [S+1]     first row of each sample, and the end of the last
    d2t        int64 [Vd]      target id minus draft id, ids ascending
    input_ids  int32 [N]
    aux        bf16  [N, A*D]  streams after the aux layers, concatenated, layers ascending
    last       bf16  [N, D]    the state after the final norm, at ALL rows
    head       bf16  [V, D]    the verifier's output matrix
    embedding  bf16  [V, D]    and its table of tokens
    loss_mask  bool  [N]       answer tokens, the end of turn included; not shifted
    t2d        bool  [V]       membership in the draft vocabulary

Its metadata holds one entry, "facts": the JSON object of ``Facts``.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

BATCH = 2  # samples an update
STORED = {  # in the file's order: the widest first, so that every tensor is aligned
    "starts": torch.int64,
    "d2t": torch.int64,
    "input_ids": torch.int32,
    "aux": torch.bfloat16,
    "last": torch.bfloat16,
    "head": torch.bfloat16,
    "embedding": torch.bfloat16,
    "loss_mask": torch.bool,
    "t2d": torch.bool,
}
SPELT = {torch.int64: "I64", torch.int32: "I32", torch.bfloat16: "BF16", torch.bool: "BOOL"}


@dataclass(frozen=True)
class Facts:
    """What a draft for this verifier needs to know of it."""

    source: str  # which cache the states are from
    verifier: str  # the folder or name that a trained head's config.json gives
    num_layers: int
    aux_layers: list[int]  # n = the stream after n layers
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_positions: int
    rope: dict[str, Any]


@dataclass(frozen=True)
class Ends:
    """The verifier's two tables and the draft vocabulary's two maps."""

    head: Tensor  # [V, D]
    embedding: Tensor  # [V, D]
    d2t: Tensor  # [Vd]
    t2d: Tensor  # [V]

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the verifier's id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t))


@dataclass(frozen=True)
class FeedSample:
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    aux: Tensor  # [T, A*D]
    last: Tensor  # [T, D]


class Feed(Sequence[FeedSample]):
    """A file of samples, mapped: a row is read when it is used."""

    def __init__(self, path: Path):
        with safe_open(path, framework="pt") as file:
            self.facts = Facts(**json.loads(file.metadata()["facts"]))
            self._tensors = {name: file.get_tensor(name) for name in STORED}
        tensors = self._tensors
        self.starts: list[int] = tensors["starts"].tolist()
        self.ends = Ends(*(tensors[name] for name in ("head", "embedding", "d2t", "t2d")))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> FeedSample:
        place = range(len(self))[index]  # IndexError beyond the last
        rows = slice(*self.starts[place : place + 2])
        tensors = {
            name: self._tensors[name][rows].clone()
            for name in ("input_ids", "loss_mask", "aux", "last")
        }
        return FeedSample(tensors.pop("input_ids").long(), **tensors)

    def order(self, seed: int, epoch: int) -> list[int]:
        """All samples, shuffled by ``seed`` and ``epoch`` alone."""
        digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return torch.randperm(len(self), generator=generator).tolist()

    def batches(self, seed: int) -> Iterator[list[int]]:
        """Numbers of the samples of every update, without end. An epoch of an odd number of samples
        goes on in the first batch of the next, so no sample is left out."""
        waiting: list[int] = []
        epoch = 0
        while True:
            waiting += self.order(seed, epoch)
            epoch += 1
            while len(waiting) >= BATCH:
                yield waiting[:BATCH]
                waiting = waiting[BATCH:]


def write_feed(
    path: Path, facts: Facts, ends: Ends, lengths: Sequence[int], samples: Iterable[FeedSample]
) -> None:
    """Write ``samples``, whose tokens ``lengths`` counts, one by one: none is held in memory.

    Raises ValueError when a sample has another length, or there are more or fewer of them.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    total = int(starts[-1])
    shapes = {
        "starts": tuple(starts.shape),
        "input_ids": (total,),
        "aux": (total, len(facts.aux_layers) * facts.hidden_size),
        "last": (total, facts.hidden_size),
        "loss_mask": (total,),
        **{name: tuple(getattr(ends, name).shape) for name in ("d2t", "head", "embedding", "t2d")},
    }
    partial = path.with_name(path.name + ".partial")
    places = allotted(partial, shapes, {"facts": json.dumps(asdict(facts))})
    places["starts"].copy_(starts)
    for name in ("d2t", "head", "embedding", "t2d"):
        places[name].copy_(getattr(ends, name))
    count = 0
    for count, (sample, place) in enumerate(zip(samples, starts.tolist(), strict=False), 1):
        if count > len(lengths) or len(sample.input_ids) != lengths[count - 1]:
            raise ValueError(f"sample {count}: not of the length that was told")
        rows = slice(place, place + len(sample.input_ids))
        for name in ("input_ids", "loss_mask", "aux", "last"):
            places[name][rows].copy_(getattr(sample, name))
    if count != len(lengths):
        raise ValueError(f"{count} samples came, {len(lengths)} were told")
    partial.replace(path)


def allotted(
    path: Path, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]
) -> dict[str, Tensor]:
    """A safetensors file of zeros at ``path``; what is written to its tensors goes to the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype in STORED.items():
        begin, end = end, end + prod(shapes[name]) * dtype.itemsize
        spelt = {"dtype": SPELT[dtype], "shape": shapes[name], "data_offsets": [begin, end]}
        header[name] = spelt
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    block = torch.from_file(str(path), shared=True, size=8 + len(text) + end, dtype=torch.uint8)
    data = block[8 + len(text) :]
    return {
        name: data[slice(*header[name]["data_offsets"])].view(dtype).view(shapes[name])
        for name, dtype in STORED.items()
    }
