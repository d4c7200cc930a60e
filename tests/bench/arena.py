"""Runs the contenders of the step benchmark by turns: one process each, one at work at a time."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

from workload import Case

HERE = Path(__file__).resolve().parent
FALL = 0.9  # a round whose matrix products run below this share of the best rate is dropped


@dataclass(frozen=True)
class Rival:
    """One row of the table: a trainer, run in one way."""

    name: str
    script: str
    python: Path
    dtype: str = "float32"
    compiled: bool = False


@dataclass(frozen=True)
class Sample:
    """One case of one round: every rival once, between two looks at the machine."""

    case: Case
    rates: list[float]  # FLOP/s of the plain matrix product, before and after
    answers: dict[str, dict[str, Any]]  # by rival


@dataclass
class Timing:
    """All samples; those in which the machine slowed down are dropped, and were repeated."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def best_rate(self) -> float:
        return max((rate for sample in self.samples for rate in sample.rates), default=0.0)

    def kept(self) -> list[Sample]:
        return [s for s in self.samples if min(s.rates) >= FALL * self.best_rate]


class Process:
    """A contender that waits for its next case."""

    def __init__(self, rival: Rival, options: list[str], threads: int):
        command = [str(rival.python), str(HERE / rival.script), *options]
        command += ["--threads", str(threads)]
        command += ["--compile"] if rival.compiled else []
        self.log = TemporaryFile("w+")  # noqa: SIM115  it lives as long as the process
        self.rival = rival
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.versions: dict[str, str] = {}

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.rival.name} stopped:\n{self.log.read()[-3000:]}")
        return json.loads(line)

    def ask(self, case: Case, measure: str, dtype: str = "float32") -> dict[str, Any]:
        assert self.process.stdin is not None
        command = {"share": case.share, "depth": case.depth, "dtype": dtype, "measure": measure}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Arena:
    """The processes of some rivals; rivals that differ in dtype alone share one."""

    def __init__(self, rivals: list[Rival], options: list[str], threads: int):
        self.rivals = rivals
        self.processes: dict[tuple[str, bool], Process] = {}
        for rival in rivals:
            key = (rival.script, rival.compiled)
            if key not in self.processes:
                self.processes[key] = Process(rival, options, threads)
        for process in self.processes.values():  # they import and build all at once
            process.versions = process.read()["versions"]

    def ask(self, rival: Rival, case: Case, measure: str) -> dict[str, Any]:
        process = self.processes[rival.script, rival.compiled]
        return process.ask(case, measure, rival.dtype)

    def close(self) -> None:
        for process in self.processes.values():
            process.close()

    def sample(self, case: Case, rate: Callable[[], float]) -> Sample:
        before = rate()
        answers = {rival.name: self.ask(rival, case, "time") for rival in self.rivals}
        return Sample(case, [before, rate()], answers)

    def memory(self, cases: list[Case], tries: int) -> dict[Case, dict[str, int | None]]:
        """Bytes a step takes beyond what is there before it: the median of ``tries``, by rival.

        None where the step failed. Taken before any time, so that it warms every case up.
        """
        taken: dict[Case, dict[str, int | None]] = {case: {} for case in cases}
        for case in cases:
            for rival in self.rivals:
                note(f"memory: {rival.name}, {title(case)}")
                replies = [self.ask(rival, case, "memory") for _ in range(tries)]
                failed = any("error" in reply for reply in replies)
                extra = None if failed else median(reply["extra_bytes"] for reply in replies)
                taken[case][rival.name] = None if extra is None else int(extra)
        return taken

    def time(self, cases: list[Case], rounds: int, rate: Callable[[], float]) -> Timing:
        """Every case ``rounds`` times, in turn; at most as many passes again for repeats."""
        timing = Timing()
        for number in range(2 * rounds):
            done = Counter(sample.case for sample in timing.kept())
            for case in cases:
                if done[case] >= rounds:
                    continue
                sample = self.sample(case, rate)
                timing.samples.append(sample)
                note(f"round {number + 1}: {described(sample)}")
        return timing


def title(case: Case) -> str:
    return f"K = {case.depth}, {case.share} % supervised"


def described(sample: Sample) -> str:
    parts = [
        f"{name} {reply['seconds']:.2f} s" if "seconds" in reply else f"{name} failed"
        for name, reply in sample.answers.items()
    ]
    rates = " and ".join(f"{rate / 1e9:.0f}" for rate in sample.rates)
    return f"{title(sample.case)}: {', '.join(parts)}; matrix product {rates} GFLOP/s"


def note(text: str) -> None:
    """Progress goes to standard error; the table alone to standard output."""
    print(text, file=sys.stderr, flush=True)
