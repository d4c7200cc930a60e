"""How a head is wired to its verifier: the streams it reads and its rotary table, and which fit.

A head loads and drafts with any layer ids and any rotary base; only its guesses get worse. So the
same guesses over the same text are graded with other wirings, and the file's is doubted where
another one is right more often than chance and rounding explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eval.tables import Row, aligned
from models.rope import Rope, Rotary

CHANCE = 0.01  # that there is a finding on the ids, or one on the base, of a head that is right
MATERIAL = 0.02  # of the accepted guesses: less would not be worth a doubt
DRAWS = 20_000
GUESSES = 3  # a row, each on top of the ones before


@dataclass(frozen=True)
class Wiring:
    aux_layers: list[int]  # n = the verifier's stream after n layers
    rope: dict[str, Any]


@dataclass(frozen=True)
class Grades:
    """What a head's guesses were worth at each row of one text, GUESSES in a chain."""

    hits: list[float]  # leading likeliest guesses that were right: accepted by a greedy verifier
    chances: list[float]  # the same of guesses drawn from the head, expected


@dataclass(frozen=True)
class Tried:
    """One wiring's grades, over rows that all wirings share."""

    wiring: Wiring
    texts: list[Grades]

    @property
    def rows(self) -> int:
        return sum(len(text.hits) for text in self.texts)

    @property
    def first(self) -> float:
        """Share of the rows whose first guess was right."""
        return sum(hit > 0 for text in self.texts for hit in text.hits) / max(self.rows, 1)

    @property
    def length(self) -> float:
        """Accepted guesses a row."""
        return sum(sum(text.hits) for text in self.texts) / max(self.rows, 1)

    @property
    def drawn(self) -> float:
        """Accepted guesses a row where they are drawn from the head."""
        return sum(sum(text.chances) for text in self.texts) / max(self.rows, 1)


@dataclass(frozen=True)
class Verdict:
    findings: list[str]
    notes: list[str]  # what was measured, and what was not decided


@dataclass(frozen=True)
class Named:
    """Where the file at hand holds a wiring, for sentences that name the field."""

    file: str
    aux_layers: str
    rope: str  # the base's
    table: str  # the whole table's


def neighbours(ids: Sequence[int], layers: int) -> list[list[int]]:
    """All ids moved by one, then each alone: ascending, unique ids in 1..layers."""
    moved = [[n + by for n in ids] for by in (-1, 1)]
    for place in range(len(ids)):
        for by in (-1, 1):
            alone = list(ids)
            alone[place] += by
            moved.append(alone)
    found: list[list[int]] = []
    for one in moved:
        if sorted(set(one)) == one and one[0] >= 1 and one[-1] <= layers and one not in found:
            found.append(one)
    return found


def same_table(ours: Rope, theirs: Rope) -> bool:
    """Whether two tables turn alike, however they are spelled."""
    one, other = Rotary(ours), Rotary(theirs)
    return one.scaling == other.scaling and torch.equal(
        one.inverse_frequencies, other.inverse_frequencies
    )


def chance_of_gain(filed: Tried, other: Tried) -> float:
    """Chance of so large a gain of ``other`` if both wirings were as good as each other.

    A permutation test: which of the two a text's figures belong to is drawn anew, text by text,
    since rows of one text depend on each other. It adds up the chances: a guess that is nearly the
    likeliest counts nearly as much, so that a small loss shows in few rows.
    """
    pairs = zip(filed.texts, other.texts, strict=True)
    gains = np.array([sum(theirs.chances) - sum(ours.chances) for ours, theirs in pairs])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(DRAWS, len(gains)))
    return (1 + int((signs @ gains >= gains.sum()).sum())) / (1 + DRAWS)


def better(filed: Tried, others: Sequence[Tried]) -> list[Tried]:
    """Those that are better beyond chance and by a size that matters, the best first."""
    found = [
        one
        for one in others
        if one.drawn > filed.drawn * (1 + MATERIAL)
        and one.length > filed.length
        and chance_of_gain(filed, one) * len(others) <= CHANCE
    ]
    return sorted(found, key=lambda one: -one.drawn)


def figures(best: Tried, filed: Tried) -> str:
    """What stands in brackets behind a sentence."""
    return f"{best.length:.3f} against {filed.length:.3f} of {GUESSES} guesses, {filed.rows:,} rows"


def undecided(filed: Tried, others: Sequence[Tried]) -> list[Tried]:
    """Those that are not worse beyond chance."""
    return [one for one in others if chance_of_gain(one, filed) * len(others) > CHANCE]


def judge_layers(filed: Tried, others: Sequence[Tried], named: Named) -> Verdict:
    """The file's layer ids against ``others`` of the same rotary table."""
    ids, what = filed.wiring.aux_layers, f"{named.file}: {named.aux_layers}"
    what = f"{what}={ids}"
    found = better(filed, others)
    if found:
        best = found[0].wiring.aux_layers
        moved = {ours - theirs for ours, theirs in zip(ids, best, strict=True)}
        which = "ids" if len(moved) == 1 else "one id"
        return Verdict(
            [
                f"{what}: the verifier's streams {best} are accepted more often "
                f"({figures(found[0], filed)}): {which} off by one"
            ],
            [],
        )
    alike = [str(one.wiring.aux_layers) for one in undecided(filed, others)]
    if len(alike) == len(others):
        return Verdict([], [f"{what}: not decided, no neighbouring id changes the acceptance"])
    if alike:
        return Verdict(
            [], [f"{what}: no neighbour is accepted more often; not decided: {', '.join(alike)}"]
        )
    return Verdict([], [f"{what}: accepted more often than every neighbour"])


def judge_rope(filed: Tried, verifiers: Tried | None, named: Named) -> Verdict:
    """The file's rotary table against the verifier's; None: they are one."""
    ours = filed.wiring.rope.get("rope_theta")
    if verifiers is None:
        return Verdict([], [f"{named.file}: {named.rope}={ours}: the verifier's"])
    theirs = verifiers.wiring.rope.get("rope_theta")
    what, right = f"{named.file}: {named.rope}={ours}", f"the verifier's {theirs}"
    if ours == theirs:
        what = f"{named.file}: {named.table}={filed.wiring.rope}"
        right = f"the verifier's {verifiers.wiring.rope}"
    measured = figures(verifiers, filed)
    if better(filed, [verifiers]):
        return Verdict([f"{what}: guesses are accepted more often with {right} ({measured})"], [])
    if undecided(filed, [verifiers]):
        return Verdict(
            [], [f"{what}: not decided, with {right} guesses are accepted as often ({measured})"]
        )
    return Verdict(
        [], [f"{what}: not {right}, with which guesses are accepted less often ({measured})"]
    )


def table_of(tried: Sequence[Tried]) -> list[str]:
    """Lines for a terminal, the file's wiring first."""
    filed = tried[0]
    rows: list[Row] = [
        (
            str(one.wiring.aux_layers),
            str(one.wiring.rope.get("rope_theta")),
            *(f"{value:.3f}" for value in (one.first, one.length, one.drawn)),
            "the file's" if one is filed else f"{one.drawn - filed.drawn:+.3f}",
        )
        for one in tried
    ]
    head = ("layers", "base", "first guess", f"of {GUESSES} in a row", "drawn", "")
    return aligned(head, rows)
