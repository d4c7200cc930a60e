"""Checkpoints of a run: written whole or not at all; the newest whole one is resumed."""

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conf.runtime import say, sync_folder, write_atomically
from conf.schema import ConfigError, JobError
from data.distributed import barrier, broadcast_object
from train.engine import Engine

STATE = "state.json"  # written last: a folder that has it was whole when it got its name
WRITE_FAILED = "inline_container"  # all that torch.save says of a disk that takes no more


@dataclass(frozen=True)
class TrainState:
    """Where training stands. Data order and learning rate follow from the step alone."""

    step: int  # optimizer steps done
    best_tau: float  # best held-out tau so far
    best_step: int
    world_size: int  # DeepSpeed's shards fit this number of ranks
    fingerprint: str  # of what shapes the curve: data, draft, ttt, loss, optim, engine
    pending: list[list[float]] = field(default_factory=list)  # by rank: sums not yet reported


class Checkpoints:
    """The folder ``runs/<name>/checkpoints``: one sub-folder a saved step."""

    def __init__(self, folder: Path, keep: int, is_main: bool):
        self.folder = folder
        self.keep = keep
        self.is_main = is_main

    def whole(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}"))

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, engine: Engine, state: TrainState) -> None:
        """Write to a temporary folder on all ranks, then rename it on the first.

        Raises JobError when the disk does not take it.
        """
        final = self.at(state.step)
        temporary = self.folder / f".writing-{state.step:08d}"
        if self.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        try:
            engine.save(temporary)
            barrier()  # all ranks have written; each makes durable what went through its machine
            sync_tree(temporary)
        except RuntimeError as error:
            if WRITE_FAILED not in str(error):
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            raise JobError(
                f"{temporary}: the checkpoint cannot be written; make room on that disk and run "
                "the same command again, which goes on from the checkpoint before"
            ) from error
        barrier()
        if self.is_main:
            content = {"state": asdict(state), "files": sizes(temporary)}
            write_atomically(temporary / STATE, json.dumps(content, indent=2))
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            sync_folder(self.folder)
            for old in self.whole()[: -self.keep]:
                shutil.rmtree(old)
        barrier()

    def resume(self, engine: Engine, fresh: TrainState) -> TrainState:
        """Load the newest sound checkpoint into ``engine``; ``fresh`` when there is none.

        Raises ConfigError when it was written by another configuration or number of ranks.
        """
        found = broadcast_object(self.newest() if self.is_main else None)
        if found is None:
            return fresh
        state = TrainState(**json.loads((found / STATE).read_text())["state"])
        if state.fingerprint != fresh.fingerprint:
            raise ConfigError(
                f"{found}: written with settings {state.fingerprint}, this run has "
                f"{fresh.fingerprint}; continue with the same settings or choose another run.name"
            )
        if state.world_size != fresh.world_size:
            raise ConfigError(
                f"{found}: written by {state.world_size} ranks, this run has "
                f"{fresh.world_size}; continue with --nproc-per-node={state.world_size}"
            )
        engine.load(found)
        return state

    def newest(self) -> Path | None:
        """Clear away what a killed run left; the newest checkpoint whose files are all there."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        for folder in reversed(self.whole()):
            wrong = damage(folder)
            if wrong is None:
                return folder
            aside = folder.with_name(f".damaged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.replace(aside)
            say(
                f"{folder}: {wrong}; the checkpoint before is taken, and {aside.name} is what is "
                "left of this one, delete it when you like"
            )
        return None


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in ``folder``, by its path inside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def damage(folder: Path) -> str | None:
    """What is missing in a checkpoint that was whole once, e.g. cut by a copy; None: nothing.

    Sizes alone, since reading gigabytes twice would cost each save and each start as much as the
    checkpoint itself.
    """
    there = sizes(folder)
    try:
        content = json.loads((folder / STATE).read_text())
        TrainState(**content["state"])
        expected = content["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{STATE} cannot be read ({error})"
    for name, size in expected.items():
        if there.get(name) != size:
            return f"{name} has {there.get(name, 0)} of {size} bytes"
    return None


def sync_tree(folder: Path) -> None:
    """Make durable what lies in ``folder``, or a power cut could leave a whole-looking shell."""
    for path in folder.rglob("*"):
        sync_folder(path)  # takes files alike
