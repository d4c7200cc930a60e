"""Tables: parquet with its nulls and damages, hub data sets through a folder laid out like one."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetNotFoundError

from conf.schema import ConfigError
from data.rows import Row
from data.sources import DataFile, RowLog, digest, read_conversations, read_rows
from data.tables import HubSplit, hub_split, parquet_rows

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def save(path: Path, rows: list[dict]) -> Path:
    keys = {key: None for row in rows for key in row}
    table = pyarrow.Table.from_pylist([{**keys, **row} for row in rows])
    pyarrow.parquet.write_table(table, path)
    return path


def read(*sources) -> tuple[list, RowLog]:
    log = RowLog()
    files = [DataFile.alone(one) if isinstance(one, Path) else one for one in sources]
    return list(read_conversations(files, log)), log


def test_parquet(tmp_path):
    file = save(
        tmp_path / "a.parquet",
        [{"id": "one", "messages": TURNS}, {"id": "two", "messages": []}, {"messages": TURNS}],
    )
    found, log = read(file)
    assert [one.id for one in found] == ["one", "a.parquet:row 3"]
    assert log.skipped == {"no turns": 1}
    assert digest(DataFile.alone(file)).lines == 3


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"x" * 99, lambda b: b""])
def test_parquet_that_is_none(tmp_path, damage):
    file = save(tmp_path / "a.parquet", [{"id": "one", "messages": TURNS}])
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        ConfigError, match=r"^data\.path=\S*a\.parquet: is no readable parquet file .*write it"
    ):
        read(file)
    assert digest(DataFile.alone(file)).lines == 0


def test_null_keys_of_a_table_are_absent(tmp_path):
    """A table gives every row, turn, call and schema every key of any other, as null."""
    call = {"id": "c", "function": {"name": "f", "arguments": {"x": 1}}}
    other = {"id": "d", "function": {"name": "g", "arguments": {"y": "z"}}}
    rows = [
        {
            "messages": [
                TURNS[0],
                {"role": "assistant", "content": None, "tool_calls": [call, other]},
                {"role": "tool", "content": "4", "tool_call_id": "d"},
                {**TURNS[1], "reasoning_content": "so"},
            ],
            "tools": [
                {"name": "f", "parameters": {"properties": {"x": {"type": "number"}}}},
                {"name": "g", "parameters": {"properties": {"y": {"type": "string"}}}},
            ],
        },
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"instruction": "q", "output": "a"},
    ]
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"id": n, **row}) + "\n" for n, row in enumerate(rows)))
    table = save(tmp_path / "a.parquet", [{"id": n, **row} for n, row in enumerate(rows)])
    values = pyarrow.parquet.read_table(table).to_pylist()
    assert values[1]["input_ids"] is None  # the nulls are there
    assert values[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["y"] is None
    found, log = read(table)
    assert log.skipped == {}
    assert found == read(lines)[0]
    assert found[0].turns[2].name == "g"


def test_text_in_a_table_that_is_no_utf8(tmp_path):
    texts = pyarrow.array([b"q", b"\xe9", b"r"]).cast(pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    table = pyarrow.table({"prompt": column, "response": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found, log = read(tmp_path / "a.parquet")
    assert [one.turns[0].content for one in found] == ["q", "r"]
    assert log.skipped == {"not UTF-8 text": 1}
    assert log.first == {"not UTF-8 text": "a.parquet:row 2"}


def test_rows_of_many_batches_keep_their_order(tmp_path):
    file = save(tmp_path / "a.parquet", [{"n": n} for n in range(1000)])
    expected = [Row(f"a.parquet:row {n + 1}", value={"n": n}) for n in range(1000)]
    assert list(parquet_rows(file)) == expected


def test_memory_is_flat_within_one_row_group(tmp_path):
    dice = random.Random(0)
    rows = [{"text": f"{dice.getrandbits(32_000):x}"} for _ in range(6000)]
    file = save(tmp_path / "a.parquet", rows)
    assert pyarrow.parquet.read_metadata(file).num_row_groups == 1
    size = file.stat().st_size
    before = pyarrow.total_allocated_bytes()
    used = [pyarrow.total_allocated_bytes() - before for _ in parquet_rows(file)]
    assert len(used) == 6000
    assert max(used) < size / 2


@pytest.mark.parametrize(
    ("text", "dataset", "config", "split"),
    [
        ("hub:owner/name", "owner/name", None, "train"),
        ("hub:name@test", "name", None, "test"),
        ("hub:owner/name:en", "owner/name", "en", "train"),
        ("hub:owner/name:en@test", "owner/name", "en", "test"),
    ],
)
def test_hub_names(text, dataset, config, split):
    source = hub_split(text, "data.path")
    assert source == HubSplit(dataset, config, split)
    assert hub_split(source.name, "data.path") == source


def test_hub_data_set(tmp_path):
    """A folder laid out like one, which the library's loader reads alike; no network is tried."""
    place = tmp_path / "set"
    place.mkdir()
    rows = [{"id": "one", "messages": TURNS}, {"id": "two", "messages": None}]
    for split in ("train", "test"):
        text = "".join(json.dumps({**row, "id": f"{split}-{row['id']}"}) + "\n" for row in rows)
        (place / f"{split}.jsonl").write_text(text)
    train, test = hub_split(f"hub:{place}", "k"), hub_split(f"hub:{place}:default@test", "k")
    found, log = read(train, test)
    assert [one.id for one in found] == ["train-one", "test-one"]
    assert log.skipped == {"no turns": 2}
    assert next(iter(read_rows(train))).where == f"hub:{place}@train:row 1"
    facts = digest(train)
    assert (facts.name, facts.lines) == (train.name, 0)
    assert facts == digest(train) != digest(test)
    (place / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    os.utime(place / "train.jsonl", (1, 1))
    assert digest(train).sha256 != facts.sha256  # as a new commit on the hub


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"split": "nosuch"}, r"nosuch"),
        ({"config": "nosuch"}, r"BuilderConfig 'nosuch' not found"),
        ({"dataset": "./no/such/folder"}, r"Couldn't find any data file"),
    ],
)
def test_hub_data_set_that_is_not_there(tmp_path, change, reason):
    (tmp_path / "train.jsonl").write_text(json.dumps({"id": "one", "messages": TURNS}) + "\n")
    known = {"dataset": str(tmp_path), "config": None, "split": "train"}
    source = HubSplit(**{**known, **change})
    with pytest.raises(ConfigError, match=rf"^hub:.*the hub does not give it \(.*{reason}") as one:
        read(source)
    assert "\n" not in str(one.value)


