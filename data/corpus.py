"""The prepared samples on disk: a folder with samples.safetensors and samples.json.

samples.safetensors, S samples of N tokens, V tokens in the verifier's embedding:

    tokens  int32 [N]     mask  uint8 [N]     offsets  int64 [S+1] places in both
    id_text uint8 [..]                        id_offsets int64 [S+1] places in it
    greedy, held_out  uint8 [S]               prompts  int64 [S]
    token_counts, held_out_counts  int64 [V]  labels of the training and of the held-out samples

samples.json says what they were made of and what became of every row.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from conf.runtime import write_atomically
from conf.schema import ConfigError
from data.columns import Columns, runs_of
from data.records import PreparedData, Samples, Skipped
from data.shard_file import header_of
from data.split import Flags

FORMAT = 3
TENSORS = "samples.safetensors"
FACTS = "samples.json"
BLOCK = 1 << 24  # bytes of a file at one go
COUNTED = 1 << 20  # tokens counted at once
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Provenance:
    """What the samples were made with; kept beside them for the stages after."""

    fingerprint: str
    path: list[str]
    template: str  # where it lies
    template_hash: str
    template_kwargs: dict[str, Any]
    tokenizer_hash: str
    vocab_size: int  # V


@dataclass(frozen=True)
class SourceFacts:
    """What one entry of data.path gave."""

    path: str
    weight: float
    rows_in: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass(frozen=True)
class Origin:
    """What is known before the samples are counted."""

    made_with: Provenance
    sources: list[SourceFacts]


@dataclass(frozen=True)
class Facts:
    """What samples.json holds."""

    made_with: Provenance
    rows: Skipped
    sources: list[SourceFacts]
    held_out: int  # samples
    duplicates: int  # samples equal to an earlier one, those left out included
    moved: int  # samples that data.split would not hold out as their prompt is trained on
    overlap: int  # held-out samples whose prompt is trained on: only if there is no other prompt
    digest: str  # xxh3 of samples.safetensors, compared whenever it is loaded


@dataclass(frozen=True)
class Chosen:
    """Which of the read samples are kept, and which of the kept ones are held out."""

    kept: Flags  # [read]
    held_out: Flags  # [S]
    duplicates: int
    moved: int
    overlap: int


@dataclass(frozen=True)
class Counted:
    """One pass over all tokens."""

    training: Ints  # [V] labels
    held_out: Ints  # [V]
    supervised: Ints  # [read] tokens of each sample


def write(folder: Path, columns: Columns, chosen: Chosen, rows: Skipped, origin: Origin) -> None:
    """Write the samples that were chosen and publish ``folder``, whole or not at all.

    An OSError is the disk's.
    """
    columns.finish()
    kept = chosen.kept
    lengths, source = columns.read("lengths"), columns.read("source")[kept]
    counted = count(columns, chosen, lengths, origin.made_with.vocab_size)
    digest = write_tensors(columns.folder / TENSORS, columns, chosen, counted)
    sizes = [lengths[kept], counted.supervised[kept], np.ones(len(source), np.int64)]
    by_source = [
        np.bincount(source, size, len(origin.sources)).astype(np.int64).tolist() for size in sizes
    ]
    facts = Facts(
        made_with=origin.made_with,
        rows=rows,
        sources=[
            replace(one, tokens=tokens, supervised=supervised, samples=samples)
            for one, tokens, supervised, samples in zip(origin.sources, *by_source, strict=True)
        ],
        held_out=int(chosen.held_out.sum()),
        duplicates=chosen.duplicates,
        moved=chosen.moved,
        overlap=chosen.overlap,
        digest=digest,
    )
    text = json.dumps({"format": FORMAT, **asdict(facts)}, ensure_ascii=False)
    write_atomically(columns.folder / FACTS, text)
    columns.publish(folder)


def count(columns: Columns, chosen: Chosen, lengths: Ints, vocab_size: int) -> Counted:
    """Read tokens and masks once, some samples at a time."""
    held_out = np.zeros(len(lengths), np.bool_)
    held_out[chosen.kept] = chosen.held_out
    training = chosen.kept & ~held_out
    found = Counted(*(np.zeros(n, np.int64) for n in (vocab_size, vocab_size, len(lengths))))
    ends = lengths.cumsum()
    first = 0
    with columns.path("tokens").open("rb") as tokens, columns.path("mask").open("rb") as mask:
        while first < len(lengths):
            reach = ends[first] - lengths[first] + COUNTED
            last = max(first + 1, int(np.searchsorted(ends, reach, side="right")))
            some, here = lengths[first:last], slice(first, last)
            total = int(some.sum())
            words = np.fromfile(tokens, np.int32, total)
            masked = np.fromfile(mask, np.uint8, total)
            starts = some.cumsum() - some
            found.supervised[here] = np.add.reduceat(masked, starts, dtype=np.int64)
            label = labels(masked, starts)
            for counts, wanted in ((found.training, training), (found.held_out, held_out)):
                chosen_words = words[label & np.repeat(wanted[here], some)]
                counts += np.bincount(chosen_words, minlength=vocab_size)
            first = last
    return found


def labels(mask: NDArray[np.uint8], starts: Ints) -> Flags:
    """Which tokens are labels: supervised, and not the first of their answer.

    An answer's first token is the verifier's at serving. ``starts``: where the samples begin.
    """
    label = mask.astype(np.bool_)
    label[1:] &= label[:-1].copy()
    label[starts] = False
    return label


def write_tensors(path: Path, columns: Columns, chosen: Chosen, counted: Counted) -> str:
    """The safetensors layout, written in one go: what has an entry a token never lies in memory.

    Returns the digest of the file.
    """
    kept = chosen.kept
    lengths, id_lengths = columns.read("lengths"), columns.read("id_lengths")
    vectors = {
        "offsets": places(lengths[kept]),
        "id_offsets": places(id_lengths[kept]),
        "prompts": columns.read("prompt")[kept],
        "token_counts": counted.training,
        "held_out_counts": counted.held_out,
        "greedy": columns.read("greedy")[kept],
        "held_out": chosen.held_out.astype(np.uint8),
    }
    runs = {"tokens": runs_of(kept, lengths), "id_text": runs_of(kept, id_lengths)}
    runs["mask"] = runs["tokens"]
    shapes = {name: torch.from_numpy(vector).to("meta") for name, vector in vectors.items()}
    for name, own in runs.items():
        dtype = torch.int32 if name == "tokens" else torch.uint8
        shapes[name] = torch.empty(sum(map(len, own)), dtype=dtype, device="meta")
    order = sorted(shapes, key=lambda name: (-shapes[name].element_size(), name))  # aligned
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:

        def write(part: bytes | memoryview) -> None:
            digest.update(part)
            file.write(part)

        write(header_of({name: shapes[name] for name in order}, {"format": "pt"}))
        for name in order:
            blocks = columns.blocks(name, runs[name]) if name in runs else [vectors[name]]
            for block in blocks:
                write(block.data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def places(lengths: Ints) -> Ints:
    """Where each of things of these lengths starts, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])


