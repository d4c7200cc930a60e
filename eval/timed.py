"""What is timed, one run at a time: a group of questions and a method's times on it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from eval.speed_report import Timing


@dataclass(frozen=True)
class Question:
    """A prompt to be answered."""

    id: str  # of its conversation; a later turn is ID#2, ID#3, ...
    ids: list[int]  # its tokens


@dataclass(frozen=True)
class Run:
    """One method on one group."""

    timing: Timing
    requests: list[float]  # seconds from the start to the last token of each; library: none


def digest_of(group: Sequence[Question]) -> str:
    """Of all tokens of a group: equal for the same prompts under the same tokenizer."""
    text = ";".join(" ".join(map(str, one.ids)) for one in group)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
