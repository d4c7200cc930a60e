"""The arithmetic of chains: tokens a verifier call, time a token, the best length N.

    python -m eval.theory                       tables, and the checks that they must pass
    python -m eval.theory --alpha 0.8 --c 0.05  one draft, every N
    python -m eval.theory --report runs/demo/eval/report.json

A call is one forward of the verifier over N guesses; it yields those that stand and one token of
the verifier's own. Costs are in forwards of the verifier over one token: ``c`` for a forward of the
draft, ``verify_cost`` for each guess that the verifier's forward takes besides. Source of E and of
the speed-up: Leviathan et al., 2211.17192, equation 1 and theorem 3.8.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from conf.compose import sentence_on_error
from eval.parser import Parser

LONGEST = 10_000  # chain that the command computes
MAX_N = 199  # the longest chain that a search looks at
BAND = 0.01  # of the best speed-up: lengths that lose less than this are as good


@dataclass(frozen=True)
class Best:
    """The chain length with the highest speed-up; 0 is decoding without a draft."""

    n: int
    speedup: float
    low: int  # the shortest and the longest that lose less than 1 % of it
    high: int


def expected_tokens(alpha: float, n: int) -> float:
    """(1 - alpha**(n+1)) / (1 - alpha): every guess stands with ``alpha``, whatever came before.

    As a sum it holds at alpha = 1, too, and loses no digits beside it.
    """
    return math.fsum(alpha**k for k in range(n + 1))


def expected_tokens_of_survival(survival: Sequence[float], n: int) -> float:
    """1 + survival_1 + ... + survival_n: exact for any dependence between the guesses of a round.

    Raises ValueError for a chain longer than what was measured; see ``continued``.
    """
    if n > len(survival):
        raise ValueError(f"survival: measured to depth {len(survival)}, and n={n} asks for more")
    return 1 + math.fsum(survival[:n])


def continued(survival: Sequence[float], n: int) -> list[float]:
    """``survival`` to depth ``n``, as if each further guess stood as often as the deepest measured.

    That is a guess itself: acceptance mostly falls with depth, so it flatters long chains.
    """
    whole = [1.0, *survival]
    last = whole[-1] / whole[-2] if whole[-2] else 0.0
    found = list(survival[:n])
    while len(found) < n:
        found.append((found[-1] if found else 1.0) * last)
    return found


def round_cost(passes: int, guesses: int, c: float, verify_cost: float = 0.0) -> float:
    """Of one call: the verifier's forward, ``passes`` of the draft, and ``guesses`` to verify."""
    return 1 + passes * c + guesses * verify_cost


def speedup(tokens: float, n: int, c: float, verify_cost: float = 0.0) -> float:
    """Of a chain of ``n`` that yields ``tokens`` a call, over one token a forward."""
    return tokens / round_cost(n, n, c, verify_cost)


def time_per_token(tokens: float, n: int, c: float, verify_cost: float = 0.0) -> float:
    """In forwards of the verifier over one token: the speed-up's inverse."""
    return round_cost(n, n, c, verify_cost) / tokens


def operations(alpha: float, n: int, draft_operations: float = 0.0) -> float:
    """Arithmetic a token over plain decoding's, ``draft_operations`` of the verifier's a guess.

    Source: Leviathan et al., theorem 3.11.
    """
    return (n * draft_operations + n + 1) / expected_tokens(alpha, n)


def best_n(tokens: Sequence[float], c: float, verify_cost: float = 0.0) -> Best:
    """Search the chains of 0, 1, 2, ... guesses, which yield ``tokens[n]`` a call.

    tokens[0] is 1. Raises ValueError without an entry. Each further guess adds less and costs the
    same, so the speed-up rises and then falls, and the lengths near the best stand in a row.
    """
    found = [speedup(each, n, c, verify_cost) for n, each in enumerate(tokens)]
    if not found:
        raise ValueError("tokens: no chain to choose from")
    top = max(found)
    near = [n for n, each in enumerate(found) if each >= (1 - BAND) * top]
    return Best(found.index(top), top, near[0], near[-1])


def best_n_of_alpha(alpha: float, c: float, verify_cost: float = 0.0, max_n: int = MAX_N) -> Best:
    """``best_n`` when every guess stands with ``alpha``."""
    return best_n([expected_tokens(alpha, n) for n in range(max_n + 1)], c, verify_cost)


@dataclass(frozen=True)
class Request:
    """What the command line asks for; empty lists: the tables over all of them."""

    alphas: list[float]
    costs: list[float]  # c
    survival: list[float]  # measured, in place of ``alphas``
    report: Path | None  # takes survival and costs from a report.json
    verify_cost: float | None
    max_n: int | None  # None: MAX_N, or as deep as measured
    plots: Path | None
    json: Path | None


def parse(argv: list[str] | None) -> Request:
    parser = Parser(
        prog="python -m eval.theory",
        description="Tokens a verifier call, time a token and the best number of guesses. Without "
        "arguments: the tables over α and c, trees, and the checks. Exit code 1 when one is off.",
    )
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--alpha", type=float, nargs="+", default=[], help="chance of each guess")
    draft.add_argument(
        "--survival", type=float, nargs="+", default=[], metavar="S", help="measured, by depth"
    )
    draft.add_argument("--report", type=Path, metavar="FILE", help="report.json of eval.main")
    parser.add_argument(
        "--c", type=float, nargs="+", default=[], help="draft forward / plain verifier step"
    )
    parser.add_argument(
        "--verify-cost", type=float, metavar="W", help="plain steps a verified guess; default 0"
    )
    parser.add_argument(
        "--max-n", type=int, help=f"longest chain; default {MAX_N}, or as deep as measured"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG plots there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    words = parser.parse_args(argv)
    wrong = first_fault(words)
    if wrong:
        parser.error(wrong)
    return Request(
        words.alpha,
        words.c,
        words.survival,
        words.report,
        words.verify_cost,
        words.max_n,
        words.plots,
        words.json,
    )


def first_fault(words: argparse.Namespace) -> str | None:
    """The first value that means nothing, in a sentence."""
    for alpha in words.alpha:
        if not 0 <= alpha <= 1:
            return f"--alpha={alpha}: a chance is from 0 to 1; try 0.8"
    falling = [1.0, *words.survival]
    for before, after in pairwise(falling):
        if not 0 <= after <= before:
            return f"--survival={after}: shares of all rounds, from 0 to 1, fall with depth"
    for cost in words.c:
        if not 0 <= cost < math.inf:
            return f"--c={cost}: a cost is 0 or more; try 0.05"
    if words.verify_cost is not None and not 0 <= words.verify_cost < math.inf:
        return f"--verify-cost={words.verify_cost}: a cost is 0 or more; try 0.01"
    if words.max_n is not None and not 1 <= words.max_n <= LONGEST:
        return f"--max-n={words.max_n}: must be 1 to {LONGEST}"
    return None


def main(argv: list[str] | None = None) -> int:
    """Print what was asked for; 0 unless a check is off."""
    request = parse(argv)
    from eval.arithmetic.theory_page import (  # with matplotlib, half a second
        print_drafts,
        print_tables,
    )

    if request.alphas or request.survival or request.report:
        print_drafts(request)
        return 0
    return print_tables(request)


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
