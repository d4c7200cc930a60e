"""Rows that come decoded: parquet files, and data sets of the hub by name."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import HUB, ConfigError
from data.rows import BLOCK, Row

SPELLING = re.compile(r"hub:(?P<name>[^:@]+)(:(?P<config>[^:@]+))?(@(?P<split>[^:@]+))?")
BATCH = 256  # rows decoded together: more are no faster, and long rows fill the memory


@dataclass(frozen=True)
class HubSplit:
    """One split of a data set of the hub, or of a folder that is laid out like one."""

    dataset: str
    config: str | None
    split: str

    @property
    def name(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{HUB}{self.dataset}{config}@{self.split}"

    def __str__(self) -> str:
        return self.name


def hub_split(text: str, knob: str) -> HubSplit:
    """What ``hub:NAME``, ``hub:NAME:CONFIG`` or either with ``@SPLIT`` names (``train`` without).

    Raises ConfigError for another spelling.
    """
    found = SPELLING.fullmatch(text)
    if not found:
        raise ConfigError(
            f"{knob}={text}: is no name of a hub data set; write hub:OWNER/NAME, "
            "hub:OWNER/NAME:CONFIG or hub:OWNER/NAME:CONFIG@SPLIT"
        )
    return HubSplit(found["name"], found["config"], found["split"] or "train")


def parquet_rows(file: Path, name: str = "", knob: str = "data.path") -> Iterator[Row]:
    """The rows of a parquet file, streamed, and told apart by ``name`` or the file's own.

    Raises ConfigError, as from ``knob``, when it is none.
    """
    import pyarrow.parquet  # 70 ms that text files need not wait for

    number = 0
    try:
        # Streamed: the defaults hold a whole row group, which may be the whole file.
        with pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False) as table:
            for batch in table.iter_batches(batch_size=BATCH):
                for row in batch_rows(batch, name or file.name, number):
                    number += 1
                    yield row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{knob}={file}: is no readable parquet file ({words(error)}); write it anew"
        ) from error


def batch_rows(batch: Any, name: str, number: int) -> Iterator[Row]:
    """The rows of an arrow batch; one by one if a text among them is no UTF-8."""
    try:
        values: list | None = batch.to_pylist()
    except UnicodeDecodeError:
        values = None
    for i in range(batch.num_rows):
        where = f"{name}:row {number + i + 1}"
        if values is not None:
            yield Row(where, value=present(values[i]))
            continue
        try:
            yield Row(where, value=present(batch.slice(i, 1).to_pylist()[0]))
        except UnicodeDecodeError:
            yield Row(where, broken="not UTF-8 text")


def present(value: object) -> object:
    """``value`` without its null keys: a table gives every row every key of any row."""
    if isinstance(value, dict):
        return {key: present(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [present(inner) for inner in value]
    return value


def parquet_count(file: Path) -> int:
    """How many rows a parquet file says it has; 0 when it cannot be read."""
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(file).num_rows
    except (pyarrow.ArrowException, OSError):
        return 0  # reading it says why


def hub_rows(source: HubSplit) -> Iterator[Row]:
    """The rows of a hub data set, streamed. Raises ConfigError where the hub does not give them."""
    number = 0
    try:
        # Images and the like stay bytes: a row that shows one is refused, not decoded.
        for value in builder_of(source).as_streaming_dataset(source.split).decode(False):
            number += 1
            yield Row(f"{source.name}:row {number}", value=present(value))
    except hub_errors() as error:
        raise hub_error(source, error) from error


@dataclass(frozen=True)
class HubFacts:
    sha256: str  # of the commit, or of the files' times of a folder
    count: int  # rows; 0 when the data set does not say


def hub_facts(source: HubSplit) -> HubFacts:
    """What identifies the split's content, without reading it. Raises ConfigError as hub_rows."""
    try:
        builder = builder_of(source)
        files = (builder.config.data_files or {}).get(source.split, [])
        content = [builder.hash, source.name, getattr(files, "origin_metadata", []), list(files)]
        split = (builder.info.splits or {}).get(source.split)
    except hub_errors() as error:
        raise hub_error(source, error) from error
    known = json.dumps(content, default=str)
    return HubFacts(hashlib.sha256(known.encode()).hexdigest(), split.num_examples if split else 0)


def builder_of(source: HubSplit) -> Any:
    from datasets import load_dataset_builder  # a second of imports that files need not wait for

    return load_dataset_builder(source.dataset, source.config)


def hub_errors() -> tuple[type[Exception], ...]:
    """What the library raises offline, for unknown and gated names, and for data it cannot read."""
    from datasets.exceptions import DatasetsError

    return (OSError, ValueError, RuntimeError, DatasetsError)


def hub_error(source: HubSplit, error: Exception) -> ConfigError:
    return ConfigError(
        f"{source.name}: the hub does not give it ({words(error)}); check name, config, split and "
        "login, or download its files and give their folder"
    )


def words(error: Exception) -> str:
    """What a library says, as part of a sentence: libraries like several lines."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
