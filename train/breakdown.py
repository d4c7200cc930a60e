"""The breakdown: where the time of a training step goes, part by part."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from conf.runtime import say
from models.marks import PARTS, PREFIX, part

WARM_UP = 3  # steps that are not counted: first allocations, compilation, the loader's start
WIRE = ("gloo:", "nccl:")  # how torch.distributed names what it sends


class Breakdown:
    """Profiles ``steps`` steps after a short warm-up and prints a table; 0 steps: does nothing."""

    def __init__(self, steps: int, device: torch.device):
        self.steps = steps
        self.on_gpu = device.type == "cuda"
        self.profiler: profile | None = None
        if steps:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.on_gpu else []
            self.profiler = profile(
                activities=activities,
                schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self.show,
            )

    def watching(self) -> AbstractContextManager:
        return self.profiler or nullcontext()

    def watched(self, windows: Iterator) -> Iterator:
        """``windows`` with the waiting for each marked as data, and a step counted after each."""
        while True:
            with part("data"):
                window = next(windows, None)
            if window is None:
                return
            yield window
            if self.profiler is not None:
                self.profiler.step()

    def show(self, profiler: profile) -> None:
        """Print milliseconds a step and shares, by part. On CUDA a part has the time of the kernels
        started inside it."""
        spent, wire = dict.fromkeys(PARTS, 0.0), 0.0
        for event in profiler.key_averages():
            micro = event.device_time_total if self.on_gpu else 0.0
            milliseconds = (micro or event.cpu_time_total) / 1e3 / self.steps
            if event.key.startswith(WIRE):
                wire += milliseconds
            elif event.key.startswith(PREFIX):
                spent[event.key.removeprefix(PREFIX)] += milliseconds
        whole = sum(ms for name, ms in spent.items() if not PARTS[name].startswith(" "))
        rows = [(PARTS[name], ms) for name, ms in spent.items()]
        rows.append(("of all this, exchanged between ranks", wire))
        lines = [f"  {words:<53}{ms:9.1f} ms {ms / whole:6.1%}" for words, ms in rows]
        say(f"where a step's {whole:.1f} ms go, mean of {self.steps} steps:\n" + "\n".join(lines))
