"""Checkpoints of a run: written whole or not at all; the newest whole one is resumed."""

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import xxhash

from conf.runtime import RankInfo, say, sync_folder, write_atomically
from conf.schema import ConfigError, JobError
from data.distributed import barrier, broadcast_object, gather_objects
from train.engine import Engine

STATE = "state.json"  # written last: a folder that has it was whole when it got its name
WRITE_FAILED = "inline_container"  # all that torch.save says of a disk that takes no more


@dataclass(frozen=True)
class TrainState:
    """Where training stands. Data order and learning rate follow from the step alone."""

    step: int  # optimizer steps done
    best_tau: float  # best held-out tau so far
    best_step: int
    world_size: int  # ranks that wrote it, each its part
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
            if self.is_main:  # others might take away what the first is still writing
                shutil.rmtree(temporary, ignore_errors=True)
            raise JobError(
                f"{temporary}: the checkpoint cannot be written; make room on that disk and run "
                "the same command again, which goes on from the checkpoint before"
            ) from error
        digests = shared_digests(temporary)
        if self.is_main:
            content = {"state": asdict(state), "files": sizes(temporary), "digests": digests}
            write_atomically(temporary / STATE, json.dumps(content, indent=2))
            shutil.rmtree(final, ignore_errors=True)
            temporary.replace(final)
            sync_folder(self.folder)
            for old in self.whole()[: -self.keep]:
                shutil.rmtree(old)
        barrier()

    def resume(self, engine: Engine, fresh: TrainState) -> TrainState:
        """Load the newest sound checkpoint into ``engine``; ``fresh`` when there is none.

        Another number of ranks may have written it. Raises ConfigError when another configuration
        did.
        """
        found = self.newest_sound()
        if found is None:
            return fresh
        state = TrainState(**json.loads((found / STATE).read_text())["state"])
        if state.fingerprint != fresh.fingerprint:
            raise ConfigError(
                f"{found}: written with settings {state.fingerprint}, this run has "
                f"{fresh.fingerprint}; continue with the same settings or choose another run.name"
            )
        engine.load(found, state.world_size)
        if state.world_size != fresh.world_size:
            say(
                f"{found}: written by {state.world_size} ranks; this run has {fresh.world_size}, "
                "which share the same packs a step: the curve differs by rounding"
            )
            state = replace(state, world_size=fresh.world_size, pending=summed(state.pending))
        return state

    def newest_sound(self) -> Path | None:
        """The newest checkpoint of which each byte is as written; the ranks read it together."""
        while True:
            found = broadcast_object(self.newest() if self.is_main else None)
            if found is None:
                return None
            known = json.loads((found / STATE).read_text())["digests"]
            there = shared_digests(found)
            changed = [name for name, digest in known.items() if there.get(name) != digest]
            if not changed:
                return found
            if self.is_main:
                set_aside(found, f"{changed[0]} is not as it was written")

    def newest(self) -> Path | None:
        """Clear away what a killed run left; the newest checkpoint whose files are all there."""
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        for folder in reversed(self.whole()):
            wrong = damage(folder)
            if wrong is None:
                return folder
            set_aside(folder, wrong)
        return None


def set_aside(folder: Path, wrong: str) -> None:
    """Take a damaged checkpoint out of the line, and say so."""
    aside = folder.with_name(f".damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.replace(aside)
    say(
        f"{folder}: {wrong}; the checkpoint before is taken, and {aside.name} is what is "
        "left of this one, delete it when you like"
    )


def shared_digests(folder: Path) -> dict[str, str]:
    """xxh3 of each file but the last written, by its path inside; every rank reads its share.

    torch checks no sums when it loads. Some GB/s a rank, mostly from memory after a save.
    """
    names = [name for name in sizes(folder) if name != STATE]
    rank = RankInfo.from_env()
    mine = {name: file_digest(folder / name) for name in names[rank.rank :: rank.world_size]}
    return {name: digest for part in gather_objects(mine) for name, digest in part.items()}


def file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def summed(pending: list[list[float]]) -> list[list[float]]:
    """Sums of all ranks as one rank's; the others begin at zero. By rank, of any number: rank r
    takes its own row, and a rank beyond the list none."""
    return [[sum(column) for column in zip(*pending, strict=True)]] if pending else []


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in ``folder``, by its path inside."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def damage(folder: Path) -> str | None:
    """What is missing in a checkpoint that was whole once, e.g. cut by a copy; None: nothing."""
    there = sizes(folder)
    try:
        content = json.loads((folder / STATE).read_text())
        TrainState(**content["state"])
        expected, _ = content["files"], content["digests"]
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