def test_hub_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_CACHE_HOME", str(tmp_path))
    source = hub_split("hub:owner/name:en@test", "data.path")
    for use in (read, digest):
        with pytest.raises(ConfigError) as one:
            use(source)
        message = str(one.value)
        assert message.startswith(
            "hub:owner/name:en@test: the hub does not give it (Couldn't reach 'owner/name' on"
        )
        assert "\n" not in message
        assert message.endswith("or download its files and give their folder")


def test_gated_data_set_and_a_lost_connection_are_one_sentence(monkeypatch):
    class Lost:
        hash, info, config = "x", None, None

        def as_streaming_dataset(self, split: str) -> "Lost":
            return self

        def decode(self, wanted: bool) -> Iterator[dict]:
            yield {"id": "one", "messages": TURNS}
            raise ConnectionError("lost\nit")

    def gated(*_: object) -> None:
        raise DatasetNotFoundError("Dataset 'a/b' is a gated dataset on the Hub.\nAsk for access.")

    source = hub_split("hub:a/b", "data.path")
    monkeypatch.setattr("datasets.load_dataset_builder", gated)
    with pytest.raises(ConfigError, match=r"\(Dataset 'a/b' is a gated dataset on .* Ask for acc"):
        read(source)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: Lost())
    rows = read_rows(source)
    assert next(rows).where == "hub:a/b@train:row 1"
    with pytest.raises(ConfigError, match=r"^hub:a/b@train: the hub does not give it \(lost it\)"):
        next(rows)
