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
    Labels,
    Point,
    draw_rows,
    draw_shares,
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
    shares = Labels("accepted", "draft position", "share")
    draw_shares(tmp_path / "a.png", shares, [alpha, Curve("survival", [0.5, 0.15, 0.0])])
    draw_speed(
        tmp_path / "s.png",
        Curve("measured", [1.2, 1.4], some[:2], [1, 3]),
        Curve("predicted", [1.3, 1.5], None, [1, 3]),
        [Point("2x2", 1.45, some[0], 2, 1.5)],
        3,
    )
    curves = [Curve(f"depth {k}", [0.5, 0.1 * k, math.nan]) for k in range(9)]
    draw_shares(tmp_path / "new" / "d.png", shares, curves)
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
    draw_shares(tmp_path / "a.png", Labels("", "", ""), [nothing, nothing])
    assert pixels(tmp_path / "a.png") == EXPECTED
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not draw_training(tmp_path / "t.png", tmp_path / "metrics.jsonl")
    assert not (tmp_path / "t.png").exists()


def test_rows_of_two_panels_share_their_names(tmp_path: Path):
    """A panel more is wider, a row more is higher, and what was not measured still has its row."""
    some, none = Interval(0.9, 1.4), Interval(math.nan, math.nan)
    rows = [Point("a head", 1.2, some), Point("another", math.nan, none)]
    one, two = [Labels("τ", "", "")], [Labels("τ", "", ""), Labels("speed-up", "", "")]
    draw_rows(tmp_path / "1.png", one, [rows], 1.0)
    draw_rows(tmp_path / "2.png", two, [rows, rows], 1.0)
    draw_rows(tmp_path / "3.png", one, [rows * 10], 1.0)
    (w1, h1), (w2, h2), (w3, h3) = (pixels(tmp_path / f"{n}.png") for n in (1, 2, 3))
    assert w2 > w1 == w3 and h3 > h1 == h2
