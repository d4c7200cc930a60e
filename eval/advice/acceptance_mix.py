"""How many tokens a round yields: measured survival by depth, mixed over the tasks of a load."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.theory import expected_tokens_of_survival


@dataclass(frozen=True)
class Part:
    """One task of the load."""

    share: float  # of the tokens that are generated
    survival: list[float]  # [depth] of rounds that got at least so far


@dataclass(frozen=True)
class Mix:
    """The load, as parts whose shares sum to 1."""

    parts: list[Part]
    source: str  # where the survival is from, for the page

    @property
    def depth(self) -> int:
        """The longest chain that was measured in every part."""
        return min(len(part.survival) for part in self.parts)

    def tau(self, n: int) -> float:
        """Tokens a round of a chain of ``n``.

        A token of a part takes 1 / tau of a round, and times add up: the mean is harmonic in the
        shares of tokens. Raises ValueError beyond the measured depth.
        """
        taken = [p.share / expected_tokens_of_survival(p.survival, n) for p in self.parts]
        return 1 / math.fsum(taken)

    def survival(self) -> list[float]:
        """[depth] of all rounds, whose shares follow from the chain of the measured depth."""
        rounds = [p.share / expected_tokens_of_survival(p.survival, self.depth) for p in self.parts]
        every = math.fsum(rounds)
        return [
            math.fsum(r * p.survival[k] for r, p in zip(rounds, self.parts, strict=True)) / every
            for k in range(self.depth)
        ]


def one_part(survival: Sequence[float], source: str) -> Mix:
    return Mix([Part(1.0, list(survival))], source)


def mixed(shares: Mapping[str, float], by_task: Mapping[str, list[float]], source: str) -> Mix:
    """Tasks by their shares of the tokens, which are scaled to sum to 1.

    Raises KeyError for a task that was not measured.
    """
    whole = math.fsum(shares.values())
    parts = [Part(share / whole, by_task[task]) for task, share in shares.items()]
    return Mix(parts, source)


def between(low: Sequence[float], high: Sequence[float], at: float) -> list[float]:
    """Survival on the way from ``low`` (at=0) to ``high`` (at=1), to the depth both have."""
    return [a + at * (b - a) for a, b in zip(low, high, strict=False)]


def lengthened(survival: Sequence[float], taus: Mapping[int, float]) -> list[float]:
    """``survival`` to the depth that timed chains reached: ``taus`` by chain length.

    Each further guess adds what the longer chain's tokens a round exceed the shorter's by. Noise
    may not make it stand more often than the one before.
    """
    found = list(survival)
    while found and len(found) in taus and len(found) + 1 in taus:
        gained = taus[len(found) + 1] - taus[len(found)]
        found.append(min(max(gained, 0.0), found[-1]))
    return found
