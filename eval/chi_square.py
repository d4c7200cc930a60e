"""The chi-square distribution, and two statistics: counts against what is known, or against counts.

Counts [..., C] are those of C cells, each with enough expected draws (5 or more).
"""

import numpy as np
import torch


def against_exact(counts: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """[..., C] counts and [C] chances -> [...]; C - 1 degrees of freedom."""
    expected = counts.sum(-1, keepdims=True) * chances
    return ((counts - expected) ** 2 / expected).sum(-1)


def against_noisy(counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Takes drawn ``others`` for exact, which is wrong: both are noisy, so it is twice too large.

    Kept to show that a test made of it rejects a right sampler.
    """
    return ((counts - others) ** 2 / others).sum(-1)


def of_two_samples(counts: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Two samples of the same size [..., C] -> [...]; C - 1 degrees of freedom."""
    return ((counts - others) ** 2 / (counts + others)).sum(-1)


def tail(statistic: float, df: int) -> float:
    """The chance of a value at least as large."""
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def quantile(chance: float, df: int) -> float:
    """The value that is exceeded with ``chance``, by halving."""
    low, high = 0.0, df + 1.0
    while tail(high, df) > chance:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, df) > chance else (low, middle)
    return high
