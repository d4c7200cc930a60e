"""Shard files: written whole or not at all, described for the manifest, and checked."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
from data.shards import BY_TOKEN, INDEX, ROWS, HiddenStateShard, digest_of, raw
from models.bundled import sha256_of

Buffer = bytes | memoryview
READ_BYTES = 1 << 24  # of a file at one go
CODES = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class Sums:
    """Of the bytes of a shard file."""

    sha256: str
    xxh3: str  # 40 times quicker: what a read-back is compared with


def write_shard(folder: Path, span: ShardSpan, shard: HiddenStateShard, capture: str) -> Sums:
    """Write a shard whole or not at all, and return the checksums of what was written.

    ``capture`` is the text by which a later run knows its own (Manifest.source).

    The safetensors layout is written here: the library orders its header at random and tells a
    full disk by a text only. This way equal states are equal bytes, OSError keeps its number,
    and the checksums cost no second read.
    """
    ids = json.dumps(shard.ids)
    about = {"format": "pt", "capture": capture, "span": span_text(span), "ids": ids}
    path = shard_folder(folder) / span.name
    temporary = path.with_name(path.name + ".tmp")
    sha256, xxh3 = hashlib.sha256(), xxhash.xxh3_128()
    try:
        with temporary.open("wb") as file:
            for block in contents_of(shard.tensors(), about):
                sha256.update(block)
                xxh3.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return Sums(sha256.hexdigest(), xxh3.hexdigest())


def contents_of(tensors: dict[str, Tensor], about: dict[str, str]) -> Iterator[Buffer]:
    """The bytes of a shard, one part after the other; ``about`` is what its header says."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # aligned
    header = layout_of({name: tensors[name] for name in order}, dict(about))
    header["__metadata__"]["index"] = own_digest(header, [tensors[name] for name in INDEX])
    yield packed(header)
    yield from (raw(tensors[name]) for name in order)


def read_back(path: Path, sums: Sums) -> None:
    """Compare a file just written with what was to be written. Raises ConfigError.

    Where the system allows it the file is dropped from memory first, so that the disk answers.
    """
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(READ_BYTES):
            found.update(block)
    if found.hexdigest() != sums.xxh3:
        raise ConfigError(
            f"{path}: reads back with xxh3 {found.hexdigest()}, must be {sums.xxh3} as written; "
            "delete the file, check the disk and capture again"
        )


def header_of(tensors: dict[str, Tensor], about: dict[str, str]) -> bytes:
    """What a safetensors file begins with: its length, and JSON padded to eight bytes."""
    return packed(layout_of(tensors, about))


def layout_of(tensors: dict[str, Tensor], about: dict[str, str]) -> dict[str, dict]:
    header: dict[str, dict] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    return header


def packed(header: dict[str, dict]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def own_digest(header: dict[str, dict], index: list[Tensor]) -> str:
    """xxh3 of a header, but for the place of this digest, and of the tensors of INDEX.

    By it a shard is known that a killed capture left, and no manifest: all that says where a
    sample lies and whose it is.
    """
    about = {name: text for name, text in header["__metadata__"].items() if name != "index"}
    digest = xxhash.xxh3_128(json.dumps(header | {"__metadata__": about}).encode())
    for tensor in index:
        digest.update(raw(tensor))
    return digest.hexdigest()


def damaged_index(path: Path) -> str | None:
    """Compare a shard's header and small tensors with the digest in it -> what is wrong, if any is.

    Raises SafetensorError when the file is cut or a tensor is not there.
    """
    with safe_open(path, framework="pt") as file, path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        index = [file.get_tensor(name) for name in INDEX]
    wanted, found = header["__metadata__"].get("index"), own_digest(header, index)
    return None if found == wanted else f"its index is {found}, must be {wanted} by its header"


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


def describe(folder: Path, name: str, sha256: str | None = None) -> ShardEntry:
    """A shard as the manifest is to know it, from its file.

    ``sha256`` of the file where it is known; None reads it and compares every sample with its
    digest. Raises ConfigError when the parts do not fit each other or one of them is damaged.
    """
    path = shard_folder(folder) / name
    wrong = damaged_index(path)  # first, since all else looks where the index says
    if wrong:
        raise damaged(path, wrong)
    with safe_open(path, framework="pt") as file:
        ids, mask = file.get_tensor("input_ids"), file.get_tensor("loss_mask").bool()
        offsets, argmax = file.get_tensor("offsets"), file.get_tensor("argmax")
    rows = asking_rows(mask, offsets).nonzero().flatten()
    if len(rows) != len(argmax):
        raise damaged(path, f"{len(argmax)} rows of argmax, must be {len(rows)} by its mask")
    if sha256 is None:
        wrong = damaged_sample(path, range(len(offsets) - 1))
        if wrong:
            raise damaged(path, wrong)
        sha256 = sha256_of(path)
    return ShardEntry(
        name=name,
        samples=len(offsets) - 1,
        tokens=len(ids),
        asking=len(argmax),
        supervised=int(mask.sum()),
        agreed=int((argmax == ids[rows + 1]).sum()),
        bytes=path.stat().st_size,
        sha256=sha256,
        index=index_digest(path),
    )


def damaged_sample(path: Path, places: Iterable[int]) -> str | None:
    """Compare the samples ``places`` of a shard with their digests -> what is wrong, if any is."""
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        by_token, by_asking = file.get_tensor("offsets"), file.get_tensor("last_offsets")
        digests, ids = file.get_tensor("digests"), json.loads(file.metadata()["ids"])
        for place in places:
            parts = []
            for name in ROWS:
                if name in names:
                    offsets = by_token if name in BY_TOKEN else by_asking
                    start, end = offsets[place : place + 2].tolist()
                    parts.append(raw(file.get_slice(name)[start:end]))
            if digest_of(parts) != digests[place]:
                return f"sample {ids[place]} is not as it was written"
    return None


def damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: {why}; run data.capture with capture.verify=full, which writes this shard again"
    )


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
