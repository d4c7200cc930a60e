"""The background writer: it overlaps, holds two shards at most, and tells what went wrong."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from data import writer as writer_module
from data.manifest import Manifest, read_manifest, shard_folder
from data.records import TokenizedSample
from data.shard_plan import ShardSpan
from data.shards import HiddenStateShard
from data.writer import ShardWriter

PATIENCE = 20  # seconds until a wait counts as hanging


@pytest.fixture
def manifest(write_cache, some_samples: list[TokenizedSample], tmp_path: Path) -> Manifest:
    return replace(read_manifest(write_cache(tmp_path / "whole", some_samples)), shards=[])


def shard_of(samples: list[TokenizedSample], number: int, manifest: Manifest) -> HiddenStateShard:
    return HiddenStateShard.empty(samples[number : number + 1], number, manifest)


def span_of(samples: list[TokenizedSample], number: int) -> ShardSpan:
    return ShardSpan(number, number, 1, len(samples[number].input_ids), 0)


def test_a_shard_is_written_while_the_next_one_is_filled(
    manifest: Manifest, some_samples: list[TokenizedSample], tmp_path: Path, monkeypatch
):
    """The first ``put`` returns at once, the second one waits until the first shard is done."""
    begun, go, waited = threading.Event(), threading.Event(), threading.Event()
    real = writer_module.written

    def slow(*job):
        begun.set()
        assert go.wait(PATIENCE)
        return real(*job)

    monkeypatch.setattr(writer_module, "written", slow)
    shard_folder(tmp_path).mkdir(parents=True)
    with ShardWriter(tmp_path, "capture0") as writer:
        writer.put(span_of(some_samples, 0), shard_of(some_samples, 0, manifest))
        assert begun.wait(PATIENCE)  # and yet we are here

        def second() -> None:
            writer.put(span_of(some_samples, 1), shard_of(some_samples, 1, manifest))
            waited.set()

        other = threading.Thread(target=second)
        other.start()
        assert not waited.wait(0.2)
        go.set()
        assert waited.wait(PATIENCE)
        other.join()
        assert [entry.name for entry in writer.finish()] == [
            "00000.safetensors",
            "00001.safetensors",
        ]


def test_an_error_keeps_its_number_and_whole_shards_stay(
    manifest: Manifest, some_samples: list[TokenizedSample], tmp_path: Path, monkeypatch
):
    shard_folder(tmp_path).mkdir(parents=True)
    with ShardWriter(tmp_path, "capture0") as writer:
        writer.put(span_of(some_samples, 0), shard_of(some_samples, 0, manifest))
        writer.finish()

        def full(_handle: int) -> None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        monkeypatch.setattr("os.fsync", full)
        writer.put(span_of(some_samples, 1), shard_of(some_samples, 1, manifest))
        with pytest.raises(OSError, match="quota") as raised:
            writer.put(span_of(some_samples, 2), shard_of(some_samples, 2, manifest))
    assert raised.value.errno == errno.EDQUOT
    assert [path.name for path in shard_folder(tmp_path).iterdir()] == ["00000.safetensors"]
