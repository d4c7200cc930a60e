"""An exported folder appears whole, checked, or not at all; an older export is replaced."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from conf.runtime import sync_folder
from conf.schema import ConfigError
from models.export.card import CardFacts
from models.export.layout import CONFIG, ORIGIN


def put(folder: Path, fill: Callable[[Path], list[str]]) -> Path:
    """Let ``fill`` write into an empty folder and say what is wrong with it; take its place.

    Raises ConfigError when the folder holds something else than an export, when it cannot be
    written, or for anything that was found.
    """
    refuse_foreign(folder)
    place = folder.resolve()
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir(parents=True)
        findings = fill(temporary)
        if findings:
            raise ConfigError(f"{folder}: the head cannot be exported: {'; '.join(findings)}")
        replace_folder(temporary, place)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); mend that or give another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def origin_of(card: CardFacts) -> str:
    """The verifier that the head learnt from, for ``check`` to compare with another."""
    origin = {
        "verifier": card.verifier,
        "revision": card.revision,
        "fingerprint": card.verifier_fingerprint,
        "states": card.verifier_dtype,
    }
    return json.dumps(origin, indent=2) + "\n"


def refuse_foreign(folder: Path) -> None:
    """An export replaces an export or an empty folder, never anything else."""
    if folder.exists() and not folder.is_dir():  # a device, too: /dev/null would be replaced
        raise ConfigError(f"{folder}: is no folder; give a folder to write to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / ORIGIN).is_file() or not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: holds something else than an export; give another folder")


def replace_folder(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; at every moment one of the two is whole on disk."""
    for path in new.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(new)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
