"""What every contender's process does: read a case on stdin, take the step, answer with a figure.

One JSON line in, one out. In: ``{"share": 40, "depth": 7, "dtype": "float32", "measure": "time"}``,
where ``measure`` is "time", "memory" or (Eyrie alone) "gradient_error". Out: ``{"seconds",
"extra_bytes", "loss", "rows", "gradient_norm"}``, ``{"gradient_error"}`` or ``{"error"}``. The
first line that leaves the process says that it is ready, and with which versions. A step is
forward and backward; gradients are cleared before it.

It loads in the peers' environments too, so it imports torch and the standard library alone.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor, nn
from workload import Case, Shape, Workload, make_workload

PAGE = os.sysconf("SC_PAGE_SIZE")
TURN = 2.5  # seconds of steps that a turn has at least; its figure is their median
INTERVAL = 0.002  # seconds between two looks at the resident memory


@dataclass(frozen=True)
class Outcome:
    loss: Tensor  # []
    rows: list[Tensor] = field(default_factory=list)  # by step: how many rows carry loss


class Contender(Protocol):
    packages: tuple[str, ...]  # whose versions are reported
    trained: nn.Module  # its gradients are cleared before a step

    def prepare(self, case: Case) -> Callable[[], Outcome]:
        """What a data loader does, untimed -> the forward pass on it."""
        ...

    def gradient_error(self, case: Case) -> float:
        """Norm of the gradient's difference from fp64, over the norm in fp64."""
        ...


class Resident:
    """Samples the process's resident memory while it is entered. ``extra``: bytes over the start.

    A high-water mark kept by the kernel would hide growth below an older peak.
    """

    def __enter__(self) -> "Resident":
        gc.collect()
        give_memory_back()
        self.start = self.peak = resident_bytes()
        self.done = Event()
        self.thread = Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(INTERVAL):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, resident_bytes())
        self.done.set()
        self.thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.start


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def give_memory_back() -> None:
    """Freed memory goes to the system, else a step could reuse it unseen."""
    ctypes.CDLL(None).malloc_trim(0)


def mm_rate(rows: int = 4096, width: int = 2048, tries: int = 3) -> float:
    """FLOP/s of the machine's own fp32 product [rows, width] x [width, width], best of a few."""
    left, right = torch.randn(rows, width), torch.randn(width, width)
    out = torch.empty(rows, width)
    best = float("inf")
    for _ in range(tries):
        begin = perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, perf_counter() - begin)
    return 2 * rows * width * width / best


def clear(trained: nn.Module) -> None:
    for parameter in trained.parameters():
        parameter.grad = None


def take_step(forward: Callable[[], Outcome]) -> Outcome:
    outcome = forward()
    outcome.loss.backward()
    return outcome


def measured(contender: Contender, case: Case, measure: str) -> dict[str, Any]:
    forward = contender.prepare(case)
    clear(contender.trained)
    seconds, extra = None, None
    if measure == "memory":
        with Resident() as memory:
            outcome = take_step(forward)
        extra = memory.extra
    else:
        times: list[float] = []
        while sum(times) < TURN:
            clear(contender.trained)
            begin = perf_counter()
            outcome = take_step(forward)
            times.append(perf_counter() - begin)
        seconds = median(times)
    gradients = [p.grad for p in contender.trained.parameters() if p.grad is not None]
    return {
        "seconds": seconds,
        "extra_bytes": extra,
        "loss": outcome.loss.item(),
        "rows": [int(count) for count in outcome.rows],
        "gradient_norm": float(torch.nn.utils.get_total_norm(gradients)),
    }


def serve(contender: Contender, channel: TextIO) -> None:
    """Answer until stdin ends. A case's first step is a warm-up that nobody sees."""
    warm: set[Case] = set()
    versions = {name: metadata.version(name) for name in ("torch", *contender.packages)}
    answer(channel, {"ready": True, "versions": versions, "threads": torch.get_num_threads()})
    for line in sys.stdin:
        command = json.loads(line)
        measure = command.pop("measure")
        case = Case(**command)
        try:
            if measure == "gradient_error":
                answer(channel, {"gradient_error": contender.gradient_error(case)})
                continue
            if case not in warm:
                measured(contender, case, "time")
                warm.add(case)
            answer(channel, measured(contender, case, measure))
        except (RuntimeError, ValueError) as error:  # a compiler that fails raises the first
            answer(channel, {"error": f"{type(error).__name__}: {str(error)[:500]}"})


def answer(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def run(build: Callable[[Workload, bool], Contender]) -> None:
    """A contender's main: ``build`` makes it from the workload and whether it is compiled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="{}", help="JSON of what differs from the default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    work = make_workload(Shape(**json.loads(args.shape)), args.seed)
    serve(build(work, args.compile), channel)
