"""Captures that are killed: one process imports and loads once, its forks capture and die.

python kill_run.py JOB KILLS, where JOB is a pickle of (cfg, prepared). Half of the forks get
SIGKILL after a random time, half send it to themselves around a random one of the calls that make
files durable. Prints one line of JSON. Run with OMP_NUM_THREADS=1: no thread but the first one
lives when a fork is made.
"""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from conf.runtime import RankInfo
from data.capture import capture
from data.manifest import manifest_file, shard_folder
from models.verifier import Verifier

DURABLE = ("fsync", "replace")  # calls of os
ALONE = RankInfo(0, 1, 0)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in shard_folder(folder).glob("*.safetensors")}


def inodes_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in shard_folder(folder).glob("*.safetensors")}


def hook(at: int | None) -> list[int]:
    """Count the durable calls; die before or after number ``at``, counted twice a call."""
    seen = [0]

    def counted(real: Callable) -> Callable:
        def call(*args: object) -> object:
            for side in (0, 1):
                seen[0] += 1
                if seen[0] - 1 == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if side == 0:
                    result = real(*args)
            return result

        return call

    for name in DURABLE:
        setattr(os, name, counted(getattr(os, name)))
    return seen


def forked(run: Callable[[], None], delay: float | None) -> bool:
    """Run in a fork, killed after ``delay`` seconds -> whether a kill ended it."""
    child = os.fork()
    if child == 0:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run()
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def main() -> None:
    torch.set_num_threads(1)
    cfg, prepared = pickle.loads(Path(sys.argv[1]).read_bytes())
    verifier = Verifier.load(cfg.verifier, Path(cfg.run.cache), torch.device("cpu"), torch.float32)
    Verifier.load = lambda *_: verifier  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        folder = capture(cfg, prepared, ALONE)
    whole, manifest = bytes_of(folder), manifest_file(folder).read_bytes()
    shutil.rmtree(folder)

    def counting() -> None:
        seen = hook(None)
        begin = time.monotonic()
        capture(cfg, prepared, ALONE)
        (folder / "seen").write_text(json.dumps([seen[0], time.monotonic() - begin]))

    forked(counting, None)
    calls, lifetime = json.loads((folder / "seen").read_text())
    shutil.rmtree(folder)

    chance = random.Random(0)
    killed, redone, torn, kinds = 0, 0, 0, set()
    while killed < int(sys.argv[2]):
        before = inodes_of(folder)
        at = chance.randrange(calls) if killed % 2 else None

        def once(at: int | None = at) -> None:
            hook(at)
            capture(cfg, prepared, ALONE)

        dead = forked(once, None if killed % 2 else chance.uniform(0, lifetime))
        after = inodes_of(folder)
        redone += sum(after.get(name) != inode for name, inode in before.items())
        torn += sum(data != whole[name] for name, data in bytes_of(folder).items())
        if dead:
            killed += 1
            kinds.add(len(after))
        if not dead or manifest_file(folder).exists():
            assert manifest_file(folder).read_bytes() == manifest
            assert bytes_of(folder) == whole
            shutil.rmtree(folder)  # whole: the next kills meet a new one
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        capture(cfg, prepared, ALONE)
    same = bytes_of(folder) == whole and manifest_file(folder).read_bytes() == manifest
    left = [path.name for path in shard_folder(folder).iterdir() if path.name not in whole]
    found = {"killed": killed, "redone": redone, "torn": torn, "same": same, "left": left}
    sys.stdout.write(json.dumps(found | {"whole_at_kill": sorted(kinds)}) + "\n")


if __name__ == "__main__":
    main()
