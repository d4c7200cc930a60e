"""States in eight bits: how far off, and that small states beside large ones survive."""

import torch

from data.fp8 import FP8, quantise, restored


def some_rows() -> torch.Tensor:
    """Three states a row, of rms 0.3, 98 and 300; one value of 25,000 in the second."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(50, 3, 64, generator=generator) * torch.tensor([0.3, 98.0, 300.0])[:, None]
    rows[7, 1, 5] = 25_000.0
    return rows.flatten(1)


def test_a_value_is_off_by_a_sixteenth_or_a_thousandth_of_its_scale():
    rows = some_rows()
    values, scales = quantise(rows, 3)
    assert values.dtype == FP8 and values.shape == rows.shape and scales.shape == (50, 3)
    back = restored(values, scales, torch.float32)
    allowed = (rows.abs() / 16).maximum(scales.repeat_interleave(64, -1) / 1024 + 1e-9)
    assert bool(((back - rows).abs() <= allowed).all())


def test_one_scale_for_all_states_would_lose_the_small_one():
    """Negative control: the error of the first state of the row with the large value."""
    row = some_rows()[7:8]
    small = slice(0, 64)

    def error(states: int) -> float:
        back = restored(*quantise(row, states), torch.float32)
        return float((back - row)[:, small].norm() / row[:, small].norm())

    assert error(3) < 0.03 < 0.09 < error(1)


def test_zero_rows_and_largest_values_stay_finite():
    rows = torch.zeros(2, 8)
    rows[1] = 3e38
    back = restored(*quantise(rows, 2), torch.float32)
    assert torch.equal(back[0], rows[0]) and bool(back.isfinite().all())


def test_states_without_scales_are_only_converted():
    rows = some_rows()
    assert torch.equal(restored(rows.bfloat16(), None, torch.float32), rows.bfloat16().float())
