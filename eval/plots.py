"""Every figure Eyrie draws, readable at half a page's width; the one module with matplotlib."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from conf.runtime import write_atomically
from eval.acceptance import Interval

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#D55E00", "#009E73", "#CC3311", "#6B7280"
SERIES = (BLUE, ORANGE, GREEN, RED, "#AA4499", "#88CCEE", "#DDAA33", "#332288")
MARKERS = "osD^vP*X"
SIZE = (6.4, 4.0)  # inches
DPI = 150


@dataclass(frozen=True)
class Curve:
    """Values over 1, 2, 3, ... or over ``at``; NaN where nothing was observed."""

    label: str
    values: Sequence[float]
    intervals: Sequence[Interval] | None = None
    at: list[int] | None = None


def draw_acceptance(path: Path, conditional: Curve, survival: Curve) -> None:
    """Acceptance by draft position: of the rounds that got there, and of all rounds."""
    figure, axes = blank("Accepted drafts by position", "draft position", "share accepted")
    line(axes, conditional, 0)
    line(axes, survival, 1)
    finish_shares(axes, [conditional, survival])
    save(figure, path)


def draw_speed(path: Path, measured: Curve, predicted: Curve, best_n: int) -> None:
    """Decode-only speed-up over the chain length, measured and predicted, best N marked."""
    figure, axes = blank(
        "Speed-up over decoding without a draft", "draft tokens a round, N", "times as fast"
    )
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")
    axes.axvline(best_n, color=GREY, linewidth=8, alpha=0.15)
    line(axes, measured, 0)
    line(axes, predicted, 1, style="--")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    save(figure, path)


def draw_depth_sweep(path: Path, curves: Sequence[Curve]) -> None:
    """Conditional acceptance by draft position, one line a head of the sweep."""
    figure, axes = blank(
        "Held-out acceptance by draft position", "draft position", "accepted of those reached"
    )
    for number, curve in enumerate(curves):
        line(axes, curve, number)
    finish_shares(axes, curves)
    save(figure, path)


def draw_training(path: Path, metrics: Path) -> bool:
    """Loss and held-out τ over steps from ``metrics.jsonl``; False when it holds neither."""
    rows = [json.loads(row) for row in metrics.read_text().splitlines() if row.strip()]
    loss = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    tau = [(row["step"], row["held_out"]["tau"]) for row in rows if "held_out" in row]
    if not loss and not tau:
        return False
    figure, axes = blank("Training", "step", "loss")
    handles = []
    if loss:
        handles += axes.plot(*zip(*loss, strict=True), color=BLUE, linewidth=1.5, label="loss")
        axes.set_ylim(bottom=0)
        axes.yaxis.label.set_color(BLUE)
    if tau:
        right = axes.twinx()
        right.spines["top"].set_visible(False)
        right.set_ylabel("held-out τ", fontsize=11, color=ORANGE)
        handles += right.plot(
            *zip(*tau, strict=True), color=ORANGE, marker="o", linewidth=2, label="held-out τ"
        )
        right.set_ylim(bottom=1)  # a round always yields the verifier's own token
    axes.legend(handles=handles, frameon=False, loc="center right")
    save(figure, path)
    return True


def blank(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
    axes.set_xlabel(x_label, fontsize=11)
    axes.set_ylabel(y_label, fontsize=11)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def line(axes: Axes, curve: Curve, number: int, style: str = "-") -> None:
    """Draw one curve; positions nobody reached are left out, intervals become bars."""
    places = curve.at or list(range(1, len(curve.values) + 1))
    kept = [i for i, value in enumerate(curve.values) if math.isfinite(value)]
    colour = SERIES[number % len(SERIES)]
    axes.plot(
        [places[i] for i in kept],
        [curve.values[i] for i in kept],
        linestyle=style,
        marker=MARKERS[number % len(MARKERS)],
        color=colour,
        linewidth=2,
        markersize=6,
        label=curve.label,
    )
    if curve.intervals and kept:
        low, high = zip(
            *((curve.intervals[i].low, curve.intervals[i].high) for i in kept), strict=True
        )
        axes.vlines([places[i] for i in kept], low, high, color=colour, linewidth=1.5, alpha=0.6)


def finish_shares(axes: Axes, curves: Sequence[Curve]) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xticks(range(1, 1 + max((len(curve.values) for curve in curves), default=1)))
    axes.legend(frameon=False, fontsize=11, loc="best")


def save(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    write_atomically(path, image.getvalue())


@dataclass(frozen=True)
class Labels:
    title: str
    x: str
    y: str


def draw_curves(
    path: Path, labels: Labels, curves: Sequence[Curve], rings: Sequence[Curve] = ()
) -> None:
    """Curves over whole numbers; ``rings[i]`` are places marked in the colour of ``curves[i]``."""
    figure, axes = blank(labels.title, labels.x, labels.y)
    for number, curve in enumerate(curves):
        line(axes, curve, number)
    for number, ring in enumerate(rings):
        colour = SERIES[number % len(SERIES)]
        at, values = ring.at or [], list(ring.values)
        axes.plot(at, values, "o", markersize=13, fillstyle="none", color=colour)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10, loc="best")
    save(figure, path)
