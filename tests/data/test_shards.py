"""Shards and their reader: a round trip, and every way in which files can be wrong."""

import errno
import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import ConfigError, JobError
from data.manifest import read_manifest, shard_folder
from data.reader import ShardReader
from data.records import SampleStates, TokenizedSample
from data.shard_file import describe, is_whole
from data.shard_plan import RowSizes, ShardSpan, plan_spans
from data.shards import HiddenStateShard
from data.writer import written


@pytest.fixture
def cache(write_cache, some_samples: list[TokenizedSample], tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", some_samples)


def one_shard(cache: Path, number: int = 1) -> Path:
    return shard_folder(cache) / f"{number:05d}.safetensors"


def test_every_sample_comes_back(cache: Path, some_samples: list[TokenizedSample]):
    reader = ShardReader(cache, read_manifest(cache))
    assert len(reader) == len(some_samples)
    assert len(list(shard_folder(cache).iterdir())) > 5
    for index, sample in enumerate(some_samples):
        cached = reader.read(index)
        assert cached.sample.id == sample.id
        assert cached.sample.greedy == sample.greedy == bool(reader.greedy[index])
        assert cached.sample.held_out == sample.held_out
        assert torch.equal(cached.sample.input_ids, sample.input_ids)
        assert torch.equal(cached.sample.loss_mask, sample.loss_mask)
        assert cached.aux.dtype == cached.last.dtype == torch.bfloat16
        assert cached.aux.shape == (len(sample.input_ids), 24)
        assert bool((cached.aux[:, 0] == index).all())
        asking = int(sample.loss_mask[1:].sum())
        assert cached.last.shape == (asking, 8)
        assert cached.argmax.dtype == torch.int64 and len(cached.argmax) == asking
        assert cached.lse.dtype == torch.float32 and len(cached.lse) == asking
        assert cached.aux_scales is None and cached.last_scales is None
    assert reader.valid_indices == [4, 9, 14, 19]
    assert sorted(reader.train_indices + reader.valid_indices) == list(range(len(some_samples)))
    assert [describe(cache, e.name) for e in reader.manifest.shards] == reader.manifest.shards


def test_a_shard_is_a_plain_safetensors_file(cache: Path, some_samples: list[TokenizedSample]):
    tensors = load_file(one_shard(cache, 0))
    assert tensors["input_ids"].dtype == torch.int32
    assert tensors["loss_mask"].dtype == torch.uint8
    assert tensors["offsets"].dtype == torch.int64
    first = len(some_samples[0].input_ids)
    assert torch.equal(tensors["input_ids"][:first].long(), some_samples[0].input_ids)


def test_spans_cover_all_samples_in_order_and_respect_the_limit():
    lengths = torch.tensor([10, 300, 5, 5, 5, 200, 40] * 10)
    asking, sizes = lengths // 2, RowSizes(20, 12)
    for limit in (1, 3000, 10_000, 1 << 30):
        spans = plan_spans(lengths, asking, sizes, limit)
        assert [span.first for span in spans] == [0, *(s.first + s.count for s in spans[:-1])]
        assert sum(span.count for span in spans) == len(lengths)
        assert sum(span.tokens for span in spans) == sum(lengths)
        assert all(span.bytes <= limit or span.count == 1 for span in spans)
    assert len(plan_spans(lengths, asking, sizes, 1 << 30)) >= 16  # small caches are cut finer
    assert plan_spans(lengths[:1], asking[:1], sizes, 1 << 30)[0].count == 1
    assert plan_spans(lengths[:0], asking[:0], sizes, 1 << 30) == []


def test_a_shard_holds_a_whole_chunk_at_any_size():
    """capture.backend=layers reads all weights for each shard: 16 shards would be 16 readings."""
    lengths = torch.tensor([10, 300, 5, 5, 5, 200, 40] * 10)
    asking, sizes = lengths // 2, RowSizes(20, 12)
    for chunk in (600, 2000, 10_000):
        spans = plan_spans(lengths, asking, sizes, 2000, chunk)
        assert sum(span.count for span in spans) == len(lengths)
        assert all(chunk - 300 < span.tokens <= chunk for span in spans[:-1])
    assert len(spans) == 1
    assert plan_spans(lengths, asking, sizes, 2000, 1) == plan_spans(lengths, asking, sizes, 2000)


def test_counts_of_supervised_and_agreeing_tokens(cache: Path):
    entry = read_manifest(cache).shards[3]
    tensors = load_file(shard_folder(cache) / entry.name)
    starts = tensors["offsets"].tolist()
    agreed, asked = 0, 0
    for start, end in pairwise(starts):
        for row in range(start, end - 1):
            if tensors["loss_mask"][row + 1]:
                agreed += int(tensors["argmax"][asked] == tensors["input_ids"][row + 1])
                asked += 1
    assert entry.asking == asked == len(tensors["last"]) == len(tensors["lse"])
    assert entry.supervised == int(tensors["loss_mask"].sum())
    assert entry.agreed == agreed


def test_another_verifier_is_refused_with_both_values(cache: Path):
    with pytest.raises(ConfigError, match=r"weights0.*must be other"):
        ShardReader(cache, replace(read_manifest(cache), verifier="other"))


def test_another_format_is_refused_with_both_values(cache: Path):
    path = cache / "manifest.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"format_version": 99}))
    with pytest.raises(ConfigError, match=r"format_version=99.* reads 2"):
        ShardReader(cache)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 2}', "null"])
