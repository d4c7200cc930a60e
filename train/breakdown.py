"""The breakdown: where the time of a training step goes, part by part."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from conf.runtime import say

WARM_UP = 3  # steps that are not counted: first allocations, compilation, the loader's start
# The parts of a step in the order of their work, and those that are inside another.
PARTS = {
    "data": "waiting for the loader",
    "transfer": "batch to the device",
    "forward": "forward, of which",
    "keys": "  fuse, step-0 keys and values",
    "attention": "  attention and its projections",
    "mlp": "  MLP",
    "loss": "  draft head, teacher and loss, with their gradient",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "of all this, communication between ranks",
}
WIRE = ("gloo:", "nccl:", "c10d::")  # how torch.distributed names what it sends


def part(name: str) -> AbstractContextManager:
    """Marks what runs inside as one part of the step; costs a microsecond when nobody looks."""
    assert name in PARTS, name
    return record_function(f"eyrie/{name}")


class Breakdown:
    """Profiles ``steps`` steps after a short warm-up and prints a table; 0 steps: does nothing."""

    def __init__(self, steps: int, device: torch.device):
        self.steps = steps
        self.on_gpu = device.type == "cuda"
        self.profiler: AbstractContextManager = nullcontext()
        if steps:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.on_gpu else []
            self.profiler = profile(
                activities=activities,
                schedule=schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
                on_trace_ready=self.show,
            )

    def __enter__(self) -> "Breakdown":
        self.profiler.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.profiler.__exit__(*error)

    def watched(self, windows: Iterator) -> Iterator:
        """``windows`` with the waiting for each marked as data, and a step counted at each."""
        while True:
            with part("data"):
                window = next(windows, None)
            if window is None:
                return
            yield window
            if isinstance(self.profiler, profile):
                self.profiler.step()

    def show(self, profiler: profile) -> None:
        """Print milliseconds a step and shares, by part."""
        spent = dict.fromkeys(PARTS, 0.0)
        for event in profiler.key_averages():
            name = event.key.removeprefix("eyrie/")
            if event.key.startswith(WIRE):
                name = "communication"
            elif name == event.key:
                continue
            # A marked range has the time of the kernels that were started inside it.
            micro = event.device_time_total if self.on_gpu else event.cpu_time_total
            spent[name] += (micro or event.cpu_time_total) / 1e3 / self.steps
        whole = sum(ms for name, ms in spent.items() if not PARTS[name].startswith((" ", "of all")))
        rows = [f"  {PARTS[n]:<52}{ms:9.1f} ms {ms / whole:6.1%}" for n, ms in spent.items()]
        say(f"where a step's {whole:.1f} ms go, mean of {self.steps} steps:\n" + "\n".join(rows))
