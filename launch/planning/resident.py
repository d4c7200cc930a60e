"""What a process uses while something runs: resident memory beyond the start, and CPU seconds."""

import ctypes
import gc
import os
import time
from pathlib import Path
from threading import Event, Thread

PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL = 0.005  # seconds between two looks at the resident memory


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory goes to the system, else it would count
    return looked()


def looked() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class Used:
    """Watches while it is entered: ``peak`` bytes resident, and ``seconds`` of all threads' CPU.

    A high-water mark kept by the kernel would hide growth below an older peak; wall time would
    count whatever else runs on the machine.
    """

    def __enter__(self) -> "Used":
        self.peak = resident_bytes()
        self.done = Event()
        self.thread = Thread(target=self.watch, daemon=True)
        self.begin = time.process_time()
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(INTERVAL):
            self.peak = max(self.peak, looked())

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self.begin
        self.peak = max(self.peak, looked())
        self.done.set()
        self.thread.join()