def read_facts(folder: Path) -> Facts:
    """What samples.json holds. Raises ConfigError when it is not there or of another format."""
    try:
        known = json.loads((folder / FACTS).read_text())
        if known["format"] != FORMAT:
            raise incomplete(folder, f"format {known['format']}, this version reads {FORMAT}")
        return Facts(
            made_with=Provenance(**known["made_with"]),
            rows=Skipped(**known["rows"]),
            sources=[SourceFacts(**one) for one in known["sources"]],
            held_out=known["held_out"],
            duplicates=known["duplicates"],
            moved=known["moved"],
            overlap=known["overlap"],
            digest=known["digest"],
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise incomplete(folder, f"{type(error).__name__}: {error}") from error


def digest_of_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def incomplete(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{folder}: is no prepared data ({reason}); delete it and run python -m data.prepare"
    )


def load_prepared(folder: Path) -> PreparedData:
    """Map what the prepare stage left. Raises ConfigError when the folder is not whole.

    All of it is compared with its digest: at some gigabytes a second, five bytes a token.
    """
    facts = read_facts(folder)
    try:
        if digest_of_file(folder / TENSORS) != facts.digest:
            raise incomplete(folder, f"{TENSORS} is not as it was written")
        tensors = load_file(folder / TENSORS)  # mapped: nothing is read before it is used
    except (OSError, SafetensorError) as error:
        raise incomplete(folder, str(error)) from error
    samples = Samples(
        tokens=tensors["tokens"],
        mask=tensors["mask"],
        offsets=tensors["offsets"],
        id_text=tensors["id_text"],
        id_offsets=tensors["id_offsets"],
        greedy=tensors["greedy"].bool(),
        held_out=tensors["held_out"].bool(),
        prompts=tensors["prompts"],
    )
    if len(samples) != facts.rows.rows_out or len(samples.offsets) != len(samples) + 1:
        raise incomplete(folder, "the files are of two data sets")
    counts = tensors["token_counts"], tensors["held_out_counts"]
    return PreparedData(folder, facts.made_with.fingerprint, samples, *counts, facts.rows)
