"""Text files cut into rows: every block border, every way a file can be damaged, flat memory."""

import gzip
import json
import pickle
import random
import tracemalloc
from pathlib import Path

import pyarrow
import pytest

from data import rows
from data.dialects import RowRefused
from data.rows import CUT_ARRAY, CUT_STREAM, TOO_LONG, UNPARSABLE, Row, text_rows

AWKWARD = [
    {"a": 'q"\\', "b": ["]", "}", {"c": "[{,"}], "é": "日本\U0001f600"},
    {},
    [],
    "text, with ] and \\",
    -1.5e3,
    None,
    {"deep": [[[[{"x": "\\\\"}]]]]},
    True,
]


def save(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def values(found: list[Row]) -> list[object]:
    out: list[object] = []
    for row in found:
        try:
            out.append(row.decode())
        except RowRefused as refusal:
            out.append(refusal.reason)
    return out


def plain_items(text: str) -> list[object]:
    """The reference: the whole text in memory, one value decoded after the other."""
    out, at, decoder = [], text.index("[") + 1, json.JSONDecoder()
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \n,"))
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            return out
        out.append(value)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_array_items_whatever_the_block(tmp_path, monkeypatch, block, indent, ascii_only):
    monkeypatch.setattr(rows, "BLOCK", block)
    text = json.dumps(AWKWARD, indent=indent, ensure_ascii=ascii_only)
    found = list(text_rows(save(tmp_path / "a.json", text.encode()), array=True))
    assert values(found) == AWKWARD == plain_items(text)
    assert [row.where for row in found] == [f"a.json:item {n + 1}" for n in range(len(AWKWARD))]


def test_array_cut_at_every_byte_keeps_what_is_whole(tmp_path, monkeypatch):
    """A truncated array (no public report): neither hang nor crash, one row for the rest."""
    monkeypatch.setattr(rows, "BLOCK", 5)
    whole = [value for value in AWKWARD if isinstance(value, dict | list)]
    text = json.dumps(whole)
    for cut in range(1, len(text)):
        found = list(text_rows(save(tmp_path / "a.json", text[:cut].encode()), array=True))
        assert values(found) == [*plain_items(text[:cut]), CUT_ARRAY], cut


def test_objects_one_after_the_other(tmp_path):
    text = b'\xef\xbb\xbf{\n"a": 1}\n\n{"b":\r\n 2}{"c": 3} '
    assert values(list(text_rows(save(tmp_path / "a.json", text), array=True))) == [
        {"a": 1},
        {"b": 2},
        {"c": 3},
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'[{"a": 1} {"b": 2}]', [{"a": 1}, CUT_ARRAY]),
        (b'[{"a": 1}] [', [{"a": 1}, CUT_ARRAY]),
        (b'[{"a": 1},]', [{"a": 1}]),
        (b"[,]", [CUT_ARRAY]),
        (b"[}]", [CUT_ARRAY]),
        (b"[]", []),
        (b"", []),
        (b'"text"', [CUT_ARRAY]),
        (b'{"a": 1}, {"b": 2}', [{"a": 1}, CUT_ARRAY]),
        (b'[{"a" 1}, {"b": 2}]', [UNPARSABLE, {"b": 2}]),  # one bad item costs one row
        (b'[{"a": "\xe9"}, {"b": 2}]', ["not UTF-8 text", {"b": 2}]),
        (b'[{"a": 1}, {"b": "x]', [{"a": 1}, CUT_ARRAY]),
        (b"[" * 100_000, [CUT_ARRAY]),
        (b"[" + b"[" * 100_000 + b"]" * 100_000 + b"]", [UNPARSABLE]),
    ],
)
def test_damaged_arrays(tmp_path, text, expected):
    assert values(list(text_rows(save(tmp_path / "a.json", text), array=True))) == expected


def test_damaged_lines(tmp_path):
    """BOM, CRLF, NUL bytes, broken UTF-8, deep nesting, a key twice: one row each, none stops."""
    text = (
        b'\xef\xbb\xbf{"a": 1}\r\n\r\n \n'
        b'{"nul": "a\x00b"}\n'
        b"\x00\x00\x00\n"
        b'{"latin": "\xe9"}\n'
        b'{"surrogate": "\xed\xa0\x80"}\n'
        b'{"half": "\\ud83d"}\n'
        + b'{"deep": ' * 100_000
        + b"\n"
        + b'{"a": 1, "b": {"c": 1, "c": 2}}\n'
        + b'{"huge": '
        + b"9" * 5000
        + b"}\n"
        + b'{"tab": "\t"}'
    )
    found = list(text_rows(save(tmp_path / "a.jsonl", text), array=False))
    assert values(found) == [
        {"a": 1},
        {"nul": "a\0b"},  # refused by name when the row is read
        UNPARSABLE,
        "not UTF-8 text",
        "not UTF-8 text",
        {"half": "\ud83d"},
        UNPARSABLE,
        "a key given twice in one object",
        UNPARSABLE,
        {"tab": "\t"},
    ]
    assert [row.where for row in found[:2]] == ["a.jsonl:1", "a.jsonl:4"]


