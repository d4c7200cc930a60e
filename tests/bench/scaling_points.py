"""The points of the scaling benchmark, and the measure of one: seconds, attention, memory."""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import ParamSpec, TypeVar

import torch
from contender import Resident, mm_rate
from machine import peak_resident_bytes
from problem import Place, Problem, make_batch, make_module, take_step
from workload import TINY, Shape

from models.attention import Kernel
from models.kernels import CPU_FLASH

Given = ParamSpec("Given")
Made = TypeVar("Made")
HERE = Place(torch.device("cpu"), torch.float32)
LONG_STEP = 10.0  # seconds; a step that takes longer is taken once, for time and memory at once
TIMED = 8.0  # seconds after which a shorter one is timed no further


@dataclass(frozen=True)
class Plan:
    """One axis at a time around ``middle``."""

    middle: Problem
    lengths: tuple[int, ...]
    depths: tuple[int, ...]
    shares: tuple[int, ...]
    vocabularies: tuple[int, ...]
    recomputed: tuple[int, ...]  # lengths at which checkpointing is tried, at the middle's share
    filled: int  # and a length at which it is tried with all tokens supervised
    alone: int  # from this length on a point has a process of its own, whose peak is looked at

    def with_tokens(self, tokens: int) -> Problem:
        return replace(self.middle, shape=replace(self.middle.shape, tokens=tokens))

    def with_vocabulary(self, size: int, depth: int | None = None) -> Problem:
        shape = replace(self.middle.shape, draft_vocab=size)
        return replace(self.middle, shape=shape, depth=depth or self.middle.depth)

    def axes(self) -> dict[str, dict[int, Problem]]:
        """By axis, by value."""
        return {
            "tokens": {n: self.with_tokens(n) for n in self.lengths},
            "depth": {k: replace(self.middle, depth=k) for k in self.depths},
            "share": {share: replace(self.middle, share=share) for share in self.shares},
            "vocabulary": {size: self.with_vocabulary(size) for size in self.vocabularies},
        }

    def corners(self) -> list[Problem]:
        """Smallest and largest depth, each with the smallest and largest draft vocabulary."""
        depths = self.depths[0], self.depths[-1]
        return [self.with_vocabulary(size, k) for k in depths for size in self.ends()]

    def ends(self) -> tuple[int, int]:
        return self.vocabularies[0], self.vocabularies[-1]

    def checkpointed(self) -> list[Problem]:
        tried = [self.with_tokens(n) for n in self.recomputed]
        tried.append(replace(self.with_tokens(self.filled), share=100))
        return [replace(problem, recompute=True) for problem in tried]

    def problems(self) -> list[Problem]:
        """Each once, in the order in which they are measured."""
        on_axes = [problem for axis in self.axes().values() for problem in axis.values()]
        return list(dict.fromkeys([*on_axes, *self.corners(), *self.checkpointed()]))


FULL = Plan(
    middle=Problem(Shape(batch=1, tokens=2048)),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    depths=(1, 2, 3, 5, 7, 10),
    shares=(5, 10, 20, 40, 70, 100),
    vocabularies=(4096, 8192, 16384, 32768, 49152),
    recomputed=(2048, 8192, 16384),
    filled=16384,
    alone=8192,
)
SMALL = Plan(
    middle=Problem(replace(TINY, batch=1, tokens=256), depth=3),
    lengths=(64, 128, 256),
    depths=(1, 2, 3),
    shares=(20, 40, 100),
    vocabularies=(64, 128, 256),
    recomputed=(256,),
    filled=512,
    alone=512,
)


@dataclass(frozen=True)
class Measured:
    seconds: float  # of a step, the median
    attention: float  # of them, in the kernel over step-0 keys
    extra_bytes: int  # beyond what is resident before the step
    rate: float  # FLOP/s of the machine's own product, just before
    loss: float
    peak_bytes: int | None = None  # of the whole process, for a point that had one of its own


@dataclass
class Clock:
    """Adds up the seconds spent in what it is put around."""

    seconds: list[float] = field(default_factory=lambda: [0.0])

    def around(self, work: Callable[Given, Made]) -> Callable[Given, Made]:
        def timed(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            begin = perf_counter()
            made = work(*args, **kwargs)
            self.seconds[-1] += perf_counter() - begin
            return made

        return timed

    def of(self, kernel: Kernel) -> Kernel:
        return Kernel(kernel.name, self.around(kernel.forward), self.around(kernel.backward))


def measure(problem: Problem, threads: int, tries: int) -> Measured:
    """One step for memory, which warms up, then up to ``tries`` for time; of a long one, the first
    for both."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock()
    module, batch = make_module(problem, HERE, clock.of(CPU_FLASH)), make_batch(problem, HERE)
    small = problem.shape.hidden < 256
    rate = mm_rate(256, 256) if small else mm_rate()
    seconds = []
    with Resident() as memory:
        begin = perf_counter()
        loss = take_step(module, batch)
        seconds.append(perf_counter() - begin)
    if seconds[0] < LONG_STEP:
        wanted = min(tries, math.ceil(TIMED / seconds[0]))
        seconds, clock.seconds = [], []
        for _ in range(wanted):
            clock.seconds.append(0.0)
            begin = perf_counter()
            take_step(module, batch)
            seconds.append(perf_counter() - begin)
    return Measured(
        seconds=median(seconds),
        attention=median(clock.seconds),
        extra_bytes=memory.extra,
        rate=rate,
        loss=loss.item(),
    )


def measure_alone(problem: Problem, threads: int, tries: int) -> Measured:
    """In a fresh process, whose highest resident memory is that of this point."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        measured = pool.submit(measure, problem, threads, tries)
        return replace(measured.result(), peak_bytes=pool.submit(peak_resident_bytes).result())
