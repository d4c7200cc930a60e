"""A figure beside what it should be, and whether it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eval.tables import aligned

ROUNDING = 1e-9  # of fp64 sums
SIGMAS = 4.0  # of a drawn figure: one in 16,000 right ones is off by more


@dataclass(frozen=True)
class Check:
    name: str
    found: float
    expected: float
    low: float  # what may be found
    high: float

    @property
    def passed(self) -> bool:
        """NaN never passes."""
        return self.low <= self.found <= self.high


def exactly(name: str, found: float, expected: float, tolerance: float = ROUNDING) -> Check:
    """A computed figure. ``tolerance``: half of the last digit, where ``expected`` is rounded."""
    return Check(name, found, expected, expected - tolerance, expected + tolerance)


def drawn(name: str, found: float, expected: float, standard_error: float) -> Check:
    """The mean of many draws, whose standard error is known."""
    reach = SIGMAS * standard_error
    return Check(name, found, expected, expected - reach, expected + reach)


def share(name: str, found: float, expected: float, draws: int) -> Check:
    """The share of ``draws`` independent draws that had a property of chance ``expected``."""
    return drawn(name, found, expected, math.sqrt(expected * (1 - expected) / draws))


def above(name: str, found: float, expected: float, low: float) -> Check:
    """A figure that has to be at least ``low``: what a wrong rule or statistic must show."""
    return Check(name, found, expected, low, math.inf)


def below(name: str, found: float, expected: float, high: float) -> Check:
    """A figure that must not be above ``high``."""
    return Check(name, found, expected, -math.inf, high)


def check_lines(checks: Sequence[Check]) -> list[str]:
    """One line a check."""
    rows = [[one.name, *map(figure, (one.found, one.expected)), allowed(one)] for one in checks]
    marks = ["" if one.passed else "OFF" for one in checks]
    whole = [[*row, mark] for row, mark in zip(rows, marks, strict=True)]
    return aligned(["", "found", "expected", "allowed", ""], whole)


def allowed(check: Check) -> str:
    if math.isinf(check.high):
        return f"at least {figure(check.low)}"
    if math.isinf(check.low):
        return f"at most {figure(check.high)}"
    if check.high - check.low <= 2.001 * ROUNDING:
        return "this"
    return f"{figure(check.low)} to {figure(check.high)}"


def figure(value: float) -> str:
    """Four digits that count, counts whole, tiny ones as powers of ten."""
    if value == round(value) and abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"
