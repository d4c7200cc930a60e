"""Conversation files: json, jsonl, parquet or folders of them, read row by row with nothing lost.

Every row read becomes a conversation or is counted under the reason why not; a broken row never
stops the job. A file that cannot be opened at all does, with a ConfigError that names it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.runtime import say
from conf.schema import ConfigError
from data.dialects import RowRefused, read_row
from data.records import Conversation, Skipped

EXTENSIONS = (".json", ".jsonl", ".parquet")
BOM = b"\xef\xbb\xbf"
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
        return Skipped(self.rows_in, self.rows_out, dict(self.skipped), dict(self.changed))

    def reasons(self) -> str:
        """The reasons in words, most frequent first: ``3 x no answer (first: a.jsonl:7)``."""
        ordered = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return "; ".join(f"{n} x {reason} (first: {self.first[reason]})" for reason, n in ordered)


@dataclass(frozen=True)
class Row:
    """One record as a file holds it: a decoded JSON value, or why it could not be decoded."""

    where: str  # file:line, or file:item for arrays and tables
    value: object = None
    broken: str = ""


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
        elif path.suffix.lower() not in EXTENSIONS:
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
    return file.is_file() and not hidden and file.suffix.lower() in EXTENSIONS


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
            log.rows_in += 1
            try:
                if row.broken:
                    raise RowRefused(row.broken)
                reading = read_row(row.value, row.where, prompts)
            except RowRefused as refusal:
                log.skip(refusal.reason, row.where)
                log.note(refusal.note)
                continue
            for name in reading.changes:
                log.change(name)
            for note in reading.notes:
                log.note(note)
            log.rows_out += 1
            yield reading.conversation
            if log.rows_out == max_samples:
                return


def read_rows(file: Path) -> Iterator[Row]:
    """The records of one file. Raises ConfigError when the file cannot be read at all."""
    try:
        if file.suffix.lower() == ".parquet":
            yield from read_table(file)
        elif file.suffix.lower() == ".json" and not is_lines(file):
            yield from read_array(file)
        else:
            yield from read_lines(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror or error})") from error


def read_lines(file: Path) -> Iterator[Row]:
    """One JSON value a line. A blank line is no row; a line that does not parse is a broken one."""
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            text = (raw.removeprefix(BOM) if number == 1 else raw).strip()
            if text:
                yield parse(text, f"{file.name}:{number}")


def parse(text: bytes, where: str) -> Row:
    try:
        # Raw control characters inside strings are let through: people do hand in raw tabs.
        return Row(where, json.loads(text.decode("utf-8"), strict=False))
    except UnicodeDecodeError:
        return Row(where, broken="not UTF-8 text")
    except (ValueError, RecursionError):
        return Row(where, broken="unparsable line")


def is_lines(file: Path) -> bool:
    """Whether a .json file is jsonl under another name: its first line is a whole object."""
    with file.open("rb") as lines:
        for raw in lines:
            text = raw.removeprefix(BOM).strip()
            if text:
                return text.startswith(b"{") and isinstance(parse(text, "").value, dict)
    return True


def read_array(file: Path) -> Iterator[Row]:
    """The items of a JSON array (or objects one after the other), decoded one at a time.

    The text is held in memory, the items are not: jsonl suits big data better. A file that ends or
    breaks in the middle gives its whole items, and one broken row that stands for the rest.
    """
    number = 0
    try:
        # Bytes that are no UTF-8 become surrogates, for which the row that holds them is refused.
        text = file.read_bytes().removeprefix(BOM).decode("utf-8", errors="surrogateescape")
        for value in json_items(text):
            number += 1
            yield Row(f"{file.name}:item {number}", value)
    except (ValueError, RecursionError):
        broken = "array cut off or broken: all that follows is lost"
        yield Row(f"{file.name}:item {number + 1}", broken=broken)


def json_items(text: str) -> Iterator[object]:
    """Decode the values of ``text``. Raises ValueError where it stops being JSON."""
    decoder = json.JSONDecoder(strict=False)
    at = skip_blank(text, 0)
    in_array = text.startswith("[", at)
    if in_array:
        at = skip_blank(text, at + 1)
    while at < len(text):
        if in_array and text[at] == "]":
            if skip_blank(text, at + 1) < len(text):
                raise ValueError("text after the array")
            return
        value, at = decoder.raw_decode(text, at)
        yield value
        at = skip_blank(text, at)
        if in_array and text.startswith(",", at):
            at = skip_blank(text, at + 1)
        elif in_array and not text.startswith("]", at):
            raise ValueError("no comma between two items")
    if in_array:
        raise ValueError("no bracket closes the array")


def skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_table(file: Path) -> Iterator[Row]:
    """The rows of a parquet file, streamed. Raises ConfigError when it is none."""
    from datasets import load_dataset  # a second of imports that the json formats need not wait for

    try:
        table = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for number, value in enumerate(table, 1):
            yield Row(f"{file.name}:row {number}", value)
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
