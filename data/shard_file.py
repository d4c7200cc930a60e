"""Shard files: written whole or not at all, described for the manifest, and checked."""

import hashlib
import json
import os
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.runtime import sync_folder
from conf.schema import ConfigError
from data.chains import asking_rows
from data.manifest import ShardEntry, shard_folder
from data.shard_plan import ShardSpan
from data.shards import INDEX, HiddenStateShard, raw
from models.bundled import sha256_of

CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


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
    """Read a shard back as the manifest is to know it, its checksum from the file itself.

    Raises ConfigError when its parts do not fit each other.
    """
    path = shard_folder(folder) / name
    with safe_open(path, framework="pt") as file:
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask").bool()
        offsets, argmax = file.get_tensor("offsets"), file.get_tensor("argmax")
    rows = asking_rows(mask, offsets).nonzero().flatten()
    if len(rows) != len(argmax):
        raise damaged(path, f"{len(argmax)} rows of argmax, must be {len(rows)} by its mask")
    return ShardEntry(
        name=name,
        samples=len(offsets) - 1,
        tokens=len(ids),
        asking=len(argmax),
        supervised=int(mask.sum()),
        agreed=int((argmax == ids[rows + 1]).sum()),
        bytes=path.stat().st_size,
        sha256=sha256_of(path),
        index=index_digest(path),
    )


def damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}; delete the file and run data.capture, which renews it")


def index_digest(path: Path) -> str:
    """xxh3 of the header and of the small tensors that say where each sample lies: milliseconds.

    Raises SafetensorError when the file is cut or its header is damaged beyond reading.
    """
    digest = xxhash.xxh3_128()
    with safe_open(path, framework="pt") as file, path.open("rb") as stream:
        length = stream.read(8)
        digest.update(length + stream.read(int.from_bytes(length, "little")))
        for name in INDEX:
            digest.update(raw(file.get_tensor(name)))
    return digest.hexdigest()
