"""A server's acceptance beside the report's: every position, τ, and whether they lie apart.

Both sides answered the same prompts, so their difference is bootstrapped pairwise: whole prompts
are drawn, with what both sides counted of them. It is large when its 95 % interval lies beyond
``TOLERANCE`` as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.acceptance import COVERAGE, Counters, Interval, ratio, total
from eval.summary import SEED, survival_intervals
from launch.served.run import Question, Served

TOLERANCE = 0.03  # of survival; for τ as many positions as are compared


@dataclass(frozen=True)
class Difference:
    """Of one figure; ours is the report's."""

    ours: float
    theirs: float
    interval: Interval  # of theirs - ours
    large: bool

    @property
    def value(self) -> float:
        return self.theirs - self.ours


@dataclass(frozen=True)
class Comparison:
    ours: Counters  # of the prompts asked
    theirs: Counters
    our_survival: list[Interval]  # over prompts
    survival: list[Difference]  # by position, as far as both sides go
    tau: Difference  # of those positions: 1 + the sum of survival

    @property
    def depth(self) -> int:
        return len(self.survival)

    @property
    def large(self) -> bool:
        nothing = not self.theirs.rounds and bool(self.ours.rounds)
        return nothing or self.tau.large or any(one.large for one in self.survival)

    @property
    def same_chain(self) -> bool:
        return len(self.ours.accepted_by_depth) == len(self.theirs.accepted_by_depth)


def compare(questions: Sequence[Question], served: Served, resamples: int) -> Comparison:
    ours = [one.ours for one in questions]
    theirs = [one.counters for one in served.talks]
    whole, there = total(ours), total(theirs)
    depth = min(len(whole.accepted_by_depth), len(there.accepted_by_depth))
    pairs = Pairs.of(ours, theirs, resamples)
    survival = [pairs.difference(k, k + 1, TOLERANCE) for k in range(depth)]
    return Comparison(
        ours=whole,
        theirs=there,
        our_survival=survival_intervals(ours, resamples),
        survival=survival,
        tau=pairs.difference(0, depth, TOLERANCE * max(depth, 1), base=1.0),
    )


@dataclass(frozen=True)
class Pairs:
    """Raw counts by prompt, and draws of prompts."""

    ours: Sequence[Counters]
    theirs: Sequence[Counters]
    draws: np.ndarray  # [resamples, prompts]

    @classmethod
    def of(cls, ours: Sequence[Counters], theirs: Sequence[Counters], resamples: int) -> "Pairs":
        size = (resamples, len(ours))
        return cls(ours, theirs, np.random.default_rng(SEED).integers(len(ours), size=size))

    def difference(self, first: int, end: int, tolerance: float, base: float = 0.0) -> Difference:
        """Of the accepted guesses of the positions [first, end), a round, above ``base``."""
        own, other = self.drawn(self.ours, first, end), self.drawn(self.theirs, first, end)
        apart = other - own
        apart = apart[np.isfinite(apart)]
        found = Interval(float("nan"), float("nan"))
        if len(apart):
            low, high = np.quantile(apart, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
            found = Interval(float(low), float(high))
        large = found.low > tolerance or found.high < -tolerance
        ours, theirs = share(total(self.ours), first, end), share(total(self.theirs), first, end)
        return Difference(base + ours, base + theirs, found, large)

    def drawn(self, side: Sequence[Counters], first: int, end: int) -> np.ndarray:
        """[resamples] accepted / rounds; NaN where no round was drawn."""
        accepted = np.array([sum(one.accepted_by_depth[first:end]) for one in side])
        rounds = np.array([one.rounds for one in side])
        below = rounds[self.draws].sum(1)
        above = accepted[self.draws].sum(1)
        return np.where(below > 0, above / np.maximum(below, 1), np.nan)


def share(counters: Counters, first: int, end: int) -> float:
    return ratio(sum(counters.accepted_by_depth[first:end]), counters.rounds)
