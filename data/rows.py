"""The rows of one text file before they are decoded: lines, or the items of a JSON array.

Splitting is cheap beside decoding, so one process can feed several that decode. Memory stays flat:
a block of the file and the row at hand, whatever the file's size.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from data.dialects import RowRefused

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BOM = b"\xef\xbb\xbf"
BLOCK = 1 << 20
LONGEST = 1 << 28  # bytes of one row: beyond it is no conversation, but a file that lost its ends
NUMBER = 8  # bytes of one, about
UNPARSABLE = "unparsable JSON"
TOO_LONG = "row longer than 256 MiB"
CUT_ARRAY = "array cut off or broken: all that follows is lost"
CUT_STREAM = "compressed file cut off or damaged: all that follows is lost"
NOT_BLANK = re.compile(rb"[^ \t\r\n]")
# Towards the quote that closes a string: a thousand escapes at a time, for each takes memory. (No
# possessive quantifiers: Python 3.11.2, which Debian 12 has, matches wrongly with them.)
STRING_PART = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,1000}', re.DOTALL)
BRACKET = re.compile(rb'["\[\]{}]')
SCALAR_END = re.compile(rb'["\[\]{},]')


@dataclass(frozen=True)
class Row:
    """One record as a file holds it: JSON text, a value that is decoded already, or a reason."""

    where: str  # file:line, or file:item for arrays and tables
    raw: bytes = b""
    value: object = None  # counts where raw is empty
    broken: str = ""  # why there is no record

    @property
    def size(self) -> int:
        """Bytes, about."""
        return len(self.raw) or size_of(self.value)

    def decode(self) -> object:
        """The record's value. Raises RowRefused where there is none."""
        if self.broken:
            raise RowRefused(self.broken)
        if not self.raw:
            return self.value
        try:
            return DECODER.decode(self.raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RowRefused("not UTF-8 text") from error
        except RowRefused:
            raise  # a ValueError too
        except (ValueError, RecursionError) as error:
            raise RowRefused(UNPARSABLE) from error


def size_of(value: object) -> int:
    """Of a decoded value as text, about; not all numbers of a list are looked at."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + size_of(inner) for key, inner in value.items())
    if isinstance(value, list):
        plain = not value or isinstance(value[0], int | float)
        return NUMBER * len(value) if plain else sum(map(size_of, value))
    return NUMBER


def whole(pairs: list) -> dict:
    """An object, unless it gives a key twice: which of the two is meant nobody can say."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RowRefused("a key given twice in one object")
    return found


# Raw control characters inside strings are let through: people do hand in raw tabs.
DECODER = json.JSONDecoder(strict=False, object_pairs_hook=whole)


def open_text(file: Path) -> BinaryIO:
    """The file's bytes, decompressed where its name says so."""
    codec = COMPRESSED.get(file.suffix.lower())
    if codec is None:
        return file.open("rb")
    import pyarrow  # 70 ms that plain files need not wait for

    return io.BufferedReader(cast(io.RawIOBase, pyarrow.input_stream(str(file), compression=codec)))


def text_rows(file: Path, array: bool, name: str = "") -> Iterator[Row]:
    """The rows of a text file; with ``array`` it may hold a JSON array, as its start tells.

    They are told apart by ``name``, or by the file's own. Raises OSError when nothing of it can be
    read.
    """
    name = name or file.name
    number = 0
    try:
        splits = array_rows if array and not holds_lines(file) else line_rows
        with open_text(file) as stream:
            for row in splits(stream, name):
                number += 1
                yield row
    except OSError:
        if not number or file.suffix.lower() not in COMPRESSED:
            raise
        yield Row(f"{name}:row {number + 1}", broken=CUT_STREAM)


def start_of(file: Path) -> bytes:
    """What a text file begins with, blanks apart. Raises OSError where it cannot be read."""
    with open_text(file) as stream:
        return first_bytes(stream)


def holds_lines(file: Path) -> bool:
    """Whether a .json file is jsonl under another name: its first line is a whole object, or its
    second where the first is broken."""
    with open_text(file) as stream:
        start = first_bytes(stream)
        if start.startswith(b"["):
            return False  # an array may well be one line: not to be read for this
        first, end, rest = start.partition(b"\n")
        if not end:
            first += stream.readline(LONGEST)
        if is_object(first):
            return True
        second, end, _ = rest.partition(b"\n")
        if not end:
            second += stream.readline(LONGEST)
    return is_object(second)


def is_object(line: bytes) -> bool:
    line = line.strip()
    if not line.startswith(b"{"):
        return False
    try:
        Row("", line).decode()
    except RowRefused as refusal:
        return refusal.reason != UNPARSABLE
    return True


def first_bytes(stream: BinaryIO) -> bytes:
    """The first block from its first byte that is not blank; empty for a file without any."""
    start = stream.read(BLOCK).removeprefix(BOM)
    while start and not start.strip():
        start = stream.read(BLOCK)
    return start.lstrip()


def line_rows(stream: BinaryIO, name: str) -> Iterator[Row]:
    """One JSON value a line. A blank line is no row."""
    number = 0
    while line := stream.readline(LONGEST):
        number += 1
        where = f"{name}:{number}"
        text = (line.removeprefix(BOM) if number == 1 else line).strip()
        if len(line) == LONGEST and not line.endswith(b"\n"):
            while (rest := stream.readline(LONGEST)) and not rest.endswith(b"\n"):
                pass
            yield Row(where, broken=TOO_LONG)
        elif text:
            yield Row(where, text)


def array_rows(stream: BinaryIO, name: str) -> Iterator[Row]:
    """The items of a JSON array, or objects one after the other.

    A text that ends or breaks in the middle gives its whole items, and one broken row that stands
    for the rest.
    """
    number = 0
    try:
        for raw in items(Cursor(stream)):
            number += 1
            yield Row(f"{name}:item {number}", raw)
    except ValueError:
        yield Row(f"{name}:item {number + 1}", broken=CUT_ARRAY)


def items(cursor: "Cursor") -> Iterator[bytes]:
    """The texts of the items. Raises ValueError where their brackets and commas do not fit."""
    first = cursor.next()
    array = first == b"["
    if array:
        cursor.at += 1
        first = cursor.next()
    while first and not (array and first == b"]"):
        if not array and first != b"{":
            raise ValueError("neither an array nor an object")
        yield cursor.item()
        first = cursor.next()
        if array and first == b",":
            cursor.at += 1
            first = cursor.next()
        elif array and first != b"]":
            raise ValueError("no comma between two items")
    if array:
        cursor.at += 1
        if not first or cursor.next():
            raise ValueError("the array does not end where the text does")


class Cursor:
    """A place in JSON text that is read block by block. No byte is looked at twice."""

    def __init__(self, stream: BinaryIO):
        self.stream = stream
        self.text = bytearray(stream.read(BLOCK).removeprefix(BOM))  # from the current item on
        self.at = 0

    def next(self) -> bytes:
        """Move to the next byte that is not blank; empty at the end."""
        return self.find(NOT_BLANK)

    def find(self, pattern: re.Pattern[bytes]) -> bytes:
        """Move to the next byte that matches ``pattern``; empty at the end."""
        while not (found := pattern.search(self.text, self.at)):
            self.at = len(self.text)
            if not self.more():
                return b""
        self.at = found.start()
        return found.group()

    def more(self) -> bool:
        if len(self.text) > LONGEST:
            raise ValueError("an item without end")
        block = self.stream.read(BLOCK)
        self.text += block
        return bool(block)

    def item(self) -> bytes:
        """The item that starts here; moves behind it. Raises ValueError when it does not end."""
        del self.text[: self.at]
        self.at = 0
        if self.text[:1] in (b"{", b"["):
            self.skip_brackets()
        else:
            self.skip_scalar()
        return bytes(self.text[: self.at]).strip()

    def skip_brackets(self) -> None:
        """Move behind the bracket that closes the one here."""
        depth = 0
        while found := self.find(BRACKET):
            if found == b'"':
                self.skip_string()
                continue
            self.at += 1
            depth += 1 if found in b"{[" else -1
            if not depth:
                return
        raise ValueError("a bracket without end")

    def skip_scalar(self) -> None:
        """Move behind the number, word or string here."""
        while (found := self.find(SCALAR_END)) == b'"':
            self.skip_string()
        if not self.at or found not in (b",", b"]"):
            raise ValueError("no whole item")

    def skip_string(self) -> None:
        """Move behind the string that starts here."""
        self.at += 1
        while True:
            part = STRING_PART.match(self.text, self.at)
            assert part  # it matches nothing as well
            self.at = part.end()
            if self.text[self.at : self.at + 1] == b'"':
                self.at += 1
                return
            whole = len(self.text) > self.at + 1  # an escape of which both bytes are there
            if not whole and not self.more():
                raise ValueError("a string without end")
