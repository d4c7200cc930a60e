"""What the rounds of one sequence leave to count."""

from collections.abc import Sequence
from dataclasses import dataclass

from conf.shapes import depths_of
from eval.generation import Round


class RoundLog:
    """Rounds, and what was measured at their tested guesses."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.overlap: list[float] = []
        self.ranks: list[list[int]] = []

    def note(self, guesses: "Guesses", path: Sequence[int], count: int) -> None:
        """One round in which the nodes ``path`` stood, of those at most ``count`` levels deep."""
        proposed = [
            i for i, depth in zip(guesses.ids, guesses.depths, strict=True) if depth <= count
        ]
        last = path[-1] if path else 0
        open_end = len(path) < count and last in guesses.parents
        self.rounds.append(Round(proposed, len(path), len(path) + open_end))

    def note_measured(self, overlap: Sequence[float], ranks: Sequence[int]) -> None:
        """Of the round noted last: by level, of which only the tested ones count."""
        tested = self.rounds[-1].tested
        self.overlap += overlap[:tested]
        self.ranks.append(list(ranks[:tested]))


@dataclass(frozen=True)
class Guesses:
    """The nodes 1..M of one sequence's round."""

    ids: list[int]  # target ids
    parents: Sequence[int]  # nodes; 0 is the root
    depths: Sequence[int]

    @classmethod
    def of(cls, ids: list[int], parents: Sequence[int]) -> "Guesses":
        return cls(ids, parents, depths_of(parents))
