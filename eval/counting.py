"""The chi-square test: whether counted draws come from exact probabilities."""

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
    half_df = torch.tensor((cells.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_df, statistic / 2))
