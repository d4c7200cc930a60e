"""The check of a plan: a small job on this machine, and what was planned beside what it took."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.compose import load_config, to_yaml
from conf.runtime import ROOT, cache_dir, write_atomically
from conf.schema import Device, JobError, RunConfig
from eval.tables import Row, aligned
from launch.planning.hardware import GB, Hardware
from launch.planning.hours import HOUR, capture_hours, epoch_hours
from launch.planning.memory import capture_memory, training_memory
from launch.planning.question import Question
from launch.planning.trial import CONFIG, Taken
from launch.planning.verifiers import verifier_sizes
from models.bundled import resolve

LARGEST = 1e9  # parameters of a verifier that this machine is asked to run; else the demo's
# What both stages reach of the machine's own matrix product on one CPU thread, in float32.
CPU_SHARE = 0.7
MEMORY_BAR, DISK_BAR, TIME_BAR = 0.15, 0.01, 0.30
SMALL = [
    "run.device=cpu",
    "verifier.dtype=float32",
    "engine.precision=float32",
    "engine.threads=1",
    "ttt=default",
    "optim=default",
    "optim.packs_per_step=1",
    "optim.micro_batch_tokens=2048",
    "capture.batch_tokens=2048",
    "capture.min_agreement=0",
    "capture.stage_gib=null",
    "capture.store=null",
    "plan.tokens=12288",
    "plan.sample_tokens=512",
    "plan.supervised_share=0.4",
    "plan.gpus=1",
]


@dataclass(frozen=True)
class Bar:
    what: str
    unit: str
    planned: float
    measured: float
    bound: float

    @property
    def off(self) -> float:
        """Of what was measured."""
        return abs(self.planned - self.measured) / self.measured

    @property
    def reached(self) -> bool:
        return self.off <= self.bound

    @property
    def row(self) -> Row:
        figures = (f"{self.planned:.4g} {self.unit}", f"{self.measured:.4g} {self.unit}")
        word = "reached" if self.reached else "MISSED"
        return (word, self.what, *figures, f"{self.off:.1%}", f"{self.bound:.0%}")


def check(cfg: RunConfig) -> list[Bar]:
    """Plan the small job, run it, compare. Raises JobError when a stage of it fails."""
    small = small_job(cfg)
    asked = replace(Question.of(small, cache_dir(small)), device="cpu")
    with taken_place(cfg) as folder:
        there = resolve(small.verifier.path, cache_dir(cfg)).resolve()  # a wheel is converted once
        at_work = replace(
            small,
            run=replace(small.run, cache=str(folder / "cache")),
            verifier=replace(small.verifier, path=str(there)),
        )
        write_atomically(folder / CONFIG, to_yaml(at_work))
        return [*bars_of_capture(asked, run("capture", folder)), *bars_of_training(
            asked, run("train", folder)
        )]  # fmt: skip


def small_job(cfg: RunConfig) -> RunConfig:
    """The verifier of ``cfg`` where this machine can run it, else the demo's; the plan's draft."""
    sizes = verifier_sizes(cfg.verifier, cache_dir(cfg))
    demo = load_config(SMALL, [])
    if sizes.parameters > LARGEST:
        return demo
    verifier = replace(cfg.verifier, dtype=demo.verifier.dtype)
    run = replace(cfg.run, device=Device.cpu)
    return replace(demo, verifier=verifier, draft=cfg.draft, run=run)


@contextmanager
def taken_place(cfg: RunConfig) -> Iterator[Path]:
    """A folder on the cache's disk, gone afterwards."""
    cache_dir(cfg).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="plan-", dir=cache_dir(cfg)) as name:
        yield Path(name)


# glibc gives blocks from this size on back when they are freed. It would keep them between ones in
# use, and a plan counts what is in use; a GPU's allocator fills such gaps.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


def run(stage: str, folder: Path) -> Taken:
    """In a process of its own: what other work left in memory would count."""
    command = [sys.executable, "-m", "launch.planning.trial", stage, str(folder.resolve())]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **GIVEN_BACK}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise JobError(
            f"plan.check=true: the {stage} of the small job failed ({said[-1] if said else ''}); "
            "mend that, or plan with plan.check=false"
        )
    return Taken(**json.loads((folder / f"{stage}.json").read_text()))


def at_rate(asked: Question, rate: float) -> Question:
    """This machine as the one GPU of the plan."""
    plan = replace(asked.cfg.plan, train_mfu=CPU_SHARE, forward_mfu=CPU_SHARE)
    here = Hardware(memory=0.0, peak=rate, link=1.0, network=1.0)
    return replace(asked, cfg=replace(asked.cfg, plan=plan), hardware=here)


def bars_of_capture(asked: Question, taken: Taken) -> list[Bar]:
    size, memory = asked.stored_bytes, capture_memory(asked).total
    seconds = capture_hours(at_rate(asked, taken.rate)).compute * HOUR
    return [
        Bar("capture: memory", "GB", memory / GB, taken.bytes / GB, MEMORY_BAR),
        Bar("capture: disk", "GB", size / GB, taken.disk / GB, DISK_BAR),
        Bar("capture: CPU time", "s", seconds, taken.seconds, TIME_BAR),
    ]


def bars_of_training(asked: Question, taken: Taken) -> list[Bar]:
    memory = training_memory(asked, asked.cfg.engine.zero_stage).total
    epoch = epoch_hours(at_rate(asked, taken.rate)).compute * HOUR
    return [
        Bar("training: memory", "GB", memory / GB, taken.bytes / GB, MEMORY_BAR),
        Bar(
            "training: CPU time of a step", "s", epoch / asked.epoch_steps, taken.seconds, TIME_BAR
        ),
    ]


def page(bars: list[Bar]) -> list[str]:
    head = ("", "plan against measurement", "planned", "measured", "off by", "at most")
    return aligned(head, [bar.row for bar in bars])
