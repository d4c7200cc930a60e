"""A capture in parts: each part writes its own shards, and the last capture closes the cache."""

import fcntl
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import load_config
from conf.runtime import RankInfo
from conf.schema import CaptureSection, ConfigError, Precision, RunConfig, Stage, StateDtype
from data import capture_job
from data.capture import capture
from data.manifest import manifest_file, read_manifest, shard_folder
from data.records import PreparedData
from models.verifier import Verifier

ALONE = RankInfo(0, 1, 0)
PARTS = 3


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path, monkeypatch) -> RunConfig:
    monkeypatch.setattr(capture_job, "MIB", 40_000)  # several shards
    cfg = load_config([f"verifier.path={tiny_verifier}", "run.device=cpu"], running=())
    cfg.run.cache = str(tmp_path / "cache")
    cfg.verifier.aux_layers, cfg.verifier.dtype = None, Precision.float32
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128, shard_mib=1)
    return cfg


def part_of(cfg: RunConfig, part: int, parts: int = PARTS) -> RunConfig:
    return replace(cfg, capture=replace(cfg.capture, part=part, parts=parts))


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(shard_folder(folder).iterdir())}


def test_parts_make_the_cache_that_one_capture_makes(
    cfg: RunConfig, prepared: PreparedData, tmp_path: Path, monkeypatch, capsys
):
    whole = replace(cfg, run=replace(cfg.run, cache=str(tmp_path / "whole")))
    expected = capture(whole, prepared, ALONE)
    names = list(shards_of(expected))
    assert len(names) > PARTS
    seen: set[str] = set()
    for part in (2, 0, 1):  # they start when machines are free
        folder = capture(part_of(cfg, part), prepared, ALONE)
        assert not manifest_file(folder).exists()
        new = set(shards_of(folder)) - seen
        assert new == {name for i, name in enumerate(names) if i % PARTS == part}
        seen |= new
    assert "part 1 of 3" in capsys.readouterr().out
    monkeypatch.setattr(Verifier, "load", None)  # would fail if it were called
    assert capture(cfg, prepared, ALONE) == folder
    assert shards_of(folder) == shards_of(expected)
    assert read_manifest(folder) == read_manifest(expected)
    assert capture(part_of(cfg, 1), prepared, ALONE) == folder
    assert read_manifest(folder) == read_manifest(expected)  # a late part changes nothing


def test_the_closing_capture_makes_what_a_lost_part_did_not(cfg: RunConfig, prepared: PreparedData):
    folder = capture(part_of(cfg, 0), prepared, ALONE)
    kept = {path.name: path.stat().st_ino for path in shard_folder(folder).iterdir()}
    capture(cfg, prepared, ALONE)
    names = [entry.name for entry in read_manifest(folder).shards]
    assert len(names) > len(kept) and sorted(shards_of(folder)) == names
    assert {name: (shard_folder(folder) / name).stat().st_ino for name in kept} == kept


def test_a_part_leaves_the_others_half_written_shards_alone(cfg: RunConfig, prepared: PreparedData):
    folder = capture(part_of(cfg, 0), prepared, ALONE)
    theirs, ours = (shard_folder(folder) / f"{n:05d}.safetensors.tmp" for n in (1, 3))
    for path in (theirs, ours):
        path.write_bytes(b"half")
    os.truncate(shard_folder(folder) / "00003.safetensors", 100)
    capture(part_of(cfg, 0), prepared, ALONE)
    assert theirs.exists() and not ours.exists()


@pytest.mark.parametrize(
    ("lock", "kind", "part", "refused"),
    [
        (".lock", fcntl.LOCK_EX, 0, True),  # a whole capture is at work
        (".lock", fcntl.LOCK_SH, None, True),  # a part is, and this would be the whole
        (".part-0-of-3.lock", fcntl.LOCK_EX, 0, True),  # the same part
        (".lock", fcntl.LOCK_SH, 0, False),  # another part is at work
        (".part-1-of-3.lock", fcntl.LOCK_EX, 0, False),
    ],
)
def test_who_may_write_beside_whom(
    cfg, prepared, lock: str, kind: int, part: int | None, refused: bool
):
    folder = capture_job.plan(cfg, prepared).folder
    shard_folder(folder).mkdir(parents=True)
    job = cfg if part is None else part_of(cfg, part)
    with (folder / lock).open("a+") as file, ExitStack() as held:
        fcntl.flock(file, kind)
        if refused:
            with pytest.raises(ConfigError, match="another process is capturing"):
                capture_job.take(job, prepared, ALONE, held)
        else:
            assert capture_job.take(job, prepared, ALONE, held).todo


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["capture.parts=4", "capture.part=4"], "capture.part=4: parts count from 0"),
        (["capture.part=1"], "there are 1; take 0 to 0"),
        (["capture.part=-1"], "capture.part=-1"),
        (["capture.parts=0"], "capture.parts=0"),
        (["capture.parts=2", "capture.mode=online"], "has no effect with capture.mode=online"),
        (["capture.parts=2", "stages=[capture,train]"], "train needs one"),
    ],
)
def test_what_is_refused(words: list[str], reason: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(words)
    assert reason in str(refusal.value)


def test_a_part_may_prepare_and_capture():
    cfg = load_config(["capture.parts=2", "capture.part=1"], [Stage.prepare, Stage.capture])
    assert (cfg.capture.part, cfg.capture.parts) == (1, 2)
