"""What a sweep leaves behind: its tables, its plots and one JSON file over its points."""

import json
from dataclasses import dataclass
from pathlib import Path

from conf.runtime import provenance, say, write_atomically
from eval.plots import Curve, Labels, Point, draw_rows, draw_shares
from eval.report import jsonable
from eval.tables import aligned, shown, span, table
from launch.sweep_points import SweepPoint
from launch.sweep_shapes import ShapeFigures

DEPTHS, SHAPES = "depth_sweep.png", "families.png"


@dataclass(frozen=True)
class SweepResult:
    name: str
    fixed: list[str]  # overrides of every point
    swept: list[str]
    points: list[SweepPoint]


def write_results(folder: Path, result: SweepResult) -> None:
    """Write sweep.json, sweep.md and the plots, and print the tables."""
    measured = [point for point in result.points if point.held_out]
    if measured:
        labels = Labels(
            *("Held-out acceptance by draft position", "draft position"),
            "accepted of those reached",
        )
        draw_shares(folder / DEPTHS, labels, [curve_of(point) for point in measured])
    if shapes := [shape for point in result.points for shape in point.shapes]:
        draw_shapes(folder / SHAPES, shapes)
    content = {**jsonable(result), "provenance": provenance()}
    write_atomically(folder / "sweep.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "sweep.md", page(result))
    for rows in (rows_of(result.points), shape_rows(result.points)):
        if len(rows) > 1:
            say()
            for row in aligned(rows[0], rows[1:]):
                say(row)
    say(f"\n{folder / 'sweep.md'}")


def curve_of(point: SweepPoint) -> Curve:
    assert point.held_out is not None
    return Curve(" ".join(point.overrides), point.held_out.alpha_by_depth)


def draw_shapes(path: Path, shapes: list[ShapeFigures]) -> None:
    """Tokens a round and speed-up, of the same prompts, beside a line at no draft."""
    names = [f"{one.draft}, {one.shape}" for one in shapes]
    pairs = list(zip(names, shapes, strict=True))
    panels = [
        Labels("Tokens a round, τ", "of the prompts timed", ""),
        Labels("Speed-up", "times as fast, after prefill", ""),
    ]
    taus = [Point(name, one.timed_tau, one.timed_tau_interval) for name, one in pairs]
    speeds = [Point(name, one.speedup, one.speedup_interval) for name, one in pairs]
    draw_rows(path, panels, [taus, speeds], 1.0)


def rows_of(points: list[SweepPoint]) -> list[list[str]]:
    """A head and one row a point."""
    deepest = max((len(p.held_out.alpha_by_depth) for p in points if p.held_out), default=0)
    rows = [["point", "τ", *(f"α{k}" for k in range(1, deepest + 1)), "rounds", "minutes"]]
    for point in points:
        minutes = f"{point.seconds / 60:.1f}"
        if point.held_out is None:
            rows.append([point.name, "failed", *[""] * (deepest + 1), minutes])
            continue
        found = point.held_out
        alpha = [shown(value) for value in found.alpha_by_depth]
        padding = [""] * (deepest - len(alpha))
        rounds = str(found.counters.get("rounds", ""))
        rows.append([point.name, shown(found.tau), *alpha, *padding, rounds, minutes])
    return rows


def shape_rows(points: list[SweepPoint]) -> list[list[str]]:
    """A head and one row a draft and shape; what was not measured is left blank."""
    shapes = [(point, shape) for point in points for shape in point.shapes]
    deepest = max((len(shape.alpha_by_depth) for _, shape in shapes), default=0)
    depths = [f"α{k} [95 %]" for k in range(1, deepest + 1)]
    head = ["draft", "guesses", "trained", "minutes", "steps", "FLOPs", "τ [95 %]", *depths]
    rows = [[*head, "τ timed [95 %]", "v", "c", "speed-up [95 %]", "lossless"]]
    for point, one in shapes:
        pairs = zip(one.alpha_by_depth, one.alpha_intervals, strict=True)
        alpha = [f"{shown(value)} {span(interval)}" for value, interval in pairs]
        alpha += [""] * (deepest - len(alpha))
        counted = f"{shown(one.tau)} {span(one.tau_interval)}" if one.alpha_by_depth else ""
        timed = f"{shown(one.timed_tau)} {span(one.timed_tau_interval)}"
        speed = f"{shown(one.speedup)} {span(one.speedup_interval)}"
        costs = [shown(one.v), shown(one.c)]
        cells = [one.draft, one.shape, *training_cells(point), counted, *alpha]
        rows.append([*cells, timed, *costs, speed, lossless(one)])
    return rows


def training_cells(point: SweepPoint) -> list[str]:
    """Parameters, minutes, steps and FLOPs; n/a where training left no note."""
    spent = point.training
    if spent is None:
        return ["n/a"] * 4
    flops = "n/a" if spent.flops is None else f"{spent.flops:.3g}"
    return [f"{spent.trained:,}", f"{spent.whole_seconds / 60:.1f}", str(spent.steps), flops]


def lossless(one: ShapeFigures) -> str:
    if not one.checked:
        return ""
    answer = "yes" if one.identical == one.checked else "NO"
    return f"{answer}, {one.identical} of {one.checked}"


def page(result: SweepResult) -> str:
    head, *rows = rows_of(result.points)
    failures = [f"- {p.name}: {p.failure}" for p in result.points if p.failure]
    plot = [f"![acceptance by draft position]({DEPTHS})", ""]
    return "\n".join(
        [
            f"# Sweep {result.name}",
            "",
            f"Swept: {', '.join(result.swept)}. The same for every point: "
            f"{' '.join(result.fixed) or 'the configuration as it is'}.",
            "",
            *shape_lines(result.points),
            table(head, rows),
            "",
            *(plot if len(failures) < len(result.points) else []),
            "τ: tokens a round, the verifier's own included. αk: of the rounds that reached draft "
            "position k, the share that accepted it. Both from walking the held-out answers, "
            "greedy, with each run's best head. Minutes: the whole job.",
            *(["", "Failed:", *failures] if failures else []),
            "",
        ]
    )


def shape_lines(points: list[SweepPoint]) -> list[str]:
    """The table of what was evaluated; none without."""
    head, *rows = shape_rows(points)
    if not rows:
        return []
    return [
        "## Drafts and shapes",
        "",
        table(head, rows),
        "",
        f"![tokens a round and speed-up]({SHAPES})",
        "",
        "Trained: parameters with a gradient. Minutes: training alone, held-out acceptance and "
        "checkpoints apart. FLOPs: of all training steps, as models/flops.py counts them. τ and "
        "αk: counted in float32 over all prompts, for chains of eval.n_draft, whose answers are "
        "also compared token by token with plain greedy decoding (lossless). τ timed, v (the cost "
        "of verifying a round, in plain steps), c (of drafting, a level) and speed-up (after "
        "prefill): of the prompts timed, in eval.speed_dtype. Intervals: bootstrap over prompts.",
        "",
        "## Held-out answers",
        "",
    ]
