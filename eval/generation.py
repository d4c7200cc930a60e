"""What a decoding loop leaves: emitted tokens, the rounds they came from, and the time it took."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """One verifier forward over guesses, before any cut at end of sequence or length."""

    proposed: list[int]  # every guess that could have stood, in the order of the nodes
    accepted: int  # guesses that stood, one a level
    tested: int  # levels with a guess to test: accepted, and the one where none stood


@dataclass(frozen=True)
class Generation:
    """One sequence."""

    tokens: list[int]  # emitted, the end-of-sequence token included
    rounds: list[Round]  # empty for plain decoding; steps without guesses are not rounds
    tail: list[int]  # greedy tokens after the end, never emitted
    seconds: float  # from the start of the batch to the last token
    overlap: list[float] = field(default_factory=list)  # sum of min(target, draft) at each test
    ranks: list[list[int]] = field(default_factory=list)  # of the verifier's token, at each test


@dataclass(frozen=True)
class Times:
    """Seconds of one batch; draft and verify are parts of decode."""

    prefill: float  # both models over the prompts, up to the first tokens
    decode: float  # everything after, tails apart
    draft: float  # the draft's forwards
    verify: float  # the verifier's forwards in rounds, with judging


@dataclass(frozen=True)
class Decoded:
    """One batch, in the order of its prompts."""

    generations: list[Generation]
    times: Times
    steps: int  # verifier forwards after prefill, up to the last emitted token
