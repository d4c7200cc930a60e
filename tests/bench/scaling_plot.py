"""The scaling benchmark's plot: time above memory, one column an axis, with the fitted lines."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from problem import Problem
from scaling_points import Plan
from scaling_report import TITLES, Line, Point, Results, lines_of, points_of
from step_report import GIB

from eval.plots import BLUE, GREEN, GREY, ORANGE, save

WIDTH, HEIGHT = 13.0, 6.0  # inches
LOGARITHMIC = ("tokens",)  # whose values double


def draw(plan: Plan, results: Results, path: Path) -> None:
    axes = points_of(plan, results)
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, (name, points) in enumerate(axes.items()):
        above, below = panels[0, column], panels[1, column]
        fits = lines_of(name, points)
        draw_time(above, name, points, fits["seconds"])
        draw_memory(below, name, points, fits["bytes"])
        above.set_title(TITLES[name], loc="left", fontsize=12, fontweight="bold")
        for panel in (above, below):
            finish(panel, name)
    draw_recomputed(panels[1, 0], plan, results)
    panels[0, 0].set_ylabel("seconds a step", fontsize=11)
    panels[1, 0].set_ylabel("extra memory, GiB", fontsize=11)
    panels[0, 0].legend(frameon=False, fontsize=9)
    panels[1, 0].legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_time(panel: Axes, name: str, points: list[Point], fit: Line) -> None:
    values = [point.value for point in points]
    whole = [point.measured.seconds for point in points]
    attention = [point.measured.attention for point in points]
    panel.plot(values, whole, color=BLUE, marker="o", linewidth=2, label="step")
    panel.plot(values, attention, color=ORANGE, marker="s", linewidth=2, label="attention")
    rest = [point.rest for point in points]
    panel.plot(values, rest, color=GREEN, marker="D", linestyle="", label="the rest")
    panel.plot(values, fitted(name, points, fit), color=GREY, linestyle="--", label="its line")


def draw_memory(panel: Axes, name: str, points: list[Point], fit: Line) -> None:
    values = [point.value for point in points]
    extra = [point.measured.extra_bytes / GIB for point in points]
    line = [value / GIB for value in fitted(name, points, fit)]
    panel.plot(values, extra, color=BLUE, marker="o", linestyle="", label="step")
    panel.plot(values, line, color=GREY, linestyle="--", label="its line")


def draw_recomputed(panel: Axes, plan: Plan, results: Results) -> None:
    tried: list[Problem] = [p for p in plan.checkpointed() if p.share == plan.middle.share]
    values = [problem.shape.tokens for problem in tried]
    extra = [results[problem].extra_bytes / GIB for problem in tried]
    panel.plot(values, extra, color=ORANGE, marker="v", linewidth=2, label="recomputed")


def fitted(name: str, points: list[Point], fit: Line) -> list[float]:
    by_size = name == "vocabulary"
    return [fit.at(point.value if by_size else point.problem.guesses) for point in points]


def finish(panel: Axes, name: str) -> None:
    if name in LOGARITHMIC:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
    else:
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    panel.tick_params(labelsize=10)
    panel.grid(axis="y", color="#E5E7EB", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
