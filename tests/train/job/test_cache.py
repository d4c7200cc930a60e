"""Training from a cache in eight bits, from one that was damaged and mended, and from a store."""

import shutil
from pathlib import Path

import pytest

STAGES = ("stages=[prepare,capture,train]", "capture.dtype=fp8", "optim.max_steps=6")


@pytest.fixture(scope="module")
def first(place) -> Path:
    """The cache of a training from fp8 states; the run is ``eight``."""
    place.finish(place.words("eight", *STAGES, cache="eight"))
    (folder,) = (place.folder / "eight").glob("capture-*")
    return folder


def test_a_head_trains_from_states_in_eight_bits(place, first: Path):
    rows = place.lines("eight")
    assert rows[-1]["step"] == 6 and "held_out" in rows[-1]
    assert (place.run("eight") / "best" / "draft.safetensors").is_file()


def test_a_damaged_shard_is_renewed_alone_and_the_training_is_the_same(place, first: Path):
    shutil.copytree(first.parent, place.folder / "mended")
    (folder,) = (place.folder / "mended").glob("capture-*")
    shards = sorted((folder / "shards").iterdir())
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in shards}
    damaged = shards[3]
    data = bytearray(damaged.read_bytes())
    data[-40] ^= 4
    damaged.write_bytes(data)
    words = place.words("mended", *STAGES, "capture.verify=full", cache="mended")
    out, _ = place.finish(words)
    assert f"mending an incomplete cache ({damaged}: sha256 is " in out
    for path in shards:
        inode, whole = before[path.name]
        assert path.read_bytes() == whole
        assert (path.stat().st_ino == inode) == (path != damaged)
    place.assert_same_training("eight", "mended")


def test_a_machine_without_the_states_trains_from_the_store(place, first: Path):
    """Captured on one machine, whose disk is then gone; trained on another."""
    store = f"capture.store=file://{place.folder / 'store'}"
    place.finish(place.words("sender", *STAGES, store, cache="sender"))
    shutil.rmtree(place.folder / "sender")
    out, _ = place.finish(place.words("taker", *STAGES, store, cache="taker"))
    assert "capture: already in" in out
    (folder,) = (place.folder / "taker").glob("capture-*")
    (kept,) = (place.folder / "store").glob("**/shards")
    fetched = {path.name for path in (folder / "shards").iterdir() if not path.is_symlink()}
    assert fetched <= {path.name for path in kept.iterdir()} and fetched
    for run in ("sender", "taker"):
        place.assert_same_training("eight", run)
