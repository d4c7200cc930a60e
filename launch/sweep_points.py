"""One point of a sweep: the job that is started for it, and the figures that it left."""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.runtime import ROOT, say
from conf.schema import ConfigError, Stage
from eval.report_file import BadValue, build, read_report
from launch.sweep_plan import SHARED, SweepPlan, stages_word
from launch.sweep_shapes import ShapeFigures, figures_of
from train.spent import FILE, Spent


@dataclass(frozen=True)
class HeldOut:
    """The held-out acceptance of a run's best head, as training left it beside the head."""

    tau: float  # NaN: there was no round
    alpha_by_depth: list[float]  # of the rounds that reached the position; NaN: none did
    survival_by_depth: list[float]  # of all rounds
    counters: dict[str, object]


@dataclass(frozen=True)
class SweepPoint:
    name: str
    overrides: list[str]  # the swept knobs alone
    folder: str
    seconds: float  # of the whole job
    failure: str | None = None  # why there is no head to compare
    held_out: HeldOut | None = None
    training: Spent | None = None
    shapes: list[ShapeFigures] = field(default_factory=list)  # where a point is evaluated


def make_cache(plan: SweepPlan) -> int:
    """Prepare and capture once, for all points to find; the exit code.

    A point that reads other states of the verifier captures them in its own job.
    """
    return run(torchrun(plan, [*plan.fixed, stages_word(SHARED), f"run.name={plan.name}/shared"]))


def train(plan: SweepPlan, swept: list[str]) -> SweepPoint:
    """Run one point and read what its best head reached."""
    name = point_name(swept)
    folder = plan.folder / name
    start = time.perf_counter()
    words = [*plan.fixed, *swept, stages_word(plan.stages), f"run.name={plan.name}/{name}"]
    code = run(torchrun(plan, words))
    point = SweepPoint(name, swept, str(folder), time.perf_counter() - start)
    if code:
        point = replace(point, failure=f"exit code {code}; see {folder / 'train.log'}")
    else:
        try:
            point = with_figures(point, folder, Stage.eval in plan.stages)
        except (ValueError, ConfigError) as error:
            point = replace(point, failure=str(error))
    if point.failure:
        say(f"{name} failed: {point.failure}")
    return point


def with_figures(point: SweepPoint, folder: Path, evaluated: bool) -> SweepPoint:
    """Raises ValueError or ConfigError for a file that is missing or not what the job writes."""
    shapes = figures_of(read_report(folder), folder / "best") if evaluated else []
    held_out, training = read_held_out(folder), read_training(folder)
    return replace(point, held_out=held_out, training=training, shapes=shapes)


def point_name(swept: list[str]) -> str:
    """``ttt.depth=3`` -> ``depth-3``; without ``=``, for the name travels inside an override."""
    parts = []
    for word in swept:
        knob, _, value = word.partition("=")
        safe = re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-")
        parts.append(f"{knob.rpartition('.')[2]}-{safe}")
    return "_".join(parts)


def torchrun(plan: SweepPlan, overrides: list[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={plan.processes}",
        str(ROOT / "train" / "main.py"),
        *overrides,
    ]


def run(command: list[str]) -> int:
    return subprocess.run(command, check=False).returncode


def number(value: float | None) -> float:
    """JSON has null for the ratio of nothing; the sweep's own files get null for NaN again."""
    return math.nan if value is None else float(value)


def read_held_out(folder: Path) -> HeldOut:
    """Raises ValueError when the file is missing or is not what training writes."""
    path = folder / "best" / "acceptance.json"
    try:
        found = json.loads(path.read_text())
        return HeldOut(
            number(found["tau"]),
            [number(value) for value in found["alpha_by_depth"]],
            [number(value) for value in found["survival_by_depth"]],
            dict(found["counters"]),
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no held-out acceptance ({error!r})") from error


def read_training(folder: Path) -> Spent | None:
    """None where training left none: a head of an older Eyrie, found and not trained again.

    Raises ValueError when the file is not what training writes.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return build(Spent, json.loads(path.read_text()), "")
    except (BadValue, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not what training writes ({error})") from error
