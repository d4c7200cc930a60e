"""Files to rows: nothing lost, nothing stopped by one bad row, and clear errors for bad paths."""

import gzip
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from conf.schema import ConfigError
from data.dialects import Reading, RowRefused
from data.records import Conversation
from data.sources import (
    DataFile,
    RowLog,
    Source,
    digest,
    find_entries,
    find_files,
    read_conversations,
    read_one,
    read_rows,
)
from data.tables import HubSplit


def row(name: str, answer: str = "a") -> dict:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return {"id": name, "messages": turns}


def read(*files: Path | Source) -> tuple[list[str], RowLog]:
    log = RowLog()
    names = [found.id for found in read_conversations(sources(files), log)]
    assert log.rows_in == log.rows_out + sum(log.skipped.values())
    assert log.rows_out == len(names)
    return names, log


def conversations(*files: Path) -> tuple[list[Conversation], RowLog]:
    log = RowLog()
    return list(read_conversations(sources(files), log)), log


def sources(files: Iterable[Path | Source]) -> list[Source]:
    return [DataFile.alone(file) if isinstance(file, Path) else file for file in files]


def save(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def save_table(path: Path, rows: list[dict]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
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
    for broken in ('{"id": "x", "mess', "junk", '"id": "x"}'):
        names, log = read(save(tmp_path / "lines.json", broken + "\n" + lines(row("y"), row("z"))))
        assert (names, log.rows_in) == (["y", "z"], 3)
    assert read(save(tmp_path / "a.json", "[\n" + json.dumps(row("x")) + "\n]"))[0] == ["x"]


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


def test_folder_is_read_in_order_and_hidden_files_are_not(tmp_path):
    save(tmp_path / "b.jsonl", lines(row("b")))
    save(tmp_path / "a" / "x.JSON", json.dumps([row("a")]))
    save(tmp_path / ".git" / "c.jsonl", lines(row("c")))
    save(tmp_path / "c.jsonl.gz", gzip.compress(lines(row("c")).encode()))
    save(
        tmp_path / "d.json.zst",
        pyarrow.compress(b"[" + lines(row("d")).encode() + b"]", "zstd", asbytes=True),
    )
    save_table(tmp_path / "e.parquet", [row("e")])
    save(tmp_path / "README.md", "words")
    files = find_files([str(tmp_path), str(tmp_path / "b.jsonl"), "hub:owner/name"])
    assert files[-1] == HubSplit("owner/name", None, "train")
    assert read(*files[:-1])[0] == ["a", "b", "c", "d", "e", "b"]
    assert [digest(file).lines for file in files[:-1]] == [0, 1, 0, 0, 1, 1]


def test_what_a_folder_holds_besides_is_left_out_and_said_once(tmp_path, capsys):
    """What data.regenerate writes beside its answers is no data: one row would be read twice."""
    save(tmp_path / "a.jsonl", lines(row("a")))
    save(tmp_path / "a.jsonl.meta.json", json.dumps(row("settings")))
    save(tmp_path / "b.jsonl.partial.jsonl", lines(row("b")))
    for name in ("c.ndjson", "d.ndjson", "e.csv", "README", ".hidden"):
        save(tmp_path / name, lines(row(name)))
    for _ in range(2):
        assert read(*find_files([str(tmp_path)], "regenerate.prompts"))[0] == ["a"]
    said = "1 x (none), 1 x .csv, 1 x .meta.json, 2 x .ndjson, 1 x .partial.jsonl"
    assert capsys.readouterr().out == (
        f"note: regenerate.prompts={tmp_path}: left out, as not of a kind that is read: {said}\n"
    )
    partial = tmp_path / "b.jsonl.partial.jsonl"
    assert read(*find_files([str(partial)]))[0] == ["b"]  # who names it wants it


def test_files_of_one_name_give_rows_of_different_ids(tmp_path):
    nameless = {key: value for key, value in row("").items() if key != "id"}
    for name in ("x/a/0.jsonl", "x/b/0.jsonl", "x/a/0.json", "y/a/0.jsonl", "y/c.jsonl"):
        save(tmp_path / name, lines(nameless))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([nameless]), tmp_path / "y/a/1.parquet")
    x, y = str(tmp_path / "x"), str(tmp_path / "y")
    ids = [read(*entry)[0] for entry in find_entries([x, y, f"{x}/a/0.jsonl", f"{x}/b/0.jsonl"])]
    assert ids == [
        ["a/0.json:1", "a/0.jsonl:1", "b/0.jsonl:1"],
        ["a/0.jsonl@2:1", "a/1.parquet:row 1", "c.jsonl:1"],
        ["0.jsonl:1"],
        ["0.jsonl@4:1"],
    ]
    fewer = [read(*entry)[0] for entry in find_entries([x, y])]
    assert fewer == ids[:2]  # a further entry renames none before it
    (tmp_path / "x").rename(tmp_path / "z")
    assert read(*find_files([str(tmp_path / "z")]))[0] == ids[0]


def test_bad_paths_are_named_with_the_way_out(tmp_path):
    (tmp_path / "empty").mkdir()
    text = save(tmp_path / "a.csv", "x")
    cases = [
        ([], r"^data\.path=\[\]: .*python -m data\.regenerate"),
        (["no/such.jsonl"], r"^data\.path=no/such\.jsonl: no such file .*python -m data\.regen"),
        ([str(tmp_path / "empty")], r"empty: the folder holds no \.json, .*, \.jsonl\.zst file"),
        ([str(text)], r"a\.csv: the extension \.csv is not read"),
        (["hub:"], r"^data\.path=hub:: is no name of a hub data set; write hub:OWNER/NAME"),
        (["hub:a:b:c"], r"^data\.path=hub:a:b:c: is no name of a hub data set"),
    ]
    for paths, message in cases:
        with pytest.raises(ConfigError, match=message):
            find_files(paths)
    with pytest.raises(ConfigError, match=r"^regenerate\.prompts=no\.jsonl"):
        find_files(["no.jsonl"], "regenerate.prompts")


@pytest.mark.parametrize("content", [b"", b" \n\r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n "])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_an_empty_file_is_named_before_anything_is_read(tmp_path, name, content, capsys):
    save(tmp_path / "b.jsonl", lines(row("b")))
    save(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ConfigError, match=rf"^data\.path=\S*{name}: the file is empty; delete"):
        find_files([str(tmp_path / name)])
    assert [file.name for file in find_files([str(tmp_path)])] == ["b.jsonl"]
    said = f"data.path={tmp_path}: 1 empty files skipped (first: {tmp_path / name})"
    assert said in capsys.readouterr().out
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"^data\.path=\S+: the folder holds no .* with a row in"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": []}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (gzip.compress(b"{}", mtime=0), r"is compressed; let its name end with \.gz as well"),
        (pyarrow.compress(b"{}", "zstd", asbytes=True), r"is compressed; .* with \.zst as well"),
        (b"PAR1\x15\x04", r"is a parquet table; let its name end with \.parquet"),
    ],
)
def test_a_file_that_is_no_text_is_named_with_the_way_out(tmp_path, content, message):
    file = save(tmp_path / "a.jsonl", content)
    with pytest.raises(ConfigError, match=rf"^data\.path=\S*a\.jsonl: the file {message}"):
        find_files([str(file)])


