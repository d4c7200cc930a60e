"""Sources of conversations: files, folders of them, and hub data sets, with nothing lost.

Every row read becomes a conversation or is counted under the reason why not; a broken row never
stops the job. A file that cannot be opened at all does, with a ConfigError that names it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conf.runtime import note_once, say
from conf.schema import HUB, ConfigError
from data.dialects import Reading, RowRefused, read_row
from data.records import Conversation, Skipped
from data.rows import BLOCK, COMPRESSED, Row, start_of, text_rows
from data.tables import HubSplit, hub_facts, hub_rows, hub_split, parquet_count, parquet_rows, words

EXTENSIONS = (
    *(".json", ".jsonl", ".parquet"),
    *(".json.gz", ".jsonl.gz", ".json.zst", ".jsonl.zst"),
)
FOREIGN = {  # how a file begins that is no plain text, and what to do about it
    b"\xff\xfe": "the file is UTF-16; save it as UTF-8",
    b"\xfe\xff": "the file is UTF-16; save it as UTF-8",
    b"\x1f\x8b": "the file is compressed; let its name end with .gz as well",
    b"\x28\xb5\x2f\xfd": "the file is compressed; let its name end with .zst as well",
    b"PAR1\x15": "the file is a parquet table; let its name end with .parquet",
}
COMPANIONS = (".meta.json", ".partial.jsonl")  # of data.regenerate's files, beside the answers


@dataclass(frozen=True)
class DataFile:
    """A file, and what its rows are named by that bring no id."""

    path: Path
    name: str  # the path inside the folder that was given
    knob: str = "data.path"

    @classmethod
    def alone(cls, path: Path) -> "DataFile":
        return cls(path, path.name)

    def __str__(self) -> str:
        return str(self.path)


Source = DataFile | HubSplit


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


def find_files(paths: list[str], knob: str = "data.path") -> list[Source]:
    """The sources behind ``paths``, one entry after the other; raises as ``find_entries``."""
    return [source for entry in find_entries(paths, knob) for source in entry]


def find_entries(paths: list[str], knob: str = "data.path") -> list[list[Source]]:
    """The sources behind each of ``paths``, folders expanded in the order of their names.

    No two files share a name. A further entry changes none of those before it, and files that are
    moved with their folder keep theirs. Raises ConfigError for a path that does not exist, a folder
    without data, an extension that is not read, an empty file, and an empty list.
    """
    maker = (
        "" if knob.startswith("regenerate") else "make one with python -m data.regenerate, then "
    )
    remedy = f"{maker}give {knob}=FILE.jsonl"
    if not paths:
        raise ConfigError(f"{knob}=[]: names no conversation file; {remedy}")
    entries: list[list[Source]] = []
    named: dict[str, Path] = {}
    for number, name in enumerate(paths, 1):
        if name.startswith(HUB):
            entries.append([hub_split(name, knob)])
            continue
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(f"{knob}={name}: no such file or folder; {remedy}")
        if path.is_dir():
            files, folder = files_inside(path, knob), path
            if not files:
                raise ConfigError(
                    f"{knob}={name}: the folder holds no {', '.join(EXTENSIONS)} file with a row "
                    f"in it; {remedy}"
                )
        else:
            files, folder = [single(path, knob)], path.parent
        entry: list[Source] = []
        for file in files:
            inner = file.relative_to(folder).as_posix()
            if named.setdefault(inner, file.resolve()) != file.resolve():
                inner = f"{inner}@{number}"  # as no file that is read can be called
            entry.append(DataFile(file, inner, knob))
        entries.append(entry)
    return entries


def files_inside(folder: Path, knob: str) -> list[Path]:
    """The files of a folder that are read; what is left out, hidden files apart, is said."""
    there = [file for file in sorted(folder.rglob("*")) if is_shown(file, folder)]
    data = [file for file in there if is_data(file)]
    full = [file for file in data if not is_empty(file, knob)]
    unread = Counter(ending_of(file) for file in there if not is_data(file))
    if unread:
        kinds = ", ".join(f"{count} x {ending}" for ending, count in sorted(unread.items()))
        note_once(f"{knob}={folder}: left out, as not of a kind that is read: {kinds}")
    if len(full) < len(data):
        first = min(set(data) - set(full))
        note_once(f"{knob}={folder}: {len(data) - len(full)} empty files skipped (first: {first})")
    return full


def single(path: Path, knob: str) -> Path:
    """A file that was named by itself. Raises ConfigError for one that gives no row."""
    if not kind_of(path):
        raise ConfigError(
            f"{knob}={path}: the extension {path.suffix or '(none)'} is not read; rename the "
            f"file to one of {', '.join(EXTENSIONS)}"
        )
    if is_empty(path, knob):
        raise ConfigError(f"{knob}={path}: the file is empty; delete it or write it anew")
    return path


def is_empty(file: Path, knob: str) -> bool:
    """Whether there is nothing to read, found before anything is made of the others.

    Raises ConfigError for a file that cannot be read or is of another kind than its name says.
    """
    try:
        if kind_of(file) == ".parquet":
            return file.stat().st_size == 0  # reading it checks the rest
        start = start_of(file)
    except OSError as error:
        raise unreadable(DataFile(file, file.name, knob), error) from error
    for mark, remedy in FOREIGN.items():
        if start.startswith(mark):
            raise ConfigError(f"{knob}={file}: {remedy}")
    return not start


def is_shown(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden


def ending_of(file: Path) -> str:
    known = next((ending for ending in COMPANIONS if file.name.endswith(ending)), "")
    return known or file.suffix or "(none)"


def is_data(file: Path) -> bool:
    """Whether a file inside a folder is read."""
    return kind_of(file) != "" and not file.name.endswith(COMPANIONS)


def read_conversations(
    files: list[Source], log: RowLog, prompts: bool = False
) -> Iterator[Conversation]:
    """Yield the conversations of ``files`` in order; ``log`` keeps count.

    With ``prompts`` a row needs a user turn and no answer, and its turns are kept to the last user
    turn.
    """
    for file in files:
        for row in read_rows(file):
            reading = read_one(row, prompts)
            log.count(reading, row.where)
            if isinstance(reading, Reading):
                yield reading.conversation


def read_one(row: Row, prompts: bool = False) -> Reading | RowRefused:
    """One row as a conversation, or the reason why not; both can be sent between processes."""
    try:
        return read_row(row.decode(), row.where, prompts)
    except RowRefused as refusal:
        return refusal


def read_rows(source: Source) -> Iterator[Row]:
    """The records of one source, not decoded where they are text.

    Raises ConfigError when it cannot be read at all.
    """
    if isinstance(source, HubSplit):
        yield from hub_rows(source)
        return
    kind = kind_of(source.path)
    try:
        if kind == ".parquet":
            yield from parquet_rows(source.path, source.name, source.knob)
        else:
            yield from text_rows(source.path, not kind.startswith(".jsonl"), source.name)
    except OSError as error:
        raise unreadable(source, error) from error


def unreadable(file: DataFile, error: OSError) -> ConfigError:
    reason = error.strerror or words(error)
    return ConfigError(
        f"{file.knob}={file}: cannot be read ({reason}); write it anew or leave it out"
    )


def kind_of(file: Path) -> str:
    """Which of EXTENSIONS a name ends with; empty for none."""
    name = file.name.lower()
    return next((kind for kind in EXTENSIONS if name.endswith(kind)), "")


@dataclass(frozen=True)
class FileDigest:
    name: str
    sha256: str
    lines: int  # rows if there is one a line, or as a table says; 0 where only reading tells


def digest(source: Source) -> FileDigest:
    """Fingerprint one source by its content, about a second a gigabyte; the hub's by its commit."""
    if isinstance(source, HubSplit):
        facts = hub_facts(source)
        return FileDigest(source.name, facts.sha256, facts.count)
    sha256 = hashlib.sha256()
    lines = 0
    with source.path.open("rb") as stream:
        while block := stream.read(BLOCK):
            sha256.update(block)
            lines += block.count(b"\n")
    if kind_of(source.path) == ".parquet":
        lines = parquet_count(source.path)
    elif source.path.suffix.lower() in COMPRESSED:
        lines = 0
    return FileDigest(source.name, sha256.hexdigest(), lines)
