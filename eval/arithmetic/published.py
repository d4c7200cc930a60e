"""Figures that papers printed, and what the arithmetic makes of them.

Each is a fact with its source; nothing here was measured by us.
"""

from dataclasses import dataclass

from eval.arithmetic.checks import Check, exactly
from eval.theory import (
    Best,
    best_n_of_alpha,
    continued,
    expected_tokens,
    expected_tokens_of_survival,
    operations,
    speedup,
)


@dataclass(frozen=True)
class ChainRun:
    """EAGLE-1 on MT-bench at temperature 0 (2401.15077)."""

    verifier: str
    alphas: tuple[float, ...]  # conditional, 0-α to 4-α
    tokens: float  # a call, with a chain of five draft passes


CHAIN_RUNS = (
    ChainRun("Vicuna-7B", (0.79, 0.74, 0.72, 0.73, 0.67), 3.20),
    ChainRun("Vicuna-13B", (0.79, 0.74, 0.72, 0.74, 0.70), 3.23),
    ChainRun("Vicuna-33B", (0.74, 0.69, 0.67, 0.67, 0.66), 2.97),
    ChainRun("Llama2-7B", (0.76, 0.69, 0.67, 0.68, 0.68), 3.00),
    ChainRun("Llama2-13B", (0.77, 0.69, 0.69, 0.70, 0.71), 3.18),
)
CHAIN_REACH = 0.11  # printed rates have two digits, and were counted on other runs than the tokens


def survival_of(alphas: tuple[float, ...]) -> list[float]:
    """Conditional rates -> shares of all rounds, by depth: their running product."""
    found: list[float] = []
    for alpha in alphas:
        found.append((found[-1] if found else 1.0) * alpha)
    return found


def chain_checks() -> list[Check]:
    """1 + the sum of survival, from the conditional rates, against the tokens counted."""
    return [
        exactly(
            f"{run.verifier}: tokens a call from its α by depth",
            expected_tokens_of_survival(survival_of(run.alphas), len(run.alphas)),
            run.tokens,
            CHAIN_REACH,
        )
        for run in CHAIN_RUNS
    ]


def arithmetic_checks() -> list[Check]:
    """Figures known before this code was written: papers' own, and exact scans over N."""
    cent = 0.005
    checks = [
        exactly("α .6, N = 5: tokens a call", expected_tokens(0.6, 5), 2.38, cent),
        exactly("α .9, N = 5: tokens a call", expected_tokens(0.9, 5), 4.69, cent),
        exactly("α 1, N = 5: tokens a call", expected_tokens(1.0, 5), 6),
        exactly("α 0, N = 5: tokens a call", expected_tokens(0.0, 5), 1),
    ]
    optima = ((0.8, 0.05, Best(8, 3.09, 7, 9)), (0.95, 0.02, Best(31, 9.95, 26, 37)))
    for alpha, c, known in (*optima, (0.9, 0.04, Best(15, 5.09, 13, 17))):
        best = best_n_of_alpha(alpha, c)
        name = f"α {alpha:g}, c {c:g}: "
        checks += [
            exactly(name + "best N", best.n, known.n),
            exactly(name + "its speed-up", best.speedup, known.speedup, cent),
            exactly(name + "shortest within 1 %", best.low, known.low),
            exactly(name + "longest within 1 %", best.high, known.high),
        ]
    for alpha, n, times, work in (
        (0.6, 2, 1.96, 1.53),
        (0.8, 5, 3.69, 1.63),
        (0.9, 10, 6.86, 1.60),
    ):
        name = f"Leviathan, α {alpha:g}, N = {n}, c 0: "
        checks += [
            exactly(name + "speed-up", speedup(expected_tokens(alpha, n), n, 0), times, cent),
            exactly(name + "operations", operations(alpha, n), work, cent),
        ]
    t5 = speedup(expected_tokens(0.75, 7), 7, 0.02)
    checks.append(exactly("Leviathan, T5-small, α .75, N = 7, c .02: speed-up", t5, 3.2, 0.05))
    flat = continued([0.8], 40)
    checks.append(exactly("a flat curve is α again", sum(flat), expected_tokens(0.8, 40) - 1))
    return checks
