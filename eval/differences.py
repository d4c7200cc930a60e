"""Two reports' figures side by side, each difference with its interval over prompts.

A figure is a function of sums over prompts, so that it can be had of any resample. Where both
reports measured the same prompts, one draw of prompts serves both (a paired bootstrap): what makes
a prompt easy or hard cancels. Otherwise each report draws its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.acceptance import COVERAGE, Interval

Sums = NDArray[np.float64]  # [..., C]
Key = tuple[str, str]  # a prompt's id and the digest of its text
HIGHER, LOWER, SAME, NOTHING = "higher", "lower", "no difference seen", "not measured"


@dataclass(frozen=True)
class Prompts:
    """What one report has of each prompt: rows [P, C] that add up."""

    keys: list[Key]
    rows: Sums

    def take(self, keys: Sequence[Key]) -> "Prompts":
        place = {key: i for i, key in enumerate(self.keys)}
        return Prompts(list(keys), self.rows[[place[key] for key in keys]])


@dataclass(frozen=True)
class Formula:
    """A figure of sums [..., C] -> [...]; ``speed``: its ratio says more than its difference."""

    name: str
    of: Callable[[Sums], NDArray[np.float64]]
    speed: bool = False


@dataclass(frozen=True)
class Compared:
    """One figure of both reports, over the prompts that count for it."""

    name: str
    a: float
    b: float
    difference: float  # b - a
    interval: Interval  # of the difference, 95 %
    ratio: float | None  # b / a, of speeds
    ratio_interval: Interval | None
    verdict: str  # of b against a
    paired: bool
    prompts_a: int
    prompts_b: int


@dataclass(frozen=True)
class Resampling:
    resamples: int
    seed: int = 0


def compare_prompts(
    formulas: Sequence[Formula], a: Prompts, b: Prompts, how: Resampling
) -> list[Compared]:
    """Every formula over the prompts both have; over each one's own where they share none."""
    known = set(b.keys)
    shared = [key for key in a.keys if key in known]
    if shared:
        a, b = a.take(shared), b.take(shared)
    if not a.keys or not b.keys:
        return []
    other_seed = how.seed if shared else how.seed + 1
    drawn_a = draw(a.rows, how.resamples, how.seed)
    drawn_b = draw(b.rows, how.resamples, other_seed)
    found = []
    for formula in formulas:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = (float(formula.of(a.rows.sum(0))), float(formula.of(b.rows.sum(0))))
            spread_a, spread_b = formula.of(drawn_a), formula.of(drawn_b)
            interval = quantiles(spread_b - spread_a)
            ratio = values[1] / values[0] if formula.speed and values[0] else None
            of_ratio = quantiles(spread_b / spread_a) if ratio is not None else None
        found.append(
            Compared(
                name=formula.name,
                a=values[0],
                b=values[1],
                difference=values[1] - values[0],
                interval=interval,
                ratio=ratio,
                ratio_interval=of_ratio,
                verdict=judge(interval),
                paired=bool(shared),
                prompts_a=len(a.keys),
                prompts_b=len(b.keys),
            )
        )
    return found


def draw(rows: Sums, resamples: int, seed: int) -> Sums:
    """Sums [R, C] of resamples of rows [P, C]; equal seeds draw the same places."""
    count = len(rows)
    picks = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), resamples)
    return picks @ rows


def quantiles(values: NDArray[np.float64]) -> Interval:
    """Resamples in which the figure is a ratio of nothing say nothing."""
    kept = values[np.isfinite(values)]
    if not len(kept):
        return Interval(float("nan"), float("nan"))
    low, high = np.quantile(kept, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high))


def judge(interval: Interval) -> str:
    """A difference is seen when its interval leaves zero out."""
    if np.isnan(interval.low):
        return NOTHING
    if interval.low > 0:
        return HIGHER
    return LOWER if interval.high < 0 else SAME
