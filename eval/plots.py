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
    at: Sequence[float] | None = None
    names: Sequence[str] = ()  # of the values, where they have some


@dataclass(frozen=True)
class Point:
    """One named value with its interval; ``x`` is where it stands, if that means something."""

    label: str
    y: float
    interval: Interval
    x: float = 0.0
    predicted: float = math.nan


@dataclass(frozen=True)
class Labels:
    title: str
    x: str
    y: str


def draw_shares(path: Path, labels: Labels, curves: Sequence[Curve]) -> None:
    """Shares accepted by draft position."""
    figure, axes = blank(labels.title, labels.x, labels.y)
    for number, curve in enumerate(curves):
        line(axes, curve, number)
    finish_shares(axes, curves)
    save(figure, path)


def draw_speed(
    path: Path, measured: Curve, predicted: Curve, trees: Sequence[Point], best_n: int
) -> None:
    """Decode-only speed-up over the chain length, measured and predicted, best N marked.

    Trees stand at their depth, each with its name.
    """
    figure, axes = blank(
        "Speed-up over decoding without a draft", "levels of guesses a round, N", "times as fast"
    )
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle=":")
    axes.axvline(best_n, color=GREY, linewidth=8, alpha=0.15)
    line(axes, measured, 0)
    line(axes, predicted, 1, style="--")
    for number, point in enumerate(trees):
        at, kind = [point.x], (number + 2) % len(SERIES)  # the curves have the first two
        colour, marker = SERIES[kind], MARKERS[kind]
        name = f"{shortened(point.label)} (predicted {point.predicted:.2f})"
        axes.plot(
            at, [point.y], linestyle="", marker=marker, color=colour, markersize=8, label=name
        )
        axes.vlines(at, point.interval.low, point.interval.high, color=colour, linewidth=1.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    save(figure, path)


def draw_time_split(path: Path, shapes: Sequence[str], parts: Sequence[Curve]) -> None:
    """Where the time after prefill goes, one bar a shape; each part has a value a shape."""
    height = max(SIZE[1], 1.6 + 0.36 * len(shapes))
    figure, axes = blank("Time after prefill", "share of the time", "", (SIZE[0], height))
    left = [0.0] * len(shapes)
    rows = range(len(shapes))
    for number, part in enumerate(parts):
        values = [value if math.isfinite(value) else 0.0 for value in part.values]
        colour = (BLUE, ORANGE, "#9CA3AF")[number % 3]
        axes.barh(rows, values, left=left, color=colour, label=part.label, height=0.7)
        for row, value in zip(rows, values, strict=True):
            if value >= 0.06:
                middle = left[row] + value / 2
                axes.text(middle, row, f"{value:.0%}", ha="center", va="center", color="white")
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(rows, [shortened(name) for name in shapes])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


def draw_batches(path: Path, rates: Sequence[Curve], speedups: Sequence[Curve]) -> None:
    """Tokens a second and speed-up over the batch size, side by side."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    dress(left, "Throughput", "sequences side by side", "tokens/s, after prefill")
    dress(right, "Speed-up", "sequences side by side", "times as fast")
    for number, curve in enumerate(rates):
        line(left, curve, number)
    right.axhline(1.0, color=GREY, linewidth=1, linestyle=":")
    for number, curve in enumerate(speedups):
        line(right, curve, number + 1)  # the first rate is of decoding without a draft
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        sizes = sorted({at for curve in rates for at in curve.at or []})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9, loc="best")
    save(figure, path)


def draw_ranges(path: Path, generated: Curve, absolute: Curve) -> None:
    """Acceptance by position in the answer and in the whole text; values are named by range."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for number, (axes, curve) in enumerate(zip(panels, (generated, absolute), strict=True)):
        dress(axes, curve.label, "positions", "α, accepted of those tested" if not number else "")
        line(axes, curve, number)
        places = range(1, 1 + len(curve.values))
        axes.set_xticks(places, curve.names, rotation=30, ha="right")
        axes.set_xlim(0.5, len(curve.values) + 0.5)
    panels[0].set_ylim(0, 1.02)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    save(figure, path)


def draw_temperatures(path: Path, alpha: Curve) -> None:
    """Acceptance when answers are drawn, over the temperature of the draws."""
    figure, axes = blank("Acceptance by temperature", "temperature", "accepted of those tested, α")
    line(axes, alpha, 0)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    save(figure, path)


def draw_rows(
    path: Path, panels: Sequence[Labels], rows: Sequence[Sequence[Point]], mark: float
) -> None:
    """One row a figure, with its interval; panels side by side share the rows' names.

    Coloured by the side of ``mark`` on which its whole interval lies.
    """
    height = max(SIZE[1], 1.6 + 0.28 * max(map(len, rows)))
    figure = Figure(figsize=(8.0 + 3.0 * (len(panels) - 1), height), layout="constrained")
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, labels, group in zip(drawn, panels, rows, strict=True):
        dress(axes, labels.title, labels.x, labels.y)
        axes.axvline(mark, color=GREY, linewidth=1)
        for place, row in enumerate(group):
            clear = row.interval.low > mark or row.interval.high < mark
            colour = (GREEN if row.y > mark else RED) if clear else GREY
            axes.hlines(place, row.interval.low, row.interval.high, color=colour, linewidth=2)
            axes.plot([row.y], [place], marker="o", color=colour)
        axes.set_yticks(range(len(group)), [shortened(row.label) for row in group])
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color="#E5E7EB", linewidth=0.8)
    drawn[0].invert_yaxis()
    save(figure, path)


def shortened(name: str) -> str:
    """Names of big trees are as long as the trees."""
    return name if len(name) <= 40 else f"{name[:37]}..."


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


def blank(
    title: str, x_label: str, y_label: str, size: tuple[float, float] = SIZE
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    dress(axes, title, x_label, y_label)
    return figure, axes


def dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold")
    axes.set_xlabel(x_label, fontsize=11)
    axes.set_ylabel(y_label, fontsize=11)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def line(axes: Axes, curve: Curve, number: int, style: str = "-") -> None:
    """Draw one curve; positions nobody reached are left out, intervals become bars."""
    places = list(curve.at or range(1, len(curve.values) + 1))
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


def draw_panels(path: Path, panels: Sequence[Labels], curves: Sequence[Sequence[Curve]]) -> None:
    """Curves side by side, both axes logarithmic, one panel a title."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    drawn = figure.subplots(1, len(panels), sharey=True)
    for axes, labels, group in zip(drawn, panels, curves, strict=True):
        dress(axes, labels.title, labels.x, labels.y)
        for number, curve in enumerate(group):
            line(axes, curve, number)
        axes.loglog(base=2)
        axes.legend(frameon=False, fontsize=9, loc="best")
    save(figure, path)
