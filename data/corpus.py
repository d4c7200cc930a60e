"""The prepared samples: flat in memory, and in a folder as samples.safetensors and samples.json."""

import errno
import hashlib
import json
import os
import shutil
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from conf.runtime import sync_folder, write_atomically
from conf.schema import ConfigError
from data.records import Conversation, PreparedData, Skipped, TokenizedSample

FORMAT = 1
TENSORS = "samples.safetensors"
FACTS = "samples.json"


@dataclass
class Corpus:
    """Samples one behind the other: five bytes a token, and some ninety a sample."""

    tokens: array = field(default_factory=lambda: array("i"))
    mask: bytearray = field(default_factory=bytearray)
    offsets: array = field(default_factory=lambda: array("q", [0]))  # n + 1 places in tokens
    ids: list[str] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of a sample's tokens
    prompts: list[bytes] = field(default_factory=list)  # of its tokens before the first answer

    def add(self, conversation: Conversation, tokens: list[int], mask: list[bool]) -> None:
        flat = array("i", tokens)
        self.tokens.extend(flat)
        self.mask.extend(mask)
        self.offsets.append(len(self.tokens))
        self.ids.append(conversation.id)
        self.greedy.append(conversation.greedy)
        self.digests.append(hashlib.sha256(flat).digest())
        self.prompts.append(hashlib.sha256(flat[: mask.index(True)]).digest())

    def duplicates(self) -> int:
        """Samples that equal an earlier one token for token."""
        return len(self.digests) - len(set(self.digests))

    def overlap(self, held_out: list[bool]) -> int:
        """Held-out samples whose prompt, token for token, is a training prompt as well."""
        training = {p for p, held in zip(self.prompts, held_out, strict=True) if not held}
        return sum(p in training for p, held in zip(self.prompts, held_out, strict=True) if held)


def count_labels(mask: Tensor, tokens: Tensor, wanted: Tensor, vocab_size: int) -> Tensor:
    """How often each token is a label: supervised, and not the first of its answer.

    All [total], flat; ``wanted`` chooses samples. An answer's first token is the verifier's at
    serving. Neighbouring samples cannot join: each starts with a header, which is no answer.
    """
    label = mask.bool() & wanted
    label[1:] &= mask[:-1].bool()
    label[:1] = False
    return torch.bincount(tokens[label].long(), minlength=vocab_size)  # [V]


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


def write(
    folder: Path, corpus: Corpus, held_out: list[bool], rows: Skipped, made_with: Provenance
) -> None:
    """Write the folder whole or not at all. Raises ConfigError when the disk does not take it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    offsets = torch.frombuffer(corpus.offsets, dtype=torch.int64)
    tokens = torch.frombuffer(corpus.tokens, dtype=torch.int32)
    mask = torch.frombuffer(corpus.mask, dtype=torch.uint8)
    training = (~torch.tensor(held_out)).repeat_interleave(offsets.diff())
    counts = count_labels(mask, tokens, training, made_with.vocab_size)
    tensors = {"tokens": tokens, "mask": mask, "offsets": offsets, "token_counts": counts}
    facts = {
        "format": FORMAT,
        **asdict(made_with),
        "rows": asdict(rows),
        "duplicates": corpus.duplicates(),
        "overlap": corpus.overlap(held_out),
        "ids": corpus.ids,
        "greedy": corpus.greedy,
        "held_out": held_out,
    }
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary / TENSORS)
        with (temporary / TENSORS).open("rb") as file:
            os.fsync(file.fileno())
        write_atomically(temporary / FACTS, json.dumps(facts, ensure_ascii=False))
        publish(temporary, folder)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"run.cache={folder.parent}: the prepared data cannot be written ({error}); "
            "free space there or choose another run.cache"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Give the folder its name; another process that was first made the same samples."""
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    sync_folder(folder.parent)


def read_facts(folder: Path) -> dict[str, Any]:
    """What samples.json holds. Raises ConfigError when it is not there or of another format."""
    try:
        facts = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise incomplete(folder, str(error)) from error
    if facts.get("format") != FORMAT:
        raise incomplete(folder, f"format {facts.get('format')}, this version reads {FORMAT}")
    return facts


def incomplete(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{folder}: is no prepared data ({reason}); delete it and run python -m data.prepare"
    )


def load_prepared(folder: Path) -> PreparedData:
    """Read what the prepare stage left. Raises ConfigError when the folder is not whole."""
    facts = read_facts(folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise incomplete(folder, str(error)) from error
    bounds = tensors["offsets"].tolist()
    if len(bounds) != len(facts["ids"]) + 1 or bounds[-1] != tensors["tokens"].numel():
        raise incomplete(folder, "samples and ids are not equally many")
    tokens, mask = tensors["tokens"].long(), tensors["mask"].bool()
    samples = [
        TokenizedSample(name, tokens[start:end], mask[start:end], greedy, held)
        for name, start, end, greedy, held in zip(
            facts["ids"], bounds, bounds[1:], facts["greedy"], facts["held_out"], strict=False
        )
    ]
    rows = Skipped(**facts["rows"])
    return PreparedData(folder, facts["fingerprint"], samples, tensors["token_counts"], rows)
