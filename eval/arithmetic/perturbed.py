"""One distribution over eight tokens and drafts that are off from it by noise of three sizes.

The numbers are those of a course lesson on EAGLE-3 (rohitg00/ai-engineering-from-scratch 10/15), so
that its printed figures can be compared with the exact ones.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

TARGET = [0.30, 0.22, 0.15, 0.10, 0.08, 0.07, 0.05, 0.03]
SMALLEST = 1e-6  # probability of a token that the noise would take below 0


@dataclass(frozen=True)
class Noise:
    name: str
    amount: float  # standard deviation of what is added to each probability
    seed: int


NOISES = (Noise("large", 0.08, 3), Noise("middle", 0.02, 2), Noise("small", 0.005, 1))


def perturb(target: Sequence[float], noise: Noise) -> list[float]:
    """``target`` plus Gaussian noise, kept positive and renormalised."""
    dice = random.Random(noise.seed)
    off = [max(SMALLEST, value + noise.amount * dice.gauss(0, 1)) for value in target]
    return [value / sum(off) for value in off]


def acceptance(target: Sequence[float], draft: Sequence[float]) -> float:
    """Sum of min(target, draft): the chance that a draw of the draft stands."""
    return math.fsum(map(min, target, draft))


def divergence(target: Sequence[float], draft: Sequence[float]) -> float:
    """KL(target || draft) in nats; tokens the target never emits add nothing."""
    pairs = zip(target, draft, strict=True)
    return math.fsum(t * math.log(t / d) for t, d in pairs if t > 0)
