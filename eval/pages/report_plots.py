"""Which plots a report has: each is drawn where its figures were measured."""

from dataclasses import dataclass
from pathlib import Path

from eval.acceptance import Interval
from eval.plots import (
    Curve,
    Labels,
    Point,
    draw_batches,
    draw_ranges,
    draw_shares,
    draw_speed,
    draw_temperatures,
    draw_time_split,
    draw_training,
    shortened,
)
from eval.report import EvalReport, RangeFigures
from eval.speed_report import ShapeSpeed


@dataclass(frozen=True)
class Plot:
    """A PNG in the report's folder."""

    file: str
    says: str  # what a reader sees in it, for those who cannot see it


def draw_report(report: EvalReport, folder: Path, metrics: Path) -> list[Plot]:
    """Draw into ``folder``; ``metrics`` is the run's metrics.jsonl, which may be missing."""
    plots = [acceptance(report, folder), speed(report, folder), time_split(report, folder)]
    if len(report.by_batch) > 1:
        plots.append(batches(report, folder))
    if report.position_ranges:
        plots.append(ranges(report, folder))
    if report.by_temperature:
        plots.append(temperatures(report, folder))
    if metrics.is_file() and draw_training(folder / "training.png", metrics):
        plots.append(Plot("training.png", "Training: loss and held-out acceptance over the steps"))
    return plots


def acceptance(report: EvalReport, folder: Path) -> Plot:
    spread = report.intervals
    of_those = Curve(
        "of the rounds that reached it (α)", report.alpha_by_depth, spread.alpha_by_depth
    )
    of_all = Curve("of all rounds (survival)", report.survival_by_depth, spread.survival_by_depth)
    labels = Labels("Accepted drafts by position", "draft position", "share accepted")
    draw_shares(folder / "acceptance.png", labels, [of_those, of_all])
    return Plot("acceptance.png", "Survival: the share of drafts accepted at each position")


def speed(report: EvalReport, folder: Path) -> Plot:
    chains = [report.by_n[n] for n in sorted(report.by_n)]
    at = [one.n for one in chains]
    bars = [one.speedup_decode_interval for one in chains]
    measured = Curve("chains, measured", [one.speedup_decode for one in chains], bars, at)
    foretold = [one.predicted_speedup for one in chains]
    predicted = Curve("chains, predicted: τ / (v + d)", foretold, None, at)
    trees = [tree_point(one) for one in report.by_tree.values()]
    draw_speed(folder / "speed.png", measured, predicted, trees, report.settings.best_n)
    return Plot("speed.png", "Speed-up over decoding without a draft, against N")


def tree_point(tree: ShapeSpeed) -> Point:
    bar = tree.speedup_decode_interval
    return Point(tree.shape, tree.speedup_decode, bar, tree.n, tree.predicted_speedup)


def time_split(report: EvalReport, folder: Path) -> Plot:
    shapes = [*report.by_n.values(), *report.by_tree.values()]
    parts = [
        Curve("draft", [one.split.draft for one in shapes]),
        Curve("verify", [one.split.verify for one in shapes]),
        Curve("rest", [one.split.rest for one in shapes]),
    ]
    names = [one.label for one in shapes]
    draw_time_split(folder / "time_split.png", names, parts)
    return Plot("time_split.png", "Time after prefill: drafting, verifying, and the rest, by shape")


def batches(report: EvalReport, folder: Path) -> Plot:
    """Without a draft, with the shape that is best at the smallest batch, and with each's best."""
    sizes = sorted(report.by_batch)
    at = [report.by_batch[size] for size in sizes]
    fixed = report.settings.best_shape
    always = f"always {shortened(fixed)}"
    rates = [
        Curve(
            "without a draft",
            [one.baselines.plain_tokens_per_second_decode for one in at],
            None,
            sizes,
        ),
        Curve(always, [rate_of(one.shapes.get(fixed)) for one in at], None, sizes),
        Curve("best of each batch", [rate_of(one.shapes[one.best]) for one in at], None, sizes),
    ]
    best = [one.shapes[one.best] for one in at]
    speedups = [
        Curve(always, [gain_of(one.shapes.get(fixed)) for one in at], None, sizes),
        Curve(
            "best of each batch",
            [one.speedup_decode for one in best],
            [one.speedup_decode_interval for one in best],
            sizes,
        ),
    ]
    draw_batches(folder / "batches.png", rates, speedups)
    return Plot("batches.png", "Tokens a second and speed-up over the batch size")


def rate_of(one: ShapeSpeed | None) -> float:
    """NaN for a shape that this batch size was not timed with."""
    return float("nan") if one is None else one.tokens_per_second_decode


def gain_of(one: ShapeSpeed | None) -> float:
    return float("nan") if one is None else one.speedup_decode


def ranges(report: EvalReport, folder: Path) -> Plot:
    draw_ranges(
        folder / "ranges.png",
        range_curve("By position in the answer", report.position_ranges),
        range_curve("By position in the text, prompt included", report.absolute_ranges),
    )
    return Plot("ranges.png", "Acceptance by position of the drafts")


def range_curve(label: str, found: list[RangeFigures]) -> Curve:
    return Curve(label, [one.alpha for one in found], names=[one.positions for one in found])


def temperatures(report: EvalReport, folder: Path) -> Plot:
    found = sorted(report.by_temperature, key=lambda one: one.temperature)
    bars: list[Interval] = [one.alpha_interval for one in found]
    at = [one.temperature for one in found]
    draw_temperatures(folder / "temperature.png", Curve("α", [o.alpha for o in found], bars, at))
    return Plot("temperature.png", "Acceptance against the temperature of the answers")