def test_a_compressed_file_that_is_none_is_named(tmp_path):
    file = save(tmp_path / "a.jsonl.gz", lines(row("a")))
    with pytest.raises(
        ConfigError, match=r"^data\.path=\S*a\.jsonl\.gz: cannot be read \(zlib inflate failed"
    ):
        find_files([str(file)])


def test_empty_conversations_leave_the_others_unchanged(tmp_path):
    """B02: a row without turns is skipped and counted; B03: so is one of the assistant alone."""
    alone = {"id": "g", "conversations": [{"from": "gpt", "value": "a"}]}
    empty = {"id": "x", "conversations": []}
    file = save(tmp_path / "a.jsonl", lines(row("one"), empty, alone, row("two")))
    found, log = conversations(file)
    assert found == conversations(save(tmp_path / "b.jsonl", lines(row("one"), row("two"))))[0]
    assert log.skipped == {"no turns": 1, "no user turn": 1}


def test_a_reading_or_a_refusal_of_each_row_travels_between_processes(tmp_path):
    file = save(tmp_path / "a.jsonl", lines(row("one"), {}, {"messages": [3]}) + "{")
    answers = [
        pickle.loads(pickle.dumps(read_one(found))) for found in read_rows(DataFile.alone(file))
    ]
    assert isinstance(answers[0], Reading)
    reasons = [one.reason for one in answers[1:] if isinstance(one, RowRefused)]
    assert reasons == ["no turns", "turn without a role", "unparsable JSON"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.zst", "a.parquet"])
def test_bytes_changed_at_random_never_hang_or_crash(tmp_path, name):
    """Every row is kept or counted; a file that cannot be read at all is a ConfigError."""
    dice = random.Random(name)
    good = [row(f"n{n}", 'é "x" \\ \n]}' * 3) for n in range(20)]
    text = (lines(*good) if "jsonl" in name else json.dumps(good)).encode()
    kept = 0
    for _ in range(60):
        file = save(tmp_path / name, text)
        if name.endswith(".gz"):
            file.write_bytes(gzip.compress(text))
        elif name.endswith(".zst"):
            file.write_bytes(pyarrow.compress(text, "zstd", asbytes=True))
        elif name.endswith(".parquet"):
            save_table(file, good)
        whole = bytearray(file.read_bytes())
        for _ in range(dice.choice([1, 3, 10])):
            at = dice.randrange(len(whole))
            whole[at : at + dice.choice([0, 1, 2])] = dice.randbytes(dice.choice([0, 1]))
        file.write_bytes(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        try:
            kept += len(read(*find_files([str(file)]))[0])
        except ConfigError as error:
            assert "\n" not in str(error)
    assert kept or name.endswith((".gz", ".zst", ".parquet"))


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
    first = digest(DataFile.alone(save(tmp_path / "a.jsonl", "a\nb\n")))
    assert first.lines == 2
    other = digest(DataFile.alone(save(tmp_path / "a.jsonl", "a\nc\n")))
    assert other.sha256 != first.sha256


# Real files that people handed in; their labels say what is odd about each row.


def test_messy_sharegpt_fits_its_labels(shared):
    """B01 to B05 on a real file: every row is kept, changed or skipped for the reason it shows."""
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
    assert len(unknown) == 9
    assert unknown <= set(names)  # chatgpt, bing and bard are the assistant, user is the user
    assert "unknown role" not in log.skipped
    roles = {one["id"]: one["roles"] for one in rows}
    found = {one.id: one for one in conversations(raw / "sharegpt_messy_100.jsonl")[0]}
    answers = {"gpt", "chatgpt", "bing", "bard"}
    for name in unknown:
        said = [i for i, role in enumerate(roles[name]) if role in answers]
        assert [t.role for t in found[name].turns].count("assistant") == len(said)
    systems = {name for name, listed in roles.items() if listed[:1] == ["system"]}
    assert {name for name in systems & set(found) if found[name].turns[0].role == "system"} == (
        systems - system_alone
    )


def test_array_cut_off_as_it_was_published(shared):
    names, log = read(shared / "data" / "raw" / "sharegpt_truncated_array.json")
    assert log.rows_in == 10
    assert log.skipped["array cut off or broken: all that follows is lost"] == 1
    assert len(names) + log.skipped["empty turn"] == 9


def test_many_languages(shared):
    assert len(read(shared / "data" / "raw" / "oasst1_multilingual.jsonl")[0]) == 68


def test_tool_roles_are_kept(shared):
    """B06 on a real file: every call is an assistant's, every observation a tool's, none lost."""
    file = shared / "data" / "raw" / "toolcall_roles.jsonl"
    given = [json.loads(line) for line in file.open()]
    found, log = conversations(file)
    assert (log.rows_in, log.rows_out, log.skipped) == (200, 200, {})
    roles = {"human": "user", "gpt": "assistant", "function_call": "assistant"}
    for row, one in zip(given, found, strict=True):
        turns = row["conversations"]
        assert [t.role for t in one.turns] == [roles.get(t["from"], "tool") for t in turns]
        for turn, kept in zip(turns, one.turns, strict=True):
            assert bool(kept.calls) == (turn["from"] == "function_call")
            if kept.calls:
                asked = json.loads(turn["value"])
                assert (kept.calls[0].name, json.loads(kept.calls[0].arguments)) == (
                    asked["name"],
                    asked["arguments"],
                )
            else:
                assert kept.content == turn["value"]
        tools = json.loads(row["tools"])
        assert [tool["function"] for tool in json.loads(one.tools or "[]")] == tools


def test_reasoning_and_call_parts_are_kept(shared):
    """B06 with typed parts: every thought, call and text of the file is in a turn."""
    file = shared / "data" / "raw" / "reasoning_tool_parts.jsonl"
    given = [json.loads(line) for line in file.open()]
    found, log = conversations(file)
    assert (log.rows_in, log.rows_out, log.skipped, log.changed) == (50, 50, {}, {})
    for row, one in zip(given, found, strict=True):
        parts = [part for turn in row["messages"] for part in turn["content"]]

        def texts(kind: str, parts: list = parts) -> list[str]:
            return [part["value"] for part in parts if part["type"] == kind]

        assert [turn.reasoning for turn in one.turns if turn.reasoning] == texts("reasoning")
        assert [turn.content for turn in one.turns if turn.content] == texts("text")
        calls = [call.name for turn in one.turns for call in turn.calls]
        assert calls == [json.loads(text)["name"] for text in texts("tool_call")]
        assert len(json.loads(one.tools or "[]")) == len(json.loads(row["tools"]))


def test_clean_files_lose_nothing(shared):
    for file in sorted((shared / "data" / "train").glob("*.jsonl")):
        _, log = read(file)
        assert log.skipped == {}, file.name
        assert log.changed == {}, file.name
