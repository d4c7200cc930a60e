"""Several guesses for one position: what each rule emits and accepts, by exact enumeration.

``Rule`` lists three exact rules and two that look right and are not. Every order in which guesses
can be drawn and every outcome of every test is walked, so no draw and no tolerance is involved.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np


class Rule(Enum):
    top_k = "top-k guesses, each taken as certain"
    without = "drawn without replacement, draft renormalised"
    replaced = "drawn with replacement"
    unscaled = "drawn without replacement, draft not renormalised"  # biased
    top_k_ratio = "top-k guesses, tested as if drawn"  # biased


EXACT = (Rule.top_k, Rule.without, Rule.replaced)


@dataclass
class Emitted:
    """What a rule does with one pair of distributions and ``k`` guesses."""

    chances: np.ndarray  # [V] of the token emitted
    accepted: float  # chance that one of the guesses is that token

    def distance(self, target: np.ndarray) -> float:
        """Total variation to the target."""
        return float(np.abs(self.chances - target).sum() / 2)


def enumerate_rule(rule: Rule, target: np.ndarray, draft: np.ndarray, k: int) -> Emitted:
    """``target`` and ``draft`` [V] fp64, both positive; 1 <= k <= V."""
    emitted = Emitted(np.zeros_like(target), 0.0)
    walk(emitted, Walk(rule, draft, k), target, draft, 1.0)
    return emitted


@dataclass(frozen=True)
class Walk:
    rule: Rule
    draft: np.ndarray  # [V] before any guess was taken from it
    left: int  # guesses still to come


def walk(emitted: Emitted, at: Walk, rest: np.ndarray, pool: np.ndarray, chance: float) -> None:
    """Add what follows from here: ``rest`` is the target's residual, ``pool`` what is drawn from.

    ``chance``: of getting here.
    """
    if at.left == 0:
        emitted.chances += chance * rest
        return
    for token, drawn in guesses(at.rule, pool):
        divisor = divide_by(at, pool, token)
        stands = min(1.0, rest[token] / divisor[token])
        emitted.chances[token] += chance * drawn * stands
        emitted.accepted += chance * drawn * stands
        if stands < 1:
            residual = np.clip(rest - divisor, 0, None)
            after = residual / residual.sum() if residual.sum() > 0 else rest
            onward = Walk(at.rule, at.draft, at.left - 1)
            less = pool if at.rule is Rule.replaced else without(pool, token)
            walk(emitted, onward, after, less, chance * drawn * (1 - stands))


def guesses(rule: Rule, pool: np.ndarray) -> Iterator[tuple[int, float]]:
    """The tokens that may be guessed next, each with its chance."""
    if rule in (Rule.top_k, Rule.top_k_ratio):
        yield int(pool.argmax()), 1.0
        return
    for token in np.flatnonzero(pool):
        yield int(token), float(pool[token])


def divide_by(at: Walk, pool: np.ndarray, token: int) -> np.ndarray:
    """[V] what the test and the residual take for the distribution the guess came from."""
    if at.rule is Rule.top_k:
        return np.eye(len(pool))[token]
    return at.draft if at.rule in (Rule.unscaled, Rule.top_k_ratio) else pool


def without(pool: np.ndarray, token: int) -> np.ndarray:
    left = pool.copy()
    left[token] = 0
    return left / left.sum() if left.sum() > 0 else left


def random_pair(seed: int, size: int = 6) -> np.ndarray:
    """[2, V]: a target, and a draft that is right about its logits up to noise."""
    dice = np.random.default_rng(seed)
    logits = dice.normal(size=size)
    both = np.stack([logits, logits + 0.7 * dice.normal(size=size)])
    weights = np.exp(both)
    return weights / weights.sum(-1, keepdims=True)
