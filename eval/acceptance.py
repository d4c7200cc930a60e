"""What is counted of rounds, the figures made of the counts, and rounds walked over fixed text.

alpha_k = accepted at depth k / rounds that reached depth k. survival_k = accepted at depth k /
rounds. alpha = accepted / tested; a guess after the first miss is not tested. tau = tokens a round,
the verifier's own included = 1 + sum of survival. Counts are taken before the cut at end of
sequence or length. A ratio of nothing (0 rounds, a depth never reached) is NaN.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from conf.schema import ConfigError
from eval.decode import Round

COVERAGE = 0.95  # of an interval


@dataclass(frozen=True)
class Counters:
    """Plain sums: counters of prompts, tasks and ranks add up."""

    rounds: int = 0
    drafted: int = 0  # guesses proposed
    tested: int = 0  # guesses up to and including the first miss
    accepted_by_depth: list[int] = field(default_factory=list)  # rounds that accepted guess k
    reached_by_depth: list[int] = field(default_factory=list)  # rounds that tested guess k
    tokens: int = 0  # emitted after the cut, the prefill's token included

    @classmethod
    def of(cls, rounds: Sequence[Round], tokens: int, n_draft: int) -> "Counters":
        """Count ``rounds`` of one sequence that emitted ``tokens`` in all."""
        proposed = [len(one.proposed) for one in rounds]
        return cls.of_counts([one.accepted for one in rounds], proposed, tokens, n_draft)

    @classmethod
    def of_counts(
        cls, accepted: list[int], proposed: list[int], tokens: int, n_draft: int
    ) -> "Counters":
        """The same from the numbers accepted and proposed in each round."""
        pairs = list(zip(accepted, proposed, strict=True))
        by_depth = [sum(a > k for a in accepted) for k in range(n_draft)]
        reached = [sum(a >= k and p > k for a, p in pairs) for k in range(n_draft)]
        return cls(len(accepted), sum(proposed), sum(reached), by_depth, reached, tokens)

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            self.rounds + other.rounds,
            self.drafted + other.drafted,
            self.tested + other.tested,
            add_by_depth(self.accepted_by_depth, other.accepted_by_depth),
            add_by_depth(self.reached_by_depth, other.reached_by_depth),
            self.tokens + other.tokens,
        )

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def alpha(self) -> float:
        return ratio(self.accepted, self.tested)

    @property
    def alpha_by_depth(self) -> list[float]:
        pairs = zip(self.accepted_by_depth, self.reached_by_depth, strict=True)
        return [ratio(accepted, reached) for accepted, reached in pairs]

    @property
    def survival_by_depth(self) -> list[float]:
        return [ratio(accepted, self.rounds) for accepted in self.accepted_by_depth]

    @property
    def tau(self) -> float:
        return ratio(self.rounds + self.accepted, self.rounds)


@dataclass(frozen=True)
class RankHits:
    """How often the verifier's greedy token was the draft's rank-r guess, 0 the likeliest."""

    reached: list[int]  # [depth] rounds whose rank-0 path was right up to there
    hits: list[list[int]]  # [depth][rank], rank < 10


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def add_by_depth(first: list[int], second: list[int]) -> list[int]:
    """Add two lists that may differ in depth."""
    longer, shorter = sorted((first, second), key=len, reverse=True)
    padded = [*shorter, *[0] * (len(longer) - len(shorter))]
    return [a + b for a, b in zip(longer, padded, strict=True)]


def total(counters: Sequence[Counters]) -> Counters:
    return sum(counters, Counters())


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class AcceptanceReport:
    """Figures over all prompts, each with a 95 % interval over prompts."""

    tau: float
    alpha: float
    alpha_by_depth: list[float]
    survival_by_depth: list[float]
    counters: Counters
    tau_interval: Interval
    alpha_interval: Interval
    alpha_by_depth_intervals: list[Interval]


def report_acceptance(by_prompt: Sequence[Counters], resamples: int, seed: int) -> AcceptanceReport:
    """Add up the prompts and bootstrap over them. Raises ConfigError without a prompt.

    Percentile bootstrap of a ratio of sums: tokens of one prompt depend on each other, so whole
    prompts are drawn.
    """
    if not by_prompt:
        raise ConfigError(
            "acceptance: no prompt was decoded and there is nothing to count; give at least one in "
            "eval.prompts, or hold out more with data.valid_share"
        )
    counters = total(by_prompt)
    depth = len(counters.accepted_by_depth)
    accepted = np.array([add_by_depth(c.accepted_by_depth, [0] * depth) for c in by_prompt])
    reached = np.array([add_by_depth(c.reached_by_depth, [0] * depth) for c in by_prompt])
    rounds = np.array([c.rounds for c in by_prompt])
    draws = np.random.default_rng(seed).integers(len(by_prompt), size=(resamples, len(by_prompt)))

    def interval(part: np.ndarray, whole: np.ndarray) -> Interval:
        return percentile_interval(part[draws].sum(1), whole[draws].sum(1))

    return AcceptanceReport(
        tau=counters.tau,
        alpha=counters.alpha,
        alpha_by_depth=counters.alpha_by_depth,
        survival_by_depth=counters.survival_by_depth,
        counters=counters,
        tau_interval=interval(rounds + accepted.sum(1), rounds),
        alpha_interval=interval(accepted.sum(1), reached.sum(1)),
        alpha_by_depth_intervals=[interval(accepted[:, k], reached[:, k]) for k in range(depth)],
    )


def percentile_interval(part: np.ndarray, whole: np.ndarray) -> Interval:
    """Of the ratios part/whole [resamples]; resamples with nothing below the line say nothing."""
    ratios = part[whole > 0] / whole[whole > 0]
    if not len(ratios):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(ratios, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high))


def count_hits(guesses: Tensor, text: Tensor) -> list[int]:
    """How many leading guesses of each row are right: guesses [R, N], text [T] -> R numbers.

    Row t holds guesses for x[t+2], x[t+3], ..., each made on top of the ones before. A guess past
    the end of ``text`` counts as a miss.
    """
    rows, depth = guesses.shape
    known = text.numel()
    start = torch.arange(2, rows + 2, device=text.device)
    index = start[:, None] + torch.arange(depth, device=text.device)  # [R, N]
    right = (guesses == text[index.clamp(max=known - 1)]) & (index < known)
    return right.long().cumprod(1).sum(1).tolist()


def walk(hits: Sequence[int], first_row: int, end_row: int, n_draft: int) -> Counters:
    """Play a greedy loop's rounds over text the verifier wrote itself, from the hits of each row.

    Row t has seen x[0..t+1]: x[t+1] is the root, and hits[t] says how many guesses for x[t+2..] are
    right. A row with n hits emits n+1 tokens and jumps to row t+n+1. A round starts while a token
    is left to emit, so an answer in [a, b) has first_row = a-1 and end_row = b-2 (exclusive).

    With the text known for n_draft - 1 tokens past b the counters are the live loop's, its position
    limits apart. Without them the guesses past the end count as misses, which lowers the last
    round's acceptance and touches no other round.
    """
    accepted: list[int] = []
    row = first_row
    while row < end_row:
        accepted.append(min(hits[row], n_draft))
        row += accepted[-1] + 1
    proposed = [n_draft] * len(accepted)
    return Counters.of_counts(accepted, proposed, max(0, end_row - first_row + 1), n_draft)


class NgramTable:
    """A back-off n-gram table over token ids: the floor that a trained head must clear.

    It guesses the most frequent successor of the longest context it has seen, up to ``order`` - 1
    tokens; of equally frequent ones the smallest id.
    """

    def __init__(self, order: int = 4):
        self.order = order
        self._best: dict[tuple[int, ...], int] = {}

    def fit(self, texts: Iterable[list[int]]) -> "NgramTable":
        """Count the successors in ``texts``; contexts do not cross from one to the next.

        Raises ConfigError when there is none.
        """
        counts: dict[tuple[int, ...], dict[int, int]] = {}
        for text in texts:
            for i, token in enumerate(text):
                for size in range(min(i, self.order - 1) + 1):
                    successors = counts.setdefault(tuple(text[i - size : i]), {})
                    successors[token] = successors.get(token, 0) + 1
        if not counts:
            raise ConfigError(
                "data.path: no training answer has a token for the n-gram table; give more data or "
                "hold out less with data.valid_share"
            )
        self._best = {
            context: min(successors, key=lambda token: (-successors[token], token))
            for context, successors in counts.items()
        }
        return self

    def guess(self, context: Sequence[int]) -> int:
        """The next token after ``context``, by the longest known ending of it."""
        assert self._best, "fit comes before guess"
        ending = tuple(context[-(self.order - 1) :]) if self.order > 1 else ()
        while ending not in self._best:
            ending = ending[1:]
        return self._best[ending]

    def hits(self, text: Sequence[int], row: int, n_draft: int) -> int:
        """How many of ``n_draft`` guesses after x[row+1] are right, each on top of its own."""
        for k in range(n_draft):
            at = row + 2 + k
            # As long as every guess was right, the guesses and the text are the same context.
            if at >= len(text) or self.guess(text[max(0, at - self.order) : at]) != text[at]:
                return k
        return n_draft

    def walk(self, text: Sequence[int], first_row: int, end_row: int, n_draft: int) -> Counters:
        """``walk`` with this table as the draft; ``text`` may reach past the answer."""
        rows = range(first_row, max(first_row, end_row))
        hits = [self.hits(text, row, n_draft) for row in rows]
        return walk([0] * first_row + hits, first_row, end_row, n_draft)
