"""Where a run lives and who speaks in it: ranks, folders, fingerprints, atomic files, progress."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from conf.schema import RunConfig

Item = TypeVar("Item")
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "deepspeed", "datasets", "hydra-core", "safetensors")


@dataclass(frozen=True)
class RankInfo:
    """This process among the processes that torchrun started; alone, rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_env(cls) -> "RankInfo":
        get = os.environ.get
        return cls(int(get("RANK", "0")), int(get("WORLD_SIZE", "1")), int(get("LOCAL_RANK", "0")))

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def run_dir(cfg: RunConfig) -> Path:
    return Path(cfg.run.root) / cfg.run.name


def cache_dir(cfg: RunConfig) -> Path:
    return Path(cfg.run.cache)


_logs: list[Path] = []  # files that get a copy of every line said


def log_to(path: Path) -> None:
    """From now on keep what is said in ``path``, too."""
    _logs[:] = [path]


_held: list[list[str]] = []  # where lines go that this process does not print itself


def hold_lines() -> list[str]:
    """From now on collect what is said in the list returned, for another process to say."""
    _held[:] = [[]]
    return _held[0]


def say(text: str = "") -> None:
    """Print one line on standard output, from rank 0 alone."""
    if _held:
        _held[0].append(text)
    elif RankInfo.from_env().is_main:
        print(text, flush=True)  # noqa: T201  the one door to standard output
        note_in_log(text)


@cache
def note_once(text: str) -> None:
    """Say ``text`` the first time, as a note."""
    say(f"note: {text}")


def note_in_log(text: str) -> None:
    """Keep ``text`` in the run's log, if a run is on."""
    for path in _logs:
        with path.open("a") as log:
            log.write(text + "\n")


def progress(items: Iterable[Item], total: int, desc: str, unit: str) -> Iterable[Item]:
    """Wrap ``items`` with a bar on standard error (rate and ETA), on rank 0 alone."""
    from tqdm import tqdm  # 30 ms, and configuration errors must not wait for it

    quiet = not RankInfo.from_env().is_main
    lines = not sys.stderr.isatty()  # a log file gets a line every ten seconds, not a flicker
    return tqdm(
        items,
        total=total,
        desc=desc,
        unit=unit,
        disable=quiet,
        dynamic_ncols=True,
        mininterval=10.0 if lines else 0.2,
        file=sys.stderr,
    )


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: temporary name, fsync, rename, fsync of the folder.

    A device or a pipe is written to as it is: root could replace /dev/null for all programs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file() and not path.is_dir():  # /dev/null, a pipe
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain(value: Any) -> Any:
    """Dataclasses, enums and paths as what JSON and YAML can hold; NaN and infinity as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def fingerprint(*parts: Any) -> str:
    """Twelve hex digits that change when any part does."""
    text = json.dumps(plain(list(parts)), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def ask_git(*words: str) -> str:
    """What git says of the checkout; empty where there is no git or no repository."""
    try:
        answer = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def provenance() -> dict[str, Any]:
    """What ran: the code's revision, package versions and the command line."""
    revision = ask_git("rev-parse", "HEAD")
    return {
        "git": revision or None,
        "git_dirty": bool(ask_git("status", "--porcelain")) if revision else None,
        "python": sys.version.split()[0],
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "argv": sys.argv,
    }
