"""The tables of the acceptance bench: tau and its gain over another head, with intervals.

An interval is a bootstrap over held-out prompts and over seeds at once: both are drawn anew, the
same prompts for both sides of a difference. With one seed it knows nothing of other seeds; the
spread of the base recipe's seeds, printed first, says how much that is.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from eval.acceptance import COVERAGE, Interval
from eval.tables import Row, table

RESAMPLES = 2000
CHAIN = "5"  # guesses a round of the figures that are compared
SHORT = "3"


@dataclass(frozen=True)
class Head:
    """One training and the rounds of every held-out prompt."""

    result: dict[str, Any]
    walk: dict[str, Any]

    @property
    def recipe(self) -> str:
        return self.result["recipe"]

    def rounds(self, n: str) -> np.ndarray:
        """[P] rounds of each prompt."""
        return np.array([one["rounds"] for one in self.walk["counters"][n]])

    def accepted(self, n: str) -> np.ndarray:
        """[P] accepted guesses of each prompt."""
        return np.array([sum(one["accepted_by_depth"]) for one in self.walk["counters"][n]])


@dataclass(frozen=True)
class Group:
    """All seeds of one recipe under one budget."""

    heads: list[Head]

    @property
    def name(self) -> str:
        return self.heads[0].recipe

    def tau(self, n: str) -> float:
        rounds = sum(head.rounds(n).sum() for head in self.heads)
        return 1 + float(sum(head.accepted(n).sum() for head in self.heads) / rounds)

    def conditional(self, n: str) -> list[float]:
        """alpha by depth."""
        counters = [one for head in self.heads for one in head.walk["counters"][n]]
        accepted = np.sum([one["accepted_by_depth"] for one in counters], 0)
        reached = np.sum([one["reached_by_depth"] for one in counters], 0)
        return [float(a / max(r, 1)) for a, r in zip(accepted, reached, strict=True)]

    def draws(self, n: str, prompts: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """tau of each resample; ``prompts`` [S, P] and ``seeds`` [S, any] are drawn places."""
        rounds = np.stack([head.rounds(n) for head in self.heads])  # [H, P]
        accepted = np.stack([head.accepted(n) for head in self.heads])
        taus = np.empty(len(prompts))
        for i, (columns, lines) in enumerate(zip(prompts, seeds, strict=True)):
            chosen = np.ix_(lines[: len(self.heads)] % len(self.heads), columns)
            taus[i] = 1 + accepted[chosen].sum() / rounds[chosen].sum()
        return taus


@dataclass(frozen=True)
class Gain:
    """How one recipe's tau - 1 relates to another's."""

    ratio: float
    interval: Interval


def interval_of(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high))


def resamples(prompts: int) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    return (
        dice.integers(prompts, size=(RESAMPLES, prompts)),
        dice.integers(1 << 30, size=(RESAMPLES, 8)),
    )


def gain(group: Group, base: Group, n: str = CHAIN) -> Gain:
    """(tau - 1) of ``group`` over that of ``base``; seeds are drawn apart, prompts together."""
    prompts, seeds = resamples(len(group.heads[0].rounds(n)))
    ours = group.draws(n, prompts, seeds) - 1
    theirs = base.draws(n, prompts, np.roll(seeds, 1, 0)) - 1
    ratio = (group.tau(n) - 1) / (base.tau(n) - 1)
    return Gain(ratio, interval_of(ours / theirs))


def spread(group: Group, n: str = CHAIN) -> list[float]:
    return [Group([head]).tau(n) for head in group.heads]


def found(work: Path, budget: str) -> list[Group]:
    """All finished recipes of one budget."""
    groups: dict[str, list[Head]] = {}
    for folder in sorted((work / "heads").glob(f"*-{budget}-seed*")):
        if (folder / "result.json").exists() and (folder / "walk.json").exists():
            result = json.loads((folder / "result.json").read_text())
            head = Head(result, json.loads((folder / "walk.json").read_text()))
            groups.setdefault(head.recipe, []).append(head)
    return [Group(heads) for heads in groups.values()]


def row_of(group: Group, base: Group) -> Row:
    prompts, seeds = resamples(len(group.heads[0].rounds(CHAIN)))
    low_high = interval_of(group.draws(CHAIN, prompts, seeds))
    against = gain(group, base)
    results = [head.result for head in group.heads]
    return (
        group.name,
        str(len(results)),
        f"{fmean(one['updates'] for one in results):.0f}",
        f"{fmean(one['cpu_seconds'] for one in results):.0f}",
        f"{group.tau(SHORT):.3f}",
        f"{group.tau(CHAIN):.3f} [{low_high.low:.3f}, {low_high.high:.3f}]",
        f"{against.ratio:.3f} [{against.interval.low:.3f}, {against.interval.high:.3f}]",
        " ".join(f"{alpha:.2f}" for alpha in group.conditional(CHAIN)),
    )


HEAD = ("recipe", "seeds", "updates", "CPU s", "τ N=3", "τ N=5", "gain of τ-1", "α by depth")


def tables(groups: Sequence[Group], base: Group, titles: dict[str, str]) -> Iterator[str]:
    """Markdown: the base and its spread, then a table a group of recipes."""
    yield table(HEAD, [row_of(base, base)])
    yield f"Seeds of the base: {', '.join(f'{tau:.3f}' for tau in spread(base))}."
    by_title: dict[str, list[Group]] = {}
    for group in groups:
        if group is not base:
            by_title.setdefault(titles.get(group.name, "others"), []).append(group)
    for title, members in by_title.items():
        yield f"### {title}"
        yield table(HEAD, [row_of(one, base) for one in sorted(members, key=lambda g: g.name)])
