"""Hidden states in eight bits: e4m3, with one scale a row and state.

One scale for all states of a row would round the small ones coarsely: streams grow with depth, and
beside a massive activation of 25,000, which verifiers have, the finest step is 0.1.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


def quantise(rows: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """rows [T, n*D] of ``states`` = n states side by side -> values [T, n*D] e4m3, scales [T, n].

    A value times its scale is within 1/16 of what it was, or within 2^-10 of the scale.
    """
    split = rows.float().unflatten(-1, (states, -1))  # [T, n, D]
    scales = split.abs().amax(-1) / LARGEST
    scales = scales.masked_fill(scales == 0, 1.0)
    return (split / scales[..., None]).flatten(-2).to(FP8), scales


def restored(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """values [T, n*D] with scales [T, n] (None: values of full range) -> rows [T, n*D] in dtype."""
    rows = values.to(dtype)
    if scales is None:
        return rows
    return (rows.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None].to(dtype)).flatten(-2)
