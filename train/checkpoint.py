"""Checkpoints of a run: written whole or not at all; the newest whole one is resumed."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.runtime import sync_folder, write_atomically
from conf.schema import ConfigError, JobError
from data.distributed import barrier
from train.engine import Engine

STATE = "state.json"  # written last: a folder that has it is whole
WRITE_FAILED = "inline_container"  # all that torch.save says of a disk that takes no more


@dataclass(frozen=True)
class TrainState:
    """Where training stands. Data order and learning rate follow from the step alone."""

    step: int  # optimizer steps done
    best_tau: float  # best held-out tau so far
    best_step: int
    world_size: int  # DeepSpeed's shards fit this number of ranks
    fingerprint: str  # of what shapes the curve: data, draft, ttt, loss, optim, engine


class Checkpoints:
    """The folder ``runs/<name>/checkpoints``: one sub-folder a saved step."""

    def __init__(self, folder: Path, keep: int, is_main: bool):
        self.folder = folder
        self.keep = keep
        self.is_main = is_main

    def whole(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}"))

    def save(self, engine: Engine, state: TrainState) -> None:
        """Write to a temporary folder on all ranks, then rename it on the first.

        Raises JobError when the disk does not take it.
        """
        final = self.folder / f"step-{state.step:08d}"
        temporary = self.folder / f".writing-{state.step:08d}"
        if self.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        try:
            engine.save(temporary)
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
            write_atomically(temporary / STATE, json.dumps(asdict(state), indent=2))
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            sync_folder(self.folder)
            for old in self.whole()[: -self.keep]:
                shutil.rmtree(old)
        barrier()

    def resume(self, engine: Engine, fresh: TrainState) -> TrainState:
        """Load the newest whole checkpoint into ``engine``; ``fresh`` when there is none.

        Raises ConfigError when it was written by another configuration or number of ranks.
        """
        if self.is_main:
            for leftover in self.folder.glob(".writing-*"):
                shutil.rmtree(leftover)  # of a run that was killed
        found = self.whole()
        if not found:
            return fresh
        state = TrainState(**json.loads((found[-1] / STATE).read_text()))
        if state.fingerprint != fresh.fingerprint:
            raise ConfigError(
                f"{found[-1]}: written with settings {state.fingerprint}, this run has "
                f"{fresh.fingerprint}; continue with the same settings or choose another run.name"
            )
        if state.world_size != fresh.world_size:
            raise ConfigError(
                f"{found[-1]}: written by {state.world_size} ranks, this run has "
                f"{fresh.world_size}; continue with --nproc-per-node={state.world_size}"
            )
        engine.load(found[-1])
        return state
