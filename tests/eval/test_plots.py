"""Plots become whole PNG files of the intended size."""

import json
import math
import struct
from pathlib import Path

from eval.acceptance import Interval
from eval.plots import (
    DPI,
    SIZE,
    Curve,
    Point,
    draw_acceptance,
    draw_depth_sweep,
    draw_speed,
    draw_training,
)


def pixels(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


EXPECTED = tuple(round(inches * DPI) for inches in SIZE)


def test_every_plot_is_a_png_of_the_right_size(tmp_path: Path):
    some = [Interval(0.4, 0.6), Interval(0.2, 0.4), Interval(math.nan, math.nan)]
    alpha = Curve("α", [0.5, 0.3, math.nan], some)
    draw_acceptance(tmp_path / "a.png", alpha, Curve("survival", [0.5, 0.15, 0.0]))
    draw_speed(
        tmp_path / "s.png",
        Curve("measured", [1.2, 1.4], some[:2], [1, 3]),
        Curve("predicted", [1.3, 1.5], None, [1, 3]),
        [Point("2x2", 1.45, some[0], 2, 1.5)],
        3,
    )
    curves = [Curve(f"depth {k}", [0.5, 0.1 * k, math.nan]) for k in range(9)]
    draw_depth_sweep(tmp_path / "new" / "d.png", curves)
    rows = [
        {"step": 10, "loss": 2.0},
        {"step": 20, "loss": 1.5},
        {"step": 20, "held_out": {"tau": 1.5}},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(json.dumps(row | {"tau": 1.2}) for row in rows) + "\n")
    assert draw_training(tmp_path / "t.png", metrics)
    for name in ("a.png", "s.png", "new/d.png", "t.png"):
        assert pixels(tmp_path / name) == EXPECTED
    assert not list(tmp_path.rglob("*.tmp"))


def test_nothing_observed_still_draws(tmp_path: Path):
    nothing = Curve("α", [math.nan], [Interval(math.nan, math.nan)])
    draw_acceptance(tmp_path / "a.png", nothing, nothing)
    assert pixels(tmp_path / "a.png") == EXPECTED
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not draw_training(tmp_path / "t.png", tmp_path / "metrics.jsonl")
    assert not (tmp_path / "t.png").exists()
