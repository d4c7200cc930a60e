"""What is found of a damaged cache, when, and what a rerun of data.capture does about it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conf.runtime import RankInfo
from conf.schema import ConfigError, OptimSection, TTTSection, Verify
from data import integrity
from data.integrity import examine
from data.loader import TrainLoader
from data.manifest import ShardEntry, read_manifest, shard_folder
from data.reader import ShardReader
from data.records import TokenizedSample
from data.shard_index import ShardIndex
from data.shard_plan import ShardSpan
from data.shards import INDEX

ALONE = RankInfo(0, 1, 0)


@pytest.fixture
def cache(write_cache, some_samples: list[TokenizedSample], tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", some_samples)


def spans_of(cache: Path) -> list[ShardSpan]:
    spans: list[ShardSpan] = []
    first = 0
    for number, entry in enumerate(read_manifest(cache).shards):
        spans.append(ShardSpan(number, first, entry.samples, entry.tokens, entry.bytes))
        first += entry.samples
    return spans


def flip(cache: Path, entry: ShardEntry, place: int) -> None:
    path = shard_folder(cache) / entry.name
    data = bytearray(path.read_bytes())
    data[place] ^= 8
    path.write_bytes(data)


def last_byte_of_aux(cache: Path, entry: ShardEntry) -> int:
    """Where the last state of the shard ends: nobody but its last sample has that byte."""
    path = shard_folder(cache) / entry.name
    tail = load_file(path)["aux"][-1].view(torch.uint8).numpy().tobytes()
    data = path.read_bytes()
    assert data.count(tail) == 1
    return data.index(tail) + len(tail) - 1


@pytest.mark.parametrize("verify", Verify)
def test_a_cache_in_order_is_kept_as_it_is(cache: Path, verify: Verify):
    manifest = read_manifest(cache)
    found = examine(cache, spans_of(cache), manifest, verify, ALONE)
    assert found.whole == manifest.shards and found.faults == []


def test_every_byte_is_found_by_full_and_only_its_shard_is_renewed(cache: Path):
    manifest, spans = read_manifest(cache), spans_of(cache)
    bad = manifest.shards[2]
    size = (shard_folder(cache) / bad.name).stat().st_size
    for place in (3, 200, size // 2, size - 1):
        flip(cache, bad, place)
        found = examine(cache, spans, manifest, Verify.full, ALONE)
        assert found.whole == [entry for entry in manifest.shards if entry != bad]
        (fault,) = found.faults
        assert f"{bad.name}: sha256 is " in fault and f"must be {bad.sha256}" in fault
        flip(cache, bad, place)


def test_sampled_reads_some_samples_and_every_index(cache: Path, monkeypatch):
    """Negative control too: a sample that is not among them is left to the reader."""
    manifest, spans = read_manifest(cache), spans_of(cache)
    bad = manifest.shards[2]
    flip(cache, bad, last_byte_of_aux(cache, bad))
    (fault,) = examine(cache, spans, manifest, Verify.sampled, ALONE).faults
    assert f"{bad.name}: sample sample-" in fault and "not as it was written" in fault
    monkeypatch.setattr(integrity, "SAMPLED", 1)  # the first of the cache alone
    assert examine(cache, spans, manifest, Verify.sampled, ALONE).faults == []
    with pytest.raises(ConfigError, match=rf"{bad.name}: sample sample-\d+ is not as it was"):
        for index in range(len(ShardReader(cache))):
            ShardReader(cache).read(index)
    flip(cache, manifest.shards[5], 60)  # in the header
    (fault,) = examine(cache, spans, manifest, Verify.sampled, ALONE).faults
    assert manifest.shards[5].name in fault


def test_a_shard_that_no_manifest_knows_is_read_in_full(cache: Path):
    """Left by a capture that was killed: damage must not become the manifest's truth."""
    manifest, spans = read_manifest(cache), spans_of(cache)
    bad = manifest.shards[2]
    flip(cache, bad, last_byte_of_aux(cache, bad))
    found = examine(cache, spans, replace(manifest, shards=[]), Verify.sampled, ALONE)
    assert found.whole == [entry for entry in manifest.shards if entry != bad]
    (fault,) = found.faults
    assert bad.name in fault and "not as it was written" in fault


