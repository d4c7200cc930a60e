"""Raw rows to encoded samples, a chunk at a time: what one worker of the prepare stage does.

A chunk's result depends on its rows alone, so it is the same whoever makes it, and when.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.schema import DataSection, VerifierSection
from data.dialects import RowRefused
from data.records import Conversation
from data.rows import Row
from data.sources import RowLog, read_one
from data.split import base_id, digest_of, is_taken, place
from data.template import encode
from models.verifier import load_tokenizer

CUT_SHORT = "longer than data.max_length: cut there"
BEYOND = "no answer within data.max_length"
FOREIGN_TOKEN = "token id beyond the verifier's embedding"
NOT_TAKEN = "left out by data.weights"


@dataclass(frozen=True)
class Chunk:
    """Some rows of one entry of data.path, in order."""

    source: int
    rows: list[Row]


@dataclass(frozen=True)
class SampleBlock:
    """s samples with n tokens, one behind the other."""

    tokens: NDArray[np.int32]  # [n]
    mask: NDArray[np.uint8]  # [n]
    lengths: NDArray[np.int64]  # [s] tokens of each
    id_text: NDArray[np.uint8]  # the ids in UTF-8
    id_lengths: NDArray[np.int64]  # [s] bytes of each
    greedy: NDArray[np.uint8]  # [s]
    digest: NDArray[np.uint64]  # [s] of tokens and mask
    prompt: NDArray[np.uint64]  # [s] of the tokens before the first answer
    base: NDArray[np.uint64]  # [s] of the conversation's id
    place: NDArray[np.float64]  # [s] where that id falls in [0, 1)

    def first(self, count: int) -> "SampleBlock":
        """The first ``count`` samples."""
        ends = {
            "tokens": int(self.lengths[:count].sum()),
            "id_text": int(self.id_lengths[:count].sum()),
        }
        ends["mask"] = ends["tokens"]
        names = [item.name for item in fields(self)]
        return SampleBlock(**{name: getattr(self, name)[: ends.get(name, count)] for name in names})


@dataclass(frozen=True)
class Outcome:
    """What became of one row: the first three are notes for the log, else it is a sample."""

    where: str
    refusal: str = ""
    note: str = ""
    changes: tuple[str, ...] = ()

    def tell(self, log: RowLog) -> None:
        log.rows_in += 1
        if self.refusal:
            log.skip(self.refusal, self.where)
        else:
            log.rows_out += 1
        for name in self.changes:
            log.change(name)
        log.note(self.note)


class Encoder:
    """The tokenizer, the template and the settings that make samples of rows."""

    def __init__(self, verifier: VerifierSection, data: DataSection, cache: Path, vocab_size: int):
        self.tokenizer = load_tokenizer(verifier, cache)
        self.data, self.vocab_size = data, vocab_size
