"""The breakdown: where the time of a training step goes, part by part."""

from collections.abc import Iterator
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from conf.runtime import say
from models import marks
from models.marks import PARTS, PREFIX, part

WARM_UP = 3  # steps that are not counted: first allocations, compilation, the loader's start
WIRE = ("gloo:", "ncclDevKernel")  # how what ranks exchange is named, on the CPU and on CUDA


class Breakdown:
    """Profiles ``steps`` steps after a short warm-up and prints a table; 0 steps: does nothing."""

    def __init__(self, steps: int, device: torch.device):
        self.steps = steps
        self.on_gpu = device.type == "cuda"
        self.seen = 0  # steps since the start
        self.profiler: profile | None = None
        if steps:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.on_gpu else []
            self.profiler = profile(
                activities=activities,
                schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self.show,
            )

    def __enter__(self) -> "Breakdown":
        if self.profiler is not None:
            marks.waiting_for_cuda = self.on_gpu
            self.profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.profiler is not None:
            self.profiler.__exit__(kind, error, trace)
            marks.waiting_for_cuda = False
            if self.seen <= WARM_UP:
                say(f"log.breakdown={self.steps}: nothing to show, it begins after {WARM_UP} steps")

    def watched(self, windows: Iterator) -> Iterator:
        """``windows`` with the waiting for each marked as data, and a step counted after each."""
        while True:
            with part("data"):
                window = next(windows, None)
            if window is None:
                return
            yield window
            self.seen += 1
            if self.profiler is not None:
                self.profiler.step()

    def show(self, profiler: profile) -> None:
        """Print milliseconds a step and shares, by part."""
        steps = min(self.steps, self.seen - WARM_UP)
        if steps < 1:
            return
        spent, wire = dict.fromkeys(PARTS, 0.0), 0.0
        for event in profiler.key_averages():
            on_cpu = event.device_type.name == "CPU"
            if event.key.startswith(WIRE):
                micro = event.cpu_time_total if on_cpu else event.device_time_total
                wire += micro / 1e3 / steps
            elif event.key.startswith(PREFIX) and on_cpu:
                spent[event.key.removeprefix(PREFIX)] += event.cpu_time_total / 1e3 / steps
        whole = sum(ms for name, ms in spent.items() if not PARTS[name].startswith(" "))
        rows = [(PARTS[name], ms) for name, ms in spent.items()]
        rows.append(("of all this, exchanged between ranks", wire))
        lines = [f"  {words:<53}{ms:9.1f} ms {ms / whole:6.1%}" for words, ms in rows]
        say(f"where a step's {whole:.1f} ms go, mean of {steps} steps:\n" + "\n".join(lines))
