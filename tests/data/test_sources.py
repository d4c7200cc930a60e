"""Files to rows: nothing lost, nothing stopped by one bad row, and clear errors for bad paths."""

import json
from collections import Counter
from pathlib import Path

import pytest

from conf.schema import ConfigError
from data.sources import RowLog, digest, find_files, read_conversations


def row(name: str, answer: str = "a") -> dict:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return {"id": name, "messages": turns}


def read(*files: Path, **options) -> tuple[list[str], RowLog]:
    log = RowLog()
    names = [found.id for found in read_conversations(list(files), log, **options)]
    assert log.rows_in == log.rows_out + sum(log.skipped.values())
    assert log.rows_out == len(names)
    return names, log


def save(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*rows: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in rows)


def test_jsonl(tmp_path):
    file = save(tmp_path / "a.jsonl", lines(row("one"), row("two")))
    assert read(file)[0] == ["one", "two"]


def test_bad_lines_are_counted_and_the_rest_is_read(tmp_path):
    good = json.dumps(row("good"))
    content = (
        b"\xef\xbb\xbf"
        + good.encode()
        + b"\r\n\r\n\n"  # CRLF, and blank lines, which are no rows
        + good[:30].encode()
        + b"\n"
        + b"\x00\x00\x00\x00\n"
        + b'{"id": "latin \xe9"}\n'
        + b"[1, 2]\n"
        + b"null\n"
        + b'{"id": "tab\there", "messages": []}\n'
        + b"[" * 100_000
        + b"\n"
        + good.encode()
        + b"\n"
        + good[:-9].encode()  # the file was cut off here
    )
    names, log = read(save(tmp_path / "a.jsonl", content))
    assert names == ["good", "good"]
    assert log.skipped == {
        "unparsable JSON": 4,
        "not UTF-8 text": 1,
        "not a JSON object": 2,
        "no turns": 1,
    }
    assert log.first["unparsable JSON"] == "a.jsonl:4"
    assert "4 x unparsable JSON (first: a.jsonl:4)" in log.reasons()


