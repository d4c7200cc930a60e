"""Files of hidden states that another program left: read, checked, and found by their tokens.

vLLM's ExampleHiddenStatesConnector and what builds on it (speculators' hs_<row>.safetensors)
leave one safetensors file a sequence:

    token_ids      int64 [T]
    hidden_states  [T, A+1, D]   the streams after the layers that were asked for, ascending; the
                                 last one is that after all layers, before the final norm
    hidden_states_scales [T, 1, 1]   of speculators' float8 files alone: a value counts so much

No file says which layers, so data/foreign.py compares some with the verifier. A sequence is found
by its token ids, whatever its file is called.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.runtime import progress
from conf.schema import ConfigError
from data.fp8 import FP8
from data.records import TokenizedSample
from models.facts import VerifierFacts

IDS, STATES, SCALES = "token_ids", "hidden_states", "hidden_states_scales"
BLOCKS, BLOCK = 4, 1 << 12  # of a file that are compared, evenly spaced, and the bytes of one
SHORT = "fewer or more states than tokens"
SHAPE = "hidden_states that are not [T, A+1, D]"
TORN = "not a whole safetensors file"
FOREIGN = "no token_ids and hidden_states"


@dataclass
class Dump:
    """The usable files of a folder, and how many others there are, by reason."""

    folder: Path
    files: dict[bytes, Path] = field(default_factory=dict)  # by the digest of their token ids
    unusable: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # by reason: the first such file

    @classmethod
    def open(cls, folder: Path, facts: VerifierFacts, dtype: torch.dtype) -> "Dump":
        """Read the header and the token ids of every file in ``folder`` and below it.

        A file that is torn or holds other than one state a token is counted and left out. Raises
        ConfigError, with both values, for states of another width, number or dtype than wanted.
        """
        if not folder.is_dir():
            raise ConfigError(
                f"capture.dumped={folder}: no such folder; give the one that holds the "
                f".safetensors files with {IDS} and {STATES}"
            )
        dump = cls(folder)
        paths = sorted(folder.rglob("*.safetensors"))
        for path in progress(paths, len(paths), "open dumped states", "file"):
            try:
                found = read_ids(path, facts, dtype)
            except SafetensorError:
                found = TORN
            if isinstance(found, str):
                dump.unusable[found] += 1
                dump.first.setdefault(found, path.name)
            else:
                dump.files.setdefault(key_of(found), path)
        if not dump.files:
            raise ConfigError(
                f"capture.dumped={folder}: holds no usable file{dump.reasons()}; give a folder of "
                f".safetensors files with {IDS} [T] and {STATES} [T, A+1, D]"
            )
        return dump

    def find(self, sample: TokenizedSample) -> Path | None:
        return self.files.get(key_of(sample.input_ids))

    def reasons(self) -> str:
        parts = [f"{n} with {why} (first {self.first[why]})" for why, n in self.unusable.items()]
        return f" ({', '.join(parts)})" if parts else ""


def key_of(ids: Tensor) -> bytes:
    """A digest: a folder of a million sequences takes 60 MB."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().data).digest()


def read_ids(path: Path, facts: VerifierFacts, dtype: torch.dtype) -> Tensor | str:
    """The token ids of a usable file, or the reason why it is none."""
    with safe_open(path, framework="pt") as file:
        if not {IDS, STATES} <= set(file.keys()):
            return FOREIGN
        ids, states = file.get_tensor(IDS), file.get_slice(STATES)
        shape = list(states.get_shape())
        if len(shape) != 3:
            return SHAPE
        if shape[0] != len(ids):
            return SHORT
        refuse_other_layout(path, shape, facts)
        stored = FP8 if SCALES in file.keys() else dtype  # noqa: SIM118
        found = file.get_slice(STATES)[:0].dtype
        if found != stored:
            raise ConfigError(
                f"{path}: {STATES} are {name_of(found)}, must be {name_of(stored)}, as "
                f"verifier.dtype={name_of(dtype)} says; set that to what the states were computed "
                "in"
            )
        return ids


def refuse_other_layout(path: Path, shape: list[int], facts: VerifierFacts) -> None:
    _, number, width = shape
    if width != facts.hidden_size:
        raise ConfigError(
            f"{path}: states of width {width}, must be {facts.hidden_size}, the hidden_size of "
            f"{facts.path}; name the verifier that they come from"
        )
    wanted = len(facts.aux_layers) + 1
    if number != wanted:
        raise ConfigError(
            f"{path}: {number} states a token, must be {wanted}: verifier.aux_layers="
            f"{facts.aux_layers} and the last; name the layers that were dumped in "
            "verifier.aux_layers"
        )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_streams(path: Path, sample: TokenizedSample) -> Tensor:
    """[T, A+1, D] of the file that holds ``sample``. Raises ConfigError if it changed meanwhile."""
    try:
        with safe_open(path, framework="pt") as file:
            ids, states = file.get_tensor(IDS), file.get_tensor(STATES)
            scaled = SCALES in file.keys()  # noqa: SIM118
            scales = file.get_tensor(SCALES) if scaled else None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); dump it again") from error
    if not torch.equal(ids.to(torch.int64), sample.input_ids) or len(states) != len(ids):
        raise ConfigError(
            f"{path}: holds {len(states)} states of {len(ids)} tokens that are not those of "
            f"sample {sample.id}, which has {len(sample.input_ids)}; dump it again"
        )
    rows = states if scales is None else states.float() * scales
    if not rows.isfinite().all():
        raise ConfigError(
            f"{path}: the states of sample {sample.id} are not finite; delete the file, then dump "
            "the sample again in another precision, or take capture.missing=compute"
        )
    return rows


def listing(folder: Path) -> str:
    """A digest of the files: of names, sizes and some blocks. It changes when another dump takes
    over, even one of the same sequences: other states differ in practically every block.
    """
    files = sorted(folder.rglob("*.safetensors"))
    digest = hashlib.sha256()
    for path in progress(files, len(files), "compare dumped states", "file"):
        size = path.stat().st_size
        digest.update(json.dumps([str(path.relative_to(folder)), size]).encode())
        with path.open("rb", buffering=0) as file:
            for number in range(BLOCKS):
                file.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:12]