def test_a_line_without_end_costs_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LONGEST", 100)
    lines = [b'{"a": 1}', b"x" * 100, b"y" * 1000, b'{"b": "%s"}' % (b"z" * 90), b"w" * 150]
    found = list(text_rows(save(tmp_path / "a.jsonl", b"\n".join(lines)), array=False))
    assert values(found) == [{"a": 1}, TOO_LONG, TOO_LONG, {"b": "z" * 90}, TOO_LONG]
    array = save(tmp_path / "a.json", b'[{"a": 1}, {"b": "' + b"z" * 3_000_000)
    assert values(list(text_rows(array, array=True))) == [{"a": 1}, CUT_ARRAY]


@pytest.mark.parametrize("kind", ["array", "one line array", "lines"])
def test_memory_is_flat_in_the_size_of_the_file(tmp_path, monkeypatch, kind):
    """A huge file is read in blocks: twice the rows need no more memory."""
    monkeypatch.setattr(rows, "BLOCK", 1 << 14)
    one = json.dumps({"text": "words, and \\n " * 100, "list": [1, {"a": "]"}]}).encode()

    def peak(count: int) -> int:
        gap = b", " if "one line" in kind else b",\n" if kind == "array" else b"\n"
        text = gap.join([one] * count)
        name = "a.jsonl" if kind == "lines" else "a.json"
        file = save(tmp_path / name, text if kind == "lines" else b"[" + text + b"]")
        del text
        tracemalloc.start()
        assert sum(1 for _ in text_rows(file, array=name == "a.json")) == count
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    small, large = peak(200), peak(2000)
    assert large < small + (1 << 16) < 2000 * len(one) / 4


def test_a_row_of_five_megabytes(tmp_path):
    """A 5 MB single line, a case without a public report; as an item of an array too."""
    row = {"text": 'word "quoted" \\ \n' * 300_000}
    text = json.dumps(row).encode()
    assert len(text) > 5_000_000
    assert values(list(text_rows(save(tmp_path / "a.jsonl", text), array=False))) == [row]
    array = save(tmp_path / "a.json", b"[" + text + b"," + text + b"]")
    assert values(list(text_rows(array, array=True))) == [row, row]


def pack(text: bytes, ending: str) -> bytes:
    if ending == ".gz":
        return gzip.compress(text)
    return pyarrow.compress(text, codec="zstd", asbytes=True)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files(tmp_path, ending):
    lines = save(tmp_path / f"a.jsonl{ending}", pack(b'\xef\xbb\xbf{"a": 1}\n{"b": 2}', ending))
    assert values(list(text_rows(lines, array=False))) == [{"a": 1}, {"b": 2}]
    array = save(tmp_path / f"a.json{ending}", pack(b'[{"a": 1}, {"b": 2}]', ending))
    assert values(list(text_rows(array, array=True))) == [{"a": 1}, {"b": 2}]
    parts = pack(b'{"a": 1}\n', ending) + pack(b'{"b": 2}\n', ending)  # as log writers append
    both = save(tmp_path / f"b.jsonl{ending}", parts)
    assert values(list(text_rows(both, array=False))) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_file_that_was_cut_or_is_none(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(rows, "BLOCK", 1 << 12)
    numbers = random.Random(0)
    text = b"".join(b'{"n": %d}\n' % numbers.getrandbits(64) for _ in range(50_000))
    whole = pack(text, ending)
    cut = save(tmp_path / f"a.jsonl{ending}", whole[: len(whole) // 2])
    *good, last = values(list(text_rows(cut, array=False)))
    assert last == CUT_STREAM
    expected = [json.loads(line) for line in text.splitlines()]
    assert len(good) > 10_000
    assert good == expected[: len(good)]
    other = save(tmp_path / f"b.jsonl{ending}", b"plain words, not compressed")
    with pytest.raises(OSError, match="fail"):
        list(text_rows(other, array=False))


def test_rows_and_refusals_travel_between_processes():
    row = Row("a:1", b'{"a": 1}')
    assert pickle.loads(pickle.dumps(row)) == row
    refusal = pickle.loads(pickle.dumps(RowRefused("reason", "note")))
    assert (refusal.reason, refusal.note) == ("reason", "note")
