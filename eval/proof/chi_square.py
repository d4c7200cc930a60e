"""The chi-square test: counts against what is known, or against counts; and its distribution.

``chi_square_p`` is the test that rules must pass, whatever the cells. The statistics take counts
[..., C] of C cells, each with enough expected draws.
"""

import numpy as np
import torch
from torch import Tensor

MIN_EXPECTED = 5.0  # cells with fewer expected draws are pooled


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Chance of counts [C] at least so far from ``expected`` [C], both with the same sum.

    Cells with few expected draws are pooled. A draw where none is possible has chance 0.
    """
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < MIN_EXPECTED
    pooled = torch.stack([counts[small].sum(), expected[small].sum()])
    cells = torch.stack([counts[~small], expected[~small]])  # [2, C']
    if float(pooled[1]) > 0:
        cells = torch.cat([cells, pooled[:, None]], 1)
    if cells.shape[1] == 1:
        return 1.0  # a single outcome, and all draws are it
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    return tail(float(statistic), cells.shape[1] - 1)


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
