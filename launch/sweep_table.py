"""What a sweep leaves behind: one table, one plot and one JSON file over its points."""

import json
from dataclasses import dataclass
from pathlib import Path

from conf.runtime import provenance, say, write_atomically
from eval.plots import Curve, draw_depth_sweep
from eval.report import jsonable
from eval.tables import aligned, shown, table
from launch.sweep_points import SweepPoint


@dataclass(frozen=True)
class SweepResult:
    name: str
    fixed: list[str]  # overrides of every point
    swept: list[str]
    points: list[SweepPoint]


def write_results(folder: Path, result: SweepResult) -> None:
    """Write sweep.json, sweep.md and depth_sweep.png, and print the table."""
    measured = [point for point in result.points if point.held_out]
    if measured:
        draw_depth_sweep(folder / "depth_sweep.png", [curve_of(point) for point in measured])
    content = {**jsonable(result), "provenance": provenance()}
    write_atomically(folder / "sweep.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_atomically(folder / "sweep.md", page(result))
    say()
    head, *rows = rows_of(result.points)
    for row in aligned(head, rows):
        say(row)
    say(f"\n{folder / 'sweep.md'}")


def curve_of(point: SweepPoint) -> Curve:
    assert point.held_out is not None
    return Curve(" ".join(point.overrides), point.held_out.alpha_by_depth)


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


def page(result: SweepResult) -> str:
    head, *rows = rows_of(result.points)
    failures = [f"- {p.name}: {p.failure}" for p in result.points if p.failure]
    plot = ["![acceptance by draft position](depth_sweep.png)", ""]
    return "\n".join(
        [
            f"# Sweep {result.name}",
            "",
            f"Swept: {', '.join(result.swept)}. The same for every point: "
            f"{' '.join(result.fixed) or 'the configuration as it is'}.",
            "",
            table(head, rows),
            "",
            *(plot if len(failures) < len(result.points) else []),
            "τ: tokens a round, the verifier's own included. αk: of the rounds that reached draft "
            "position k, the share that accepted it. Both from walking the held-out answers, "
            "greedy, with each run's best head.",
            *(["", "Failed:", *failures] if failures else []),
            "",
        ]
    )
