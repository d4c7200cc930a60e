"""Memory that packs are read into: used again, and never while something in it is alive."""

import gc
import os
from pathlib import Path

import pytest
import torch

from data.reader import ShardReader
from data.records import TokenizedSample
from data.room import ALIGNED, STEP, Room
from data.shard_index import Stretch


@pytest.fixture
def reader(write_cache, some_samples: list[TokenizedSample], tmp_path: Path) -> ShardReader:
    return ShardReader(write_cache(tmp_path / "cache", some_samples))


def test_a_block_comes_back_when_its_last_tensor_has_died():
    room = Room()
    block = room.take(1000)
    place, part = block.data_ptr(), block[10:20].view(torch.float16)
    del block
    gc.collect()
    assert room.free == []  # a part of it lives
    other = room.take(1000)
    assert other.data_ptr() != place
    del part
    assert [len(free) for free in room.free] == [STEP]
    assert room.take(500).data_ptr() == place


def test_a_small_pack_takes_no_large_block():
    room = Room()
    room.take(10 * STEP)  # given up at once
    assert len(room.free) == 1
    kept = room.take(STEP)
    assert len(room.free) == 1 and kept.nbytes == STEP
    large = room.take(9 * STEP)
    assert room.free == [] and large.nbytes == 9 * STEP


def test_tensors_lie_side_by_side():
    wanted = [
        Stretch("a", torch.uint8, (5,), 0),
        Stretch("b", torch.int64, (0,), 0),
        Stretch("c", torch.bfloat16, (3, 7), 0),
        Stretch("d", torch.float8_e4m3fn, (2, 9), 0),
    ]
    found = Room().tensors(wanted)
    assert [(t.dtype, tuple(t.shape)) for t in found] == [(w.dtype, w.shape) for w in wanted]
    for number, tensor in enumerate(found):
        tensor.view(torch.uint8).fill_(number)
        assert tensor.storage_offset() * tensor.element_size() % ALIGNED == 0
    for number, tensor in enumerate(found):
        assert bool((tensor.view(torch.uint8) == number).all())


def test_what_was_read_stays_as_it_is(reader: ShardReader):
    """Packs that are alive keep their states while others are read, and given up again."""
    kept = [reader.read_pack([index, (index + 7) % 20]) for index in range(20)]
    before = [(pack.aux.clone(), pack.last.clone(), pack.lse.clone()) for pack in kept]
    for index in range(20):
        reader.read_pack([19 - index, index, 3])
    for pack, (aux, last, lse) in zip(kept, before, strict=True):
        assert torch.equal(pack.aux, aux) and torch.equal(pack.last, last)
        assert torch.equal(pack.lse, lse)


def test_a_pack_in_any_order_is_its_samples_end_to_end(reader: ShardReader):
    for chosen in ([3], [11, 2, 19, 0, 7], [5, 5, 4]):
        pack, alone = reader.read_pack(chosen), [reader.read(index) for index in chosen]
        assert [sample.id for sample in pack.samples] == [f"sample-{index}" for index in chosen]
        assert torch.equal(pack.aux, torch.cat([one.aux for one in alone]))
        assert torch.equal(pack.last, torch.cat([one.last for one in alone]))
        assert torch.equal(pack.argmax, torch.cat([one.argmax for one in alone]))
        assert torch.equal(pack.lse, torch.cat([one.lse for one in alone]))
        for sample, one in zip(pack.samples, alone, strict=True):
            assert torch.equal(sample.input_ids, one.sample.input_ids)
            assert torch.equal(sample.loss_mask, one.sample.loss_mask)


def test_no_shard_is_kept_open_or_mapped(reader: ShardReader):
    """A large cache has more shards than a process may hold open."""
    reader.read_pack(list(range(20)))
    handles = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]  # noqa: PTH115
    assert not [name for name in handles if str(reader.folder) in name]
    assert str(reader.folder) not in Path("/proc/self/maps").read_text()
