"""The probes: each asks this machine one thing, and reads the answer in a function of its own.

Nothing here needs a package that Eyrie needs: a machine without torch gets its answers, too.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from conf.runtime import ROOT
from launch.checkup.machine import Disk, Driver, Gpu, Machine, Operator, Package, Torch, Vllm

MIB, GIB = 1 << 20, 1 << 30
PROGRAMS = ("gcc", "cc", "clang", "g++", "c++", "clang++", "nvcc", "sbatch", "srun")
ASK_GPUS = ["--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"]
ASK_VLLM = (  # by the module's name: builds for other machines are other distributions
    "from importlib.metadata import packages_distributions, version;"
    "print(version(packages_distributions()['vllm'][0]))"
)
PATIENCE = 60.0  # seconds for another program's answer


def examine(cache: Path, disk_mib: int) -> Machine:
    """Everything, within seconds; ``disk_mib`` are written beside the cache and deleted."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return Machine(
        python=sys.version.split()[0],
        cores=len(os.sched_getaffinity(0)),
        memory_gib=memory_gib(
            text_of(Path("/proc/meminfo")), text_of(Path("/sys/fs/cgroup/memory.max"))
        ),
        driver=driver_of(answer(["nvidia-smi", *ASK_GPUS]), answer(["nvidia-smi"])),
        torch=ask_torch(),
        packages=[package_of(line, installed) for line in settings["dependencies"]],
        flash_attn=installed("flash-attn"),
        sweep=[package_of(line, installed) for line in settings["optional-dependencies"]["sweep"]],
        operators=operators_in(places_of_operators()),
        programs=[name for name in PROGRAMS if shutil.which(name)],
        python_header=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        disk=try_disk(cache, disk_mib),
        vllm=ask_vllm(vllm_python()),
    )


def text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def answer(command: list[str]) -> str:
    """What a program prints; empty where it is missing, fails or hangs."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        return done.stdout if done.returncode == 0 else ""
    return ""


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def memory_gib(meminfo: str, limit: str) -> float:
    """The machine's memory, or less where the control group of a job or container has a limit."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.M)
    total = int(found[1]) * 1024 if found else 0
    group = limit.strip()
    return (min(total, int(group)) if group.isdigit() else total) / GIB


def driver_of(listing: str, page: str) -> Driver | None:
    """``listing``: a line a GPU, name, memory, capability, driver; ``page``: nvidia-smi alone."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line]
    rows = [row for row in rows if len(row) == 4]
    if not rows:
        return None
    cuda = re.search(r"CUDA(?: \w+)? Version:\s*([\d.]+)", page)
    gpus = [Gpu(name, float(size.split()[0]) / 1024, kind) for name, size, kind, _ in rows]
    return Driver(rows[0][3], cuda[1] if cuda else "", gpus)


def ask_torch() -> Torch | None:
    if find_spec("torch") is None:
        return None
    import torch

    version = None
    if torch.cuda.is_available():
        from torch.cuda import nccl

        version = ".".join(map(str, nccl.version()))
    return Torch(torch.__version__, torch.version.cuda, torch.cuda.device_count(), version)


def package_of(requirement: str, version_of: Callable[[str], str | None]) -> Package:
    """A line of pyproject.toml beside what ``version_of`` finds installed."""
    name = re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0]
    wanted, found = requirement[len(name) :], version_of(name)
    if found is None or find_spec("packaging") is None:
        return Package(name, wanted, found, found is not None)
    from packaging.specifiers import SpecifierSet  # one of the packages that may be missing

    return Package(name, wanted, found, SpecifierSet(wanted).contains(found, prereleases=True))


def places_of_operators() -> list[Path]:
    """Where torch builds extensions, and where DeepSpeed lies, with those built beforehand."""
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    places = [Path(own) if own else Path.home() / ".cache" / "torch_extensions"]
    spec = find_spec("deepspeed")
    if spec is not None and spec.submodule_search_locations:
        places.append(Path(spec.submodule_search_locations[0]) / "ops")
    return places


def operators_in(places: list[Path]) -> list[Operator]:
    """Folders with a built library or with the lock of a build."""
    found = {path.parent for place in places for path in place.rglob("*.so")}
    locked = {path.parent for place in places for path in place.rglob("lock")}
    return [
        Operator(path.name, str(path), path in found, path in locked)
        for path in sorted(found | locked)
    ]


def try_disk(cache: Path, mib: int) -> Disk:
    """Write and read ``mib`` where the cache is or will be; the file has no name and stays not."""
    there = next(path for path in (cache.absolute(), *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free * 1e9 < 2 * mib * MIB:
        return Disk(str(there), free, None, None, f"less than {2 * mib} MiB are free")
    block = os.urandom(MIB)  # a disk that compresses gains nothing
    try:
        with TemporaryFile(dir=there, buffering=0) as file:
            start = time.perf_counter()
            for _ in range(mib):
                file.write(block)
            os.fsync(file.fileno())
            written = time.perf_counter()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
            file.seek(0)
            begin = time.perf_counter()
            while file.read(MIB):
                pass
            end = time.perf_counter()
    except OSError as error:
        return Disk(str(there), free, None, None, error.strerror or str(error))
    size = mib * MIB / 1e6
    return Disk(str(there), free, size / (written - start), size / (end - begin), None)


def vllm_python() -> Path | None:
    """EYRIE_VLLM_PYTHON, else the environment of launch/vllm_env.sh, else this one if it has it."""
    named = os.environ.get("EYRIE_VLLM_PYTHON")
    if named:
        return Path(named)
    own = ROOT / ".venv-vllm" / "bin" / "python"
    if own.is_file():
        return own
    return Path(sys.executable) if find_spec("vllm") is not None else None


def ask_vllm(python: Path | None) -> Vllm | None:
    if python is None:
        return None
    return Vllm(str(python), answer([str(python), "-c", ASK_VLLM]).strip() or None)
