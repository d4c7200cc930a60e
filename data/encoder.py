"""Raw rows to encoded samples, a chunk at a time: what one worker of the prepare stage does.

A chunk's result depends on its rows alone: it is the same whoever makes it, and when.
"""

from array import array
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conf.schema import DataSection, VerifierSection
from data.dialects import Reading, RowRefused
from data.generated import REWRITTEN, is_rewritten
from data.records import Conversation
from data.render import ChatTemplate
from data.rows import Row
from data.sources import read_one
from data.split import base_id, digest_of, is_taken, place, prompt_digest
from data.template import Encoded, encode_all
from models.facts import load_tokenizer

CUT_ANSWER = "answer cut by its length limit (data.drop_cut)"
CUT_SHORT = "longer than data.max_length: cut there"
BEYOND = "no answer within data.max_length"
STRANGE = "token id outside the verifier's embedding"
NOT_TAKEN = "left out by data.weights"


@dataclass(frozen=True)
class Chunk:
    """Some rows of one entry of data.path, in order."""

    source: int
    weight: float
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
    source: NDArray[np.int64]  # [s] which entry of data.path
    digest: NDArray[np.int64]  # [s] of tokens and mask
    prompt: NDArray[np.int64]  # [s] of prompt_of
    base: NDArray[np.int64]  # [s] of the conversation's id
    place: NDArray[np.float64]  # [s] where that id falls in [0, 1)

    def first(self, count: int) -> "SampleBlock":
        """The first ``count`` samples."""
        ends = {item.name: count for item in fields(self)}
        ends["tokens"] = ends["mask"] = int(self.lengths[:count].sum())
        ends["id_text"] = int(self.id_lengths[:count].sum())
        return SampleBlock(**{name: getattr(self, name)[:end] for name, end in ends.items()})


@dataclass(frozen=True)
class Outcome:
    """What there is to say of one row: why it is no sample, or what was changed."""

    row: int  # of its chunk
    where: str
    refusal: str = ""
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EncodedChunk:
    source: int
    rows: int
    samples: SampleBlock
    sample_rows: list[int]  # the row of each sample
    outcomes: list[Outcome]  # of the rows of which there is something to say, in order
    said: list[str] = field(default_factory=list)  # lines that another process is to print

    def first(self, count: int) -> "EncodedChunk":
        """The rows up to the sample number ``count``, or all if there are fewer."""
        if len(self.sample_rows) < count:
            return self
        rows = self.sample_rows[count - 1] + 1 if count else 0
        told = [outcome for outcome in self.outcomes if outcome.row < rows]
        samples, places = self.samples.first(count), self.sample_rows[:count]
        return EncodedChunk(self.source, rows, samples, places, told, self.said)


@dataclass(frozen=True)
class EncoderJob:
    """What a process needs to know to encode rows."""

    verifier: VerifierSection
    data: DataSection
    cache: Path
    vocab_size: int  # V, the rows of the verifier's embedding


class Encoder:
    """The tokenizer, the template and the settings that make samples of rows."""

    def __init__(self, job: EncoderJob, template: ChatTemplate):
        self.job, self.template = job, template
        self.data, self.vocab_size = job.data, job.vocab_size

    @classmethod
    def load(cls, job: EncoderJob) -> "Encoder":
        """For a process that has no tokenizer yet: a second or so."""
        tokenizer = load_tokenizer(job.verifier, job.cache)
        return cls(job, ChatTemplate(tokenizer, job.data.template_kwargs))

    def encode(self, chunk: Chunk) -> EncodedChunk:
        """Read, mark, tokenise and cut the rows; one that gives no sample leaves its reason."""
        readings = [weighed(read_one(row), chunk.weight) for row in chunk.rows]
        talks = [one.conversation for one in readings if isinstance(one, Reading)]
        results = iter(encode_all(talks, self.template, self.data.last_turn_only))
        outcomes: list[Outcome] = []
        rows: list[int] = []
        made: list[Made] = []
        for number, (row, reading) in enumerate(zip(chunk.rows, readings, strict=True)):
            if isinstance(reading, RowRefused):
                outcomes.append(refused(number, row, reading, []))
                continue
            notes = reading.notes
            result = self.finished(reading.conversation, next(results))
            if isinstance(result, RowRefused):
                outcomes.append(refused(number, row, result, notes))
                continue
            rows.append(number)
            made.append(result)
            changes = [*reading.changes, *result.changes]
            if changes or notes:
                outcomes.append(Outcome(number, row.where, "", tuple(changes), tuple(notes)))
        samples = block_of(made, chunk.source)
        return EncodedChunk(chunk.source, len(chunk.rows), samples, rows, outcomes)

    def finished(
        self, conversation: Conversation, encoded: Encoded | RowRefused
    ) -> "Made | RowRefused":
        """Cut a sample to its length and see that the verifier knows its tokens."""
        if isinstance(encoded, RowRefused):
            return encoded
        if conversation.cut and self.data.drop_cut:
            return RowRefused(CUT_ANSWER)
        limit = self.data.max_length
        ids, mask = encoded.input_ids[:limit], bytes(encoded.loss_mask[:limit])
        if not any(mask):
            return RowRefused(BEYOND)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            return RowRefused(STRANGE)
        tokens = np.frombuffer(array("i", ids), np.int32)  # a third of the time of np.array
        changes = [CUT_SHORT] if len(encoded.input_ids) > limit else []
        if not self.data.last_turn_only and is_rewritten(conversation, encoded.loss_mask):
            changes.append(REWRITTEN)
        flags = np.frombuffer(mask, np.uint8)
        return Made(conversation.id, tokens, flags, conversation.greedy, changes)


@dataclass(frozen=True)
class Made:
    """One sample, before it joins the others."""

    id: str
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    greedy: bool
    changes: list[str]


def refused(number: int, row: Row, refusal: RowRefused, notes: list[str]) -> Outcome:
    told = [*notes, refusal.note] if refusal.note else notes
    return Outcome(number, row.where, refusal.reason, (), tuple(told))


def weighed(reading: Reading | RowRefused, weight: float) -> Reading | RowRefused:
    if isinstance(reading, Reading) and not is_taken(reading.conversation.id, weight):
        return RowRefused(NOT_TAKEN)
    return reading


def block_of(made: list[Made], source: int) -> SampleBlock:
    ids = [one.id.encode("utf-8", "surrogatepass") for one in made]
    bases = [base_id(one.id) for one in made]
    copied = [digest_of(one.tokens.tobytes() + one.mask.tobytes()) for one in made]
    return SampleBlock(
        tokens=np.concatenate([np.empty(0, np.int32), *(one.tokens for one in made)]),
        mask=np.concatenate([np.empty(0, np.uint8), *(one.mask for one in made)]),
        lengths=np.array([len(one.tokens) for one in made], np.int64),
        id_text=np.frombuffer(b"".join(ids), np.uint8),
        id_lengths=np.array([len(name) for name in ids], np.int64),
        greedy=np.array([one.greedy for one in made], np.uint8),
        source=np.full(len(made), source, np.int64),
        digest=np.array(copied, np.int64),
        prompt=np.array([prompt_digest(prompt_of(one)) for one in made], np.int64),
        base=np.array(
            [digest_of(base.encode("utf-8", "surrogatepass")) for base in bases], np.int64
        ),
        place=np.array([place(base) for base in bases], np.float64),
    )


def prompt_of(one: Made) -> NDArray[np.int32]:
    """The tokens before the first answer. All of them where the answer begins with the first: rows
    of token ids that have no prompt are not of one prompt."""
    return one.tokens[: one.mask.argmax() or len(one.tokens)]
