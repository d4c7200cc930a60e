"""One point of a sweep: the training that is started for it, and the acceptance that it left."""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from conf.runtime import ROOT, say

POINT_STAGES = "stages=[prepare,capture,train]"  # the first two find the shared cache
SHARED_STAGES = "stages=[prepare,capture]"


@dataclass(frozen=True)
class SweepPlan:
    """What is swept and what holds for every point."""

    name: str  # folder below root
    root: Path
    fixed: list[str]  # overrides of every point
    swept: list[str]  # knobs that take several values
    words: list[str]  # all overrides, as Hydra gets them
    processes: int  # ranks of one training

    @property
    def folder(self) -> Path:
        return self.root / self.name


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
    seconds: float
    failure: str | None  # why there is no head to compare
    held_out: HeldOut | None


def make_cache(plan: SweepPlan) -> int:
    """Prepare and capture once, for all points to find; the exit code."""
    return run(torchrun(plan, [*plan.fixed, SHARED_STAGES, f"run.name={plan.name}/shared"]))


def train(plan: SweepPlan, swept: list[str]) -> SweepPoint:
    """Train one point and read what its best head reached on the held-out answers."""
    name = point_name(swept)
    folder = plan.folder / name
    start = time.perf_counter()
    code = run(torchrun(plan, [*plan.fixed, *swept, POINT_STAGES, f"run.name={plan.name}/{name}"]))
    failure, held_out = None, None
    if code:
        failure = f"exit code {code}; see {folder / 'train.log'}"
    else:
        try:
            held_out = read_held_out(folder)
        except ValueError as error:
            failure = str(error)
    if failure:
        say(f"{name} failed: {failure}")
    return SweepPoint(name, swept, str(folder), time.perf_counter() - start, failure, held_out)


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