def test_one_very_long_line(tmp_path):
    file = save(tmp_path / "a.jsonl", lines(row("long", "word " * 1_000_000), row("short")))
    assert read(file)[0] == ["long", "short"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\r\n  "])
def test_json_array(tmp_path, indent, start):
    content = json.dumps([row("one"), row("two"), 3], indent=indent).encode()
    names, log = read(save(tmp_path / "a.json", start + content + b"\n"))
    assert names == ["one", "two"]
    assert log.skipped == {"not a JSON object": 1}


def test_json_file_with_one_object_or_with_lines(tmp_path):
    assert read(save(tmp_path / "one.json", json.dumps(row("x"), indent=2)))[0] == ["x"]
    assert read(save(tmp_path / "lines.json", lines(row("x"), row("y"))))[0] == ["x", "y"]
    assert read(save(tmp_path / "empty.json", " \n"))[1].rows_in == 0


@pytest.mark.parametrize("cut", [1, 20, 80])
def test_array_cut_in_the_middle_keeps_the_whole_objects(tmp_path, cut):
    content = json.dumps([row("one"), row("two"), row("three")])
    names, log = read(save(tmp_path / "a.json", content[:-cut]))
    assert names == ["one", "two", "three"] if cut == 1 else ["one", "two"]
    assert log.skipped == {"array cut off or broken: all that follows is lost": 1}
    assert log.first == {
        "array cut off or broken: all that follows is lost": f"a.json:item {len(names) + 1}"
    }


@pytest.mark.parametrize("junk", ['[{"id": 1} {"id": 2}]', '[{"id": 1}] [', "[{]", "hello"])
def test_broken_json_is_counted(tmp_path, junk):
    _, log = read(save(tmp_path / "a.json", junk))
    assert log.skipped["array cut off or broken: all that follows is lost"] == 1


def test_array_with_bytes_that_are_no_utf8(tmp_path):
    content = json.dumps([row("one", "é"), row("two")], ensure_ascii=False)
    names, log = read(save(tmp_path / "a.json", content.encode("latin-1")))
    assert names == ["two"]
    assert log.skipped == {"not UTF-8 text": 1}


def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([row("one"), {"id": "two", "messages": []}, row("three")])
    table.to_parquet(tmp_path / "a.parquet")
    names, log = read(tmp_path / "a.parquet")
    assert names == ["one", "three"]
    assert log.skipped == {"no turns": 1}
    whole = (tmp_path / "a.parquet").read_bytes()
    cut = save(tmp_path / "cut.parquet", whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut\.parquet: is no readable parquet file"):
        read(cut)


def test_folder_is_read_in_order_and_hidden_files_are_not(tmp_path):
    save(tmp_path / "b.jsonl", lines(row("b")))
    save(tmp_path / "a" / "x.JSON", json.dumps([row("a")]))
    save(tmp_path / ".git" / "c.jsonl", lines(row("c")))
    save(tmp_path / "README.md", "words")
    files = find_files([str(tmp_path), str(tmp_path / "b.jsonl")])
    assert read(*files)[0] == ["a", "b", "b"]


def test_bad_paths_are_named_with_the_way_out(tmp_path):
    (tmp_path / "empty").mkdir()
    text = save(tmp_path / "a.csv", "x")
    cases = [
        ([], r"^data\.path=\[\]: .*python -m data\.regenerate"),
        (["no/such.jsonl"], r"^data\.path=no/such\.jsonl: no such file .*python -m data\.regen"),
        ([str(tmp_path / "empty")], r"empty: the folder holds no \.json, .*, \.jsonl\.zst file"),
        ([str(text)], r"a\.csv: the extension \.csv is not read"),
    ]
    for paths, message in cases:
        with pytest.raises(ConfigError, match=message):
            find_files(paths)
    with pytest.raises(ConfigError, match=r"^regenerate\.prompts=no\.jsonl"):
        find_files(["no.jsonl"], "regenerate.prompts")


def test_max_samples_does_not_count_skipped_or_withdrawn_rows(tmp_path):
    file = save(tmp_path / "a.jsonl", lines({}, row("one"), {}, row("two"), row("three")))
    names, log = read(file, max_samples=2)
    assert names == ["one", "two"]
    assert log.rows_in == 4


def test_notes_are_printed_once_a_name(tmp_path, capsys):
    strange = [
        {"messages": [{"role": "user", "content": "q"}, {"role": name, "content": "a"}]}
        for name in ("my-model", "my-model", "other")
    ]
    refused = {"messages": [{"role": "x", "content": "q"}, {"role": "y", "content": "a"}]}
    names, log = read(save(tmp_path / "a.jsonl", lines(*strange, refused, refused)))
    assert names == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert log.changed == {"unknown role taken as the assistant's": 3}
    assert log.skipped == {"unknown role": 2}
    assert capsys.readouterr().out.splitlines() == [
        "note: the unknown role 'my-model' is taken as the assistant's",
        "note: the unknown role 'other' is taken as the assistant's",
        "note: rows with the unknown role 'x' are skipped",
    ]


def test_digest_sees_every_byte(tmp_path):
    first = digest(save(tmp_path / "a.jsonl", "a\nb\n"))
    assert first.lines == 2
    assert digest(save(tmp_path / "a.jsonl", "a\nc\n")).sha256 != first.sha256


# Real files that people handed in; their labels say what is odd about each row.


def test_messy_sharegpt_fits_its_labels(shared):
    raw = shared / "data" / "raw"
    names, log = read(raw / "sharegpt_messy_100.jsonl")
    rows = [json.loads(line) for line in (raw / "sharegpt_messy_100.labels.jsonl").open()]
    features = {one["id"]: set(one["features"]) for one in rows}
    having = Counter(feature for found in features.values() for feature in found)
    assert log.rows_in == 100
    assert log.skipped["no turns"] == having["empty_conversation"] == 3
    only_gpt = {name for name, found in features.items() if "only_gpt" in found}
    system_alone = {one["id"] for one in rows if one["roles"] == ["system"]}
    assert log.skipped["no user turn"] == len(only_gpt | system_alone) == 10
    empty = {name for name, found in features.items() if "empty_turn" in found}
    assert log.skipped["empty turn"] == len(empty) == 9
    assert set(names).isdisjoint(only_gpt | system_alone)
    leading = {
        one["id"] for one in rows if [r for r in one["roles"] if r != "system"][:1] == ["gpt"]
    }
    assert log.changed["starts with the assistant: those turns left out"] == len(
        leading & set(names)
    )
    doubled = {name for name, found in features.items() if "consecutive_same_role" in found}
    assert log.changed["two turns of one role merged"] == len(doubled - only_gpt - empty) == 3
    unknown = {name for name, found in features.items() if "unknown_role" in found}
    assert unknown & set(names)  # chatgpt, bing and bard are the assistant
    assert "unknown role" not in log.skipped


def test_array_cut_off_as_it_was_published(shared):
    names, log = read(shared / "data" / "raw" / "sharegpt_truncated_array.json")
    assert log.rows_in == 10
    assert log.skipped["array cut off or broken: all that follows is lost"] == 1
    assert len(names) + log.skipped["empty turn"] == 9


def test_many_languages_and_tools(shared):
    raw = shared / "data" / "raw"
    assert len(read(raw / "oasst1_multilingual.jsonl")[0]) == 68
    _, log = read(raw / "toolcall_roles.jsonl")
    assert (log.rows_out, log.skipped) == (77, {"tools": 123})
    _, log = read(raw / "reasoning_tool_parts.jsonl")
    assert (log.rows_in, log.rows_out) == (50, 0)


def test_clean_files_lose_nothing(shared):
    for file in sorted((shared / "data" / "train").glob("*.jsonl")):
        _, log = read(file)
        assert log.skipped == {}, file.name
        assert log.changed == {}, file.name
