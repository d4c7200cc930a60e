"""The preview page: samples in one HTML file that a person can leaf through, without a server.

The page loads nothing. Samples travel as JSON in which ``<``, ``>`` and ``&`` are escaped, and are
put on screen as text, so that a sample cannot become markup.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from data.records import TokenizedSample

TEMPLATE = Path(__file__).with_name("preview.html")
SUPERVISED, FIRST, OUTSIDE, SPECIAL = 1, 2, 4, 8  # flags of a piece, as the page reads them
BROKEN = "\ufffd"  # what a tokenizer writes for part of a character
LONGEST = 8  # tokens that one character can take, and then some


@dataclass(frozen=True)
class Piece:
    """The least run of tokens whose text is whole: one token, or the bytes of one character."""

    text: str
    ids: list[int]
    flags: int = 0


@dataclass(frozen=True)
class PageSample:
    id: str
    held_out: bool
    greedy: bool
    tokens: int
    supervised: int
    answers: int
    pieces: list[list]  # text, flags and token ids of each: keys would double the file


@dataclass
class PageWriter:
    """Makes the page's samples. ``in_vocab`` [V] bool: tokens that the draft can propose."""

    tokenizer: PreTrainedTokenizerBase
    in_vocab: Tensor

    @cached_property
    def special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {number for number, token in added if token.special}

    def sample(self, sample: TokenizedSample) -> PageSample:
        mask = sample.loss_mask.tolist()
        pieces: list[Piece] = []
        at = 0
        for piece in whole_pieces(sample.input_ids.tolist(), self.tokenizer):
            beyond = at + len(piece.ids)
            starts = any(mask[at:beyond]) and not (at and mask[at - 1])
            pieces.append(replace(piece, flags=self.flags(piece.ids, any(mask[at:beyond]), starts)))
            at = beyond
        return PageSample(
            id=sample.id,
            held_out=sample.held_out,
            greedy=sample.greedy,
            tokens=len(mask),
            supervised=sum(mask),
            answers=sum(bool(piece.flags & FIRST) for piece in pieces),
            pieces=[[piece.text, piece.flags, piece.ids] for piece in pieces],
        )

    def flags(self, ids: list[int], supervised: bool, first: bool) -> int:
        outside = supervised and not bool(self.in_vocab[ids].all())
        special = ids[0] in self.special
        return SUPERVISED * supervised | FIRST * first | OUTSIDE * outside | SPECIAL * special

    def page(self, samples: list[TokenizedSample], summary: list[str]) -> str:
        """The HTML text: ``samples`` to leaf through, and lines about all of the data."""
        shown = [asdict(self.sample(sample)) for sample in samples]
        text = json.dumps({"summary": summary, "samples": shown}, ensure_ascii=False)
        for letter in "<>&":
            text = text.replace(letter, f"\\u{ord(letter):04x}")
        return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", text)


def whole_pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The text of each token as it stands after the one before it; their texts joined are all.

    Decoded together with its predecessor: alone, many tokenizers drop a token's leading space.
    """

    def decoded(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    pieces: list[Piece] = []
    before: list[int] = []
    known = ""
    run: list[int] = []
    for token in ids:
        run.append(token)
        text = decoded([*before, *run])
        if text.endswith(BROKEN) and len(run) < LONGEST:
            continue
        pieces.append(Piece(text[len(known) :], run))
        before, known, run = run, decoded(run), []
    if run:
        pieces.append(Piece(decoded([*before, *run])[len(known) :], run))
    return pieces