@pytest.mark.parametrize("name", [*INDEX, "ids"])
def test_the_index_of_a_shard_that_no_manifest_knows_is_compared(cache: Path, name: str):
    """Damaged offsets ended in an IndexError; a flag or an id became the manifest's truth."""
    manifest, spans = read_manifest(cache), spans_of(cache)
    bad = manifest.shards[2]
    shard = ShardIndex.of(shard_folder(cache) / bad.name)
    place = shard.path.read_bytes().index(b"sample-")
    if name != "ids":
        place = place_of(shard.path, name) + shard.small[name].nbytes - 1
    flip(cache, bad, place)
    found = examine(cache, spans, replace(manifest, shards=[]), Verify.sampled, ALONE)
    assert found.whole == [entry for entry in manifest.shards if entry != bad]
    (fault,) = found.faults
    assert f"{bad.name}: its index is " in fault and "by its header" in fault


def place_of(path: Path, name: str) -> int:
    """Where a tensor begins."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]


def test_ranks_share_the_looking(cache: Path, monkeypatch):
    manifest, spans = read_manifest(cache), spans_of(cache)
    seen = [
        examine(cache, spans, manifest, Verify.sampled, RankInfo(rank, 3, 0)).whole
        for rank in range(3)
    ]
    assert sorted(entry.name for part in seen for entry in part) == [s.name for s in spans]
    assert all(seen)


def test_no_step_uses_a_damaged_sample(cache: Path):
    """The loader stops before the step that would use it, with file and sample in the sentence."""
    reader = ShardReader(cache)
    bad = reader.manifest.shards[3]
    index = sum(entry.samples for entry in reader.manifest.shards[:4]) - 1
    ids = reader.read(index).sample.input_ids
    assert index in reader.train_indices
    place = last_byte_of_aux(cache, bad)
    flip(cache, bad, place)

    def steps() -> list[bool]:
        loader = TrainLoader(ShardReader(cache), OptimSection(), TTTSection(depth=2), 0, ALONE)
        used = []
        for window in loader.windows():
            packs = [batch.input_ids for batch in window.batches]
            runs = [pack.unfold(0, len(ids), 1) for pack in packs if len(pack) >= len(ids)]
            used.append(any(bool((run == ids).all(-1).any()) for run in runs))
        return used

    with pytest.raises(ConfigError) as stopped:
        steps()
    message = str(stopped.value)
    assert f"{bad.name}: sample {reader.read(0).sample.id[:-1]}{index} is not" in message
    assert "capture.verify=full" in message and message.count(";") == 1
    flip(cache, bad, place)
    assert any(steps())  # and whole it is used


def test_what_a_reader_expects_is_compared_with_both_values(cache: Path):
    """Report B57: dtype, layer ids, verifier, and the text that it read."""
    found = read_manifest(cache)
    ShardReader(cache, found)
    for name, value, message in (
        ("dtype", "float8_e4m3fn", "dtype=bfloat16 must be fp8, which is capture.dtype"),
        ("aux_layers", [1, 4, 5], r"aux_layers=\[2, 4, 5\] must be \[1, 4, 5\], which"),
        ("verifier", "other", r"verifier=weights0 must be other, .*some/verifier"),
        ("prepared", "other", r"prepared=prepared00 must be other, the samples"),
        ("tokenizer", "other", r"tokenizer=tokenizer0 must be other, that"),
        ("template", "other", r"template=template0 must be other, .*data\.template_kwargs"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardReader(cache, replace(found, **{name: value}))
