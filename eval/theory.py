"""The arithmetic of chains: tokens a verifier call, time a token, the best length N.

    python -m eval.theory                       tables, and the checks that they must pass
    python -m eval.theory --alpha 0.8 --c 0.05  one draft, every N
    python -m eval.theory --report runs/demo/eval/report.json

A call is one forward of the verifier over N guesses; it yields those that stand and one token of
the verifier's own. Costs are in forwards of the verifier over one token: ``c`` for a forward of the
draft, ``verify_cost`` for each guess that the verifier's forward takes besides. Source of E and of
the speed-up: Leviathan et al., 2211.17192, equation 1 and theorem 3.8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def best_n_of_survival(survival: Sequence[float], c: float, verify_cost: float = 0.0) -> Best:
    """``best_n`` among the depths that were measured."""
    depths = range(len(survival) + 1)
    return best_n([expected_tokens_of_survival(survival, n) for n in depths], c, verify_cost)