def test_a_damaged_manifest_is_named(cache: Path, text: str):
    (cache / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json: not a manifest"):
        ShardReader(cache)


def test_no_manifest_means_not_complete(cache: Path):
    (cache / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="not complete"):
        ShardReader(cache)


def test_a_missing_shard_is_named_at_open(cache: Path):
    one_shard(cache).unlink()
    with pytest.raises(ConfigError, match=r"00001\.safetensors: missing"):
        ShardReader(cache)


def test_a_cut_shard_is_named_at_open(cache: Path):
    size = one_shard(cache).stat().st_size
    os.truncate(one_shard(cache), size - 3)
    with pytest.raises(ConfigError, match=rf"{size - 3} bytes, must be {size}"):
        ShardReader(cache)
    assert not is_whole(cache, ShardSpan(1, 0, 1, 1, 1), "capture0")


def test_a_disk_that_lies_is_found_when_a_shard_is_read_back(
    monkeypatch, write_cache, some_samples: list[TokenizedSample], tmp_path: Path
):
    """What the disk holds after fsync is not what was handed to it: one bit."""
    cache = write_cache(tmp_path / "whole", some_samples)
    manifest = replace(read_manifest(cache), shards=[])
    shard = HiddenStateShard.empty(some_samples[:1], 0, manifest)
    span = ShardSpan(0, 0, 1, len(some_samples[0].input_ids), 0)
    shard_folder(tmp_path / "bad").mkdir(parents=True)
    assert written(tmp_path / "bad", span, shard, "capture0").samples == 1
    real = os.fsync

    def lies(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_file():
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        real(handle)

    monkeypatch.setattr("os.fsync", lies)
    with pytest.raises(ConfigError, match=r"00000\.safetensors: reads back with xxh3 .* must be"):
        written(tmp_path / "bad", span, shard, "capture0")


def test_a_torn_header_is_found_at_open(cache: Path):
    path = one_shard(cache)
    data = bytearray(path.read_bytes())
    data[0:4] = b"\xff\xff\xff\xff"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"00001\.safetensors: not a shard"):
        ShardReader(cache)


def test_states_shorter_than_the_ids_are_found_at_open(cache: Path):
    """Report B56: the file is in order, its parts do not fit each other: one token more."""
    path = cache / "manifest.json"
    found = json.loads(path.read_text())
    found["shards"][1]["tokens"] += 1
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"00001\.safetensors: .*must be"):
        ShardReader(cache)


def test_swapped_shards_are_found_at_open(cache: Path):
    """Shards of equal shape under each other's name would pass every check but the order."""
    path = cache / "manifest.json"
    found = json.loads(path.read_text())
    found["shards"][0], found["shards"][1] = found["shards"][1], found["shards"][0]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="missing or doubled"):
        ShardReader(cache)


def test_states_of_another_length_are_refused_with_the_sample(
    some_samples: list[TokenizedSample], cache: Path
):
    """Report B54: as many states as ids as mask entries, or the sample's id in the message."""
    shard = HiddenStateShard.empty(some_samples[:2], 0, read_manifest(cache))
    last = torch.zeros(4, 8), torch.zeros(4), torch.zeros(4)
    with pytest.raises(JobError, match=r"sample-0: 4 rows of aux, must be 5"):
        shard.put(0, SampleStates(torch.zeros(4, 24), *last))
    with pytest.raises(JobError, match=r"sample-0: 3 rows of last, must be 4"):
        shard.put(0, SampleStates(torch.zeros(5, 24), last[0][:3], *last[1:]))


def test_a_failed_write_leaves_nothing(monkeypatch, write_cache, some_samples, tmp_path: Path):
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_cache(tmp_path / "cache", some_samples)
    assert list(shard_folder(tmp_path / "cache").iterdir()) == []


def test_any_flipped_byte_is_found_before_its_sample_is_used(cache: Path):
    """Every 97th byte of a shard, one at a time: opening or reading raises, nothing else."""
    path = one_shard(cache)
    whole = path.read_bytes()
    before, entry, *_ = read_manifest(cache).shards
    span = range(before.samples, before.samples + entry.samples)
    found = {"open": 0, "read": 0}
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            reader = ShardReader(cache)
        except ConfigError:
            found["open"] += 1
            continue
        with pytest.raises(ConfigError, match=r"00001\.safetensors: sample sample-\d+ is not as"):
            for index in span:
                reader.read(index)
        found["read"] += 1
    assert min(found.values()) > 5
