"""The store: files of a cache on a shared file system or object storage. Owns fsspec."""

import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from conf.schema import ConfigError, JobError

Result = TypeVar("Result")
PAUSES = (1.0, 4.0, 15.0)  # seconds between two tries; the backends retry by themselves, too
FULL = (errno.ENOSPC, errno.EDQUOT)
FOREIGN = (  # what backends raise that is no OSError, once such a library is loaded
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
)


class Store:
    """Files by their names below one URL. A file appears there whole or not at all.

    What fails is tried again; what goes on failing is a JobError. A missing file is a
    FileNotFoundError.
    """

    def __init__(self, url: str, folder: str):
        """Raises ConfigError for a URL that fsspec cannot serve here."""
        self.url = url
        try:
            self._files, root = fsspec.url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"capture.store={url}: this kind of storage needs one more package ({error}); "
                "install it with pip, s3fs for s3:// and gcsfs for gs://"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"capture.store={url}: must be a URL that fsspec knows ({error}); try "
                "s3://BUCKET/PREFIX, or file:///FOLDER for one that is mounted"
            ) from error
        self._root = f"{root.rstrip('/')}/{folder}"
        self._mounted = isinstance(self._files, LocalFileSystem)

    def __str__(self) -> str:
        return f"{self.url.rstrip('/')}/{self._root.rpartition('/')[2]}"

    def put(self, local: Path, name: str) -> None:
        self._land(name, lambda path: self._files.put_file(str(local), path))

    def write(self, content: bytes, name: str) -> None:
        self._land(name, lambda path: self._files.pipe_file(path, content))

    def get(self, name: str, local: Path) -> None:
        """Raises OSError when the local disk becomes full."""
        path = self._path(name)
        self._tried(f"reading {name}", lambda: self._files.get_file(path, str(local)), FULL)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        path = self._path(name)
        return self._tried(  # by name: s3fs has another order
            f"reading {name}", lambda: self._files.cat_file(path, start=start, end=end)
        )

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        try:
            return self._tried(f"asking for {name}", lambda: self._files.size(self._path(name)))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """What lies in ``folder``, without its name."""

        def ask() -> list[str]:
            self._files.invalidate_cache()
            return self._files.ls(self._path(folder), detail=False)

        try:
            found = self._tried(f"listing {folder}", ask)
        except FileNotFoundError:
            return []
        self._files.invalidate_cache()  # another machine may write the next moment
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        """Remove a file; nothing to do where there is none."""
        try:
            self._tried(f"removing {name}", lambda: self._files.rm_file(self._path(name)))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _land(self, name: str, write: Callable[[str], object]) -> None:
        """An object appears when all of it was sent; a file is renamed when it is whole."""
        path = self._path(name)

        def act() -> None:
            if not self._mounted:
                write(path)
                return
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path + ".tmp")
            self._files.mv(path + ".tmp", path)

        try:
            self._tried(f"writing {name}", act)
        except FileNotFoundError as error:
            raise JobError(
                f"capture.store={self.url}: writing {name} failed ({error}); make the bucket or "
                "the folder first, and run the same command again"
            ) from error

    def _tried(self, what: str, act: Callable[[], Result], own: tuple[int, ...] = ()) -> Result:
        """What ``act`` returns; errors with a number of ``own`` are the caller's."""
        for number, pause in enumerate((*PAUSES, None), start=1):
            try:
                return act()
            except FileNotFoundError:
                raise
            except (OSError, *foreign_errors()) as error:
                code = getattr(error, "errno", None)
                if code in own:
                    raise
                final = isinstance(error, PermissionError) or code in FULL
                if final or pause is None:
                    words = " ".join(str(error).split())
                    times = "once" if number == 1 else f"{number} times"
                    raise JobError(
                        f"capture.store={self.url}: {what} failed {times} "
                        f"({type(error).__name__}: {words}); mend connection, credentials or "
                        "room there and run the same command again, which keeps what is stored"
                    ) from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def foreign_errors() -> list[type[Exception]]:
    """Those of FOREIGN whose library some backend has loaded."""
    loaded = [(sys.modules.get(module), name) for module, name in FOREIGN]
    return [getattr(module, name) for module, name in loaded if module is not None]
