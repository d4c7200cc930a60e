"""The stage: shards of a store on the local disk, the least recently used making room for others.

Beside ``shards/`` of a capture's folder lies ``staging/``: a lock a shard, whose size is what its
download has reserved; the download itself, NAME.part; and NAME.index, a file of the shard's size
with holes where its states are, so that it opens as the shard does and takes some kilobytes.
Locks are the system's (flock): it frees those of a killed process. All processes of one machine
share the folder, so a shard is fetched once however many ranks read it.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from conf.schema import ConfigError, RunConfig
from data.manifest import ShardEntry, shard_folder
from data.shard_file import index_digest
from data.shards import INDEX
from data.store import FULL, Store
from models.bundled import sha256_of

GIB = 1 << 30
HEAD = 1 << 18  # bytes of a shard fetched at once: its header and the first of its small tensors
WAIT = 0.05  # seconds until room is looked for again that others use just now


@dataclass(frozen=True)
class StagedFile:
    path: Path
    bytes: int
    used: int  # when, in nanoseconds


class Staging:
    """The shards of one capture, fetched whole when they are asked for.

    At most ``limit`` bytes of them lie on the disk, those that are being fetched included. A shard
    that some process is reading stays. ``stored``: the names that may go, since the store has them.
    """

    def __init__(self, folder: Path, store: Store, limit: int | None):
        self.folder = folder
        self.store = store
        self.limit = limit
        self.stored: set[str] = set()

    @classmethod
    def of(cls, cfg: RunConfig, folder: Path) -> "Staging | None":
        """None without capture.store. Raises ConfigError for one that cannot be used here."""
        if cfg.capture.store is None:
            return None
        limit = cfg.capture.stage_gib
        store = Store(cfg.capture.store, folder.name)
        return cls(folder, store, None if limit is None else int(limit * GIB))

    def path(self, entry: ShardEntry) -> Path:
        return shard_folder(self.folder) / entry.name

    def holds(self, entries: Iterable[ShardEntry]) -> bool:
        """Whether all of ``entries`` fit. Raises ConfigError when the largest does not."""
        sizes = [entry.bytes for entry in entries]
        if self.limit is None:
            return True
        if max(sizes) > self.limit:
            raise ConfigError(
                f"capture.stage_gib={self.limit / GIB:g}: must hold the largest shard, which has "
                f"{max(sizes) / GIB:.3g} GiB; allow more, best of all the {sum(sizes) / GIB:.3g} "
                "GiB of the whole cache"
            )
        return sum(sizes) <= self.limit

    def has(self, entry: ShardEntry) -> bool:
        return self.path(entry).is_file()

    def drop(self, entry: ShardEntry) -> None:
        """Forget a staged shard, whose bytes were found damaged; the next ``open`` fetches it."""
        self.path(entry).unlink(missing_ok=True)

    def open(self, entry: ShardEntry) -> FileIO:
        """A whole shard, which stays until it is closed.

        Raises ConfigError when the store has it not, or damaged, or the disk is full, and JobError
        when the store cannot be reached.
        """
        there = self._opened(entry)
        if there is not None:
            return there
        with self._alone(entry) as lock:
            return self._opened(entry) or self._fetched(entry, lock)

    def _opened(self, entry: ShardEntry) -> FileIO | None:
        """A staged shard of the right size, noted as used now."""
        try:
            file = FileIO(self.path(entry))
        except FileNotFoundError:
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file.fileno()).st_size != entry.bytes:
            file.close()
            self.drop(entry)
            return None
        os.utime(file.fileno())
        return file

    def _fetched(self, entry: ShardEntry, lock: BinaryIO) -> FileIO:
        """Not synced: after a power failure the digests find what is missing, and it is fetched."""
        part = self._staging(entry, "part")
        self._reserve(entry, lock)
        try:
            self.store.get(f"shards/{entry.name}", part)
            found = sha256_of(part)
            if found != entry.sha256:
                raise self._unfit(entry, f"has sha256 {found}, must be {entry.sha256}")
            file = FileIO(part)
            fcntl.flock(file, fcntl.LOCK_SH)  # before others can see it: it serves us at least
            part.replace(self.path(entry))
            return file
        except FileNotFoundError as error:
            raise self._unfit(entry, "is missing") from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ConfigError(
                f"capture.stage_gib={'null' if self.limit is None else self.limit / GIB}: the disk "
                f"of {self.folder} became full; make room, or allow less than is free"
            ) from error
        finally:
            part.unlink(missing_ok=True)
            lock.truncate(0)

    def index(self, entry: ShardEntry) -> Path:
        """A file that opens as the shard does but holds its index alone; fetched once."""
        path = self._staging(entry, "index")
        with self._alone(entry):
            if not has_index(path, entry):
                self._copy_index(entry, path)
        return path

    def _copy_index(self, entry: ShardEntry, path: Path) -> None:
        """Three small reads of the store in place of the shard."""
        name, part = f"shards/{entry.name}", path.with_name(path.name + ".part")
        try:
            head = self.store.read(name, 0, min(HEAD, entry.bytes))
            begin = min(8 + int.from_bytes(head[:8], "little"), entry.bytes)
            if begin > len(head):
                head += self.store.read(name, len(head), begin)
            layout = json.loads(head[8:begin])
            with part.open("wb") as file:
                file.write(head[:begin])
                for small in INDEX:
                    start, end = (begin + place for place in layout[small]["data_offsets"])
                    file.seek(start)
                    inside = end <= len(head)
                    file.write(head[start:end] if inside else self.store.read(name, start, end))
                file.truncate(entry.bytes)
            if not has_index(part, entry):
                raise ValueError("its digest is another")
            part.replace(path)
        except FileNotFoundError as error:
            raise self._unfit(entry, "is missing") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._unfit(entry, f"has a damaged index ({error})") from error
        finally:
            part.unlink(missing_ok=True)

    def trim(self) -> None:
        """Remove stored shards as far as all that lie here take more than the limit."""
        if self.limit is not None:
            with self._room():
                staged = self._staged()
                self._evict(staged, sum(one.bytes for one in staged) - self.limit)

    def _reserve(self, entry: ShardEntry, lock: BinaryIO) -> None:
        """Wait for room, and take it. Who holds some waits for nobody, so all get theirs."""
        while True:
            with self._room():
                if self.limit is None or self._make_room(entry.bytes, self.limit):
                    lock.truncate(entry.bytes)
                    return
            time.sleep(WAIT)

    def _make_room(self, need: int, limit: int) -> bool:
        """Whether ``need`` bytes fit now. What may not go is not counted: nobody could wait."""
        staged = [one for one in self._staged() if one.path.name in self.stored]
        taken = sum(one.bytes for one in staged) + self._under_way()
        return self._evict(staged, taken + need - limit)

    def _evict(self, staged: list[StagedFile], over: int) -> bool:
        """Remove what was used longest ago until ``over`` bytes are gone -> whether they are."""
        for one in sorted(staged, key=lambda one: one.used):
            if over <= 0:
                break
            if one.path.name in self.stored and removed_unread(one.path):
                over -= one.bytes
        return over <= 0

    def _staged(self) -> list[StagedFile]:
        found = []
        for path in shard_folder(self.folder).glob("*.safetensors"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process dropped it
                continue
            found.append(StagedFile(path, stat.st_size, stat.st_mtime_ns))
        return found

    def _under_way(self) -> int:
        """Bytes that downloads have reserved; those of killed processes are cleared away."""
        total = 0
        for path in self._folder().glob("*.lock"):
            size = path.stat().st_size
            if not size:
                continue
            with path.open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    total += size
                    continue
                path.with_suffix(".part").unlink(missing_ok=True)
                lock.truncate(0)
        return total

    @contextmanager
    def _alone(self, entry: ShardEntry) -> Iterator[BinaryIO]:
        """One process and thread at a time fetches a shard -> its lock, which reserves nothing."""
        with self._staging(entry, "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            yield lock

    @contextmanager
    def _room(self) -> Iterator[None]:
        """One process and thread at a time counts the room and shares it out."""
        with (self._folder() / "room").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _staging(self, entry: ShardEntry, kind: str) -> Path:
        return self._folder() / f"{entry.name}.{kind}"

    def _folder(self) -> Path:
        folder = self.folder / "staging"
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            shard_folder(self.folder).mkdir(exist_ok=True)
        return folder

    def _unfit(self, entry: ShardEntry, why: str) -> ConfigError:
        return ConfigError(
            f"{self.store}: shard {entry.name} {why}; run data.capture with capture.verify=full, "
            "which writes this shard again"
        )


def removed_unread(path: Path) -> bool:
    """Remove a shard unless some process has it open -> whether it is gone."""
    try:
        file = FileIO(path)
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        path.unlink(missing_ok=True)
        return True


def has_index(path: Path, entry: ShardEntry) -> bool:
    try:
        return index_digest(path) == entry.index
    except (FileNotFoundError, SafetensorError):
        return False
