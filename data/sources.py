"""Conversation files: json, jsonl, parquet or folders of them, read row by row with nothing lost.

Every row read becomes a conversation or is counted under the reason why not; a broken row never
stops the job. A file that cannot be opened at all does, with a ConfigError that names it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.runtime import say
from conf.schema import ConfigError
from data.dialects import Reading, RowRefused, read_row
from data.records import Conversation, Skipped
from data.rows import Row, text_rows

EXTENSIONS = (
    *(".json", ".jsonl", ".parquet"),
    *(".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
)
BLOCK = 1 << 20


@dataclass
class RowLog:
    """What became of every row: rows_in = rows_out + sum(skipped)."""

    rows_in: int = 0
    rows_out: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)  # rows kept with a change, by its name
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first row it befell
    noted: set[str] = field(default_factory=set)  # notes already printed

    def count(self, reading: Reading | RowRefused, where: str) -> None:
        """Take in what ``read_one`` made of a row."""
        self.rows_in += 1
        if isinstance(reading, RowRefused):
            self.skip(reading.reason, where)
            self.note(reading.note)
            return
        self.rows_out += 1
        for name in reading.changes:
            self.change(name)
        for note in reading.notes:
            self.note(note)

    def skip(self, reason: str, where: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def withdraw(self, refusal: RowRefused, where: str) -> None:
        """Count a conversation that was read as skipped after all."""
        self.rows_out -= 1
        self.skip(refusal.reason, where)
        self.note(refusal.note)

    def change(self, name: str) -> None:
        self.changed[name] = self.changed.get(name, 0) + 1

    def note(self, text: str) -> None:
        """Print a note, once however many rows it befalls."""
        if text and text not in self.noted:
            self.noted.add(text)
            say(f"note: {text}")

    def summary(self) -> Skipped:
        reasons, changed, first = dict(self.skipped), dict(self.changed), dict(self.first)
        return Skipped(self.rows_in, self.rows_out, reasons, changed, first)

    def reasons(self) -> str:
        """The reasons in words, most frequent first: ``3 x no answer (first: a.jsonl:7)``."""
        ordered = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(f"{n} x {reason} (first: {self.first[reason]})" for reason, n in ordered)


def find_files(paths: list[str], knob: str = "data.path") -> list[Path]:
    """The files behind ``paths``, folders expanded in the order of their names.

    Raises ConfigError for a path that does not exist, a folder without data, an extension that is
    not read, and an empty list.
    """
    maker = (
        "" if knob.startswith("regenerate") else "make one with python -m data.regenerate, then "
    )
    remedy = f"{maker}give {knob}=FILE.jsonl"
    if not paths:
        raise ConfigError(f"{knob}=[]: names no conversation file; {remedy}")
    files: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if is_data(file, path)]
            if not inside:
                raise ConfigError(
                    f"{knob}={name}: the folder holds no {', '.join(EXTENSIONS)} file; {remedy}"
                )
            files += inside
        elif not path.exists():
            raise ConfigError(f"{knob}={name}: no such file or folder; {remedy}")
        elif not kind_of(path):
            raise ConfigError(
                f"{knob}={name}: the extension {path.suffix or '(none)'} is not read; rename the "
                f"file to one of {', '.join(EXTENSIONS)}"
            )
        else:
            files.append(path)
    return files


def is_data(file: Path, folder: Path) -> bool:
    """Whether a file inside a folder is read: its extension is known and no part is hidden."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and kind_of(file) != ""


def read_conversations(
    files: list[Path], log: RowLog, max_samples: int | None = None, prompts: bool = False
) -> Iterator[Conversation]:
    """Yield the conversations of ``files`` in order; ``log`` keeps count.

    Stops at ``max_samples`` of them, those withdrawn in between not counted. With ``prompts`` a
    row needs a user turn and no answer, and its turns are kept to the last user turn.
    """
    if max_samples is not None and max_samples < 1:
        return
    for file in files:
        for row in read_rows(file):
            reading = read_one(row, prompts)
            log.count(reading, row.where)
            if isinstance(reading, RowRefused):
                continue
            yield reading.conversation
            if log.rows_out == max_samples:
                return


def read_one(row: Row, prompts: bool = False) -> Reading | RowRefused:
    """One row as a conversation, or the reason why not; both can be sent between processes."""
    try:
        return read_row(row.decode(), row.where, prompts)
    except RowRefused as refusal:
        return refusal


def read_rows(file: Path) -> Iterator[Row]:
    """The records of one file, not decoded where they are text.

    Raises ConfigError when the file cannot be read at all.
    """
    kind = kind_of(file)
    try:
        if kind == ".parquet":
            yield from read_table(file)
        else:
            yield from text_rows(file, array=kind.startswith(".json") and ".jsonl" not in kind)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from error


def kind_of(file: Path) -> str:
    """Which of EXTENSIONS a name ends with; empty for none."""
    name = file.name.lower()
    return next((kind for kind in EXTENSIONS if name.endswith(kind)), "")


def read_table(file: Path) -> Iterator[Row]:
    """The rows of a parquet file, streamed. Raises ConfigError when it is none."""
    from datasets import load_dataset  # a second of imports that the json formats need not wait for

    try:
        table = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, value in enumerate(table, 1):
            yield Row(f"{file.name}:row {number}", value=value)
    except ValueError as error:  # what the parquet reader raises for a damaged file
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{file}: is no readable parquet file ({reason}); write it anew"
        ) from error


@dataclass(frozen=True)
class FileDigest:
    name: str
    sha256: str
    lines: int  # newlines: the number of rows, if there is one a line


def digest(file: Path) -> FileDigest:
    """Fingerprint one file by its content, about a second a gigabyte."""
    sha256 = hashlib.sha256()
    lines = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            sha256.update(block)
            lines += block.count(b"\n")
    return FileDigest(file.name, sha256.hexdigest(), lines)
