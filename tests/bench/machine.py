"""The machine a benchmark runs on: its name, its clock, its memory, its matrix product."""

import platform
import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from contender import Resident, mm_rate

# Dense bf16 FLOP/s without sparsity, from the makers' data sheets; the first name that fits.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def peak_flops(name: str) -> float | None:
    """Of a device by its name; None for one that the table lacks."""
    fits = (peak for key, peak in PEAKS.items() if re.search(rf"\b{key}\b", name))
    return next(fits, None)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``work`` on the device: between two events there, by the clock on a CPU."""
    if device.type != "cuda":
        begin = perf_counter()
        work()
        return perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def extra_bytes_of(work: Callable[[], object], device: torch.device) -> int:
    """Most memory that ``work`` holds at once beyond what is held before it."""
    if device.type != "cuda":
        with Resident() as memory:
            work()
        return memory.extra
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def device_mm_rate(device: torch.device, size: int, tries: int = 10) -> float:
    """FLOP/s of the device's own product of random bf16 [size, size], fp32 on a CPU; best of a
    few."""
    if device.type != "cuda":
        return mm_rate(size, size)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    best = min(seconds_of(lambda: torch.mm(left, right, out=out), device) for _ in range(tries))
    return 2 * size**3 / best


def peak_resident_bytes() -> int:
    """Most resident memory that this process ever had. (``ru_maxrss`` starts with the parent's.)"""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024
