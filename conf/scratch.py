"""A scratch folder: locked while in use, removed behind it, and later if its process was killed."""

import fcntl
import secrets
import shutil
from pathlib import Path


class Scratch:
    """A new folder ``.NAME.xxxxxxxx.tmp`` in ``parent``; those of dead processes are removed.

    The system frees the lock however the process ends.
    """

    def __init__(self, parent: Path, name: str):
        parent.mkdir(parents=True, exist_ok=True)
        for old in parent.glob(f".{name}.*.tmp"):
            remove_orphan(old)
        self.folder = parent / f".{name}.{secrets.token_hex(4)}.tmp"
        self.folder.mkdir()
        self.lock = (self.folder / "lock.tmp").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        (self.folder / "lock.tmp").rename(self.folder / "lock")  # no moment with an open lock

    def publish(self, folder: Path) -> None:
        """Give the folder its name. Raises OSError when there is one of that name already."""
        (self.folder / "lock").unlink()
        self.folder.rename(folder)

    def close(self) -> None:
        """Remove the folder, if it still has its temporary name."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def remove_orphan(folder: Path) -> None:
    """Remove a scratch folder unless the process that fills it is alive: it holds the lock."""
    try:
        lock = (folder / "lock").open("r+")
    except FileNotFoundError:  # it is just being made or published
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)
