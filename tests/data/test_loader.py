"""The loader: the same samples a step for any number of ranks, exactly resumed, never padding."""

import threading
from itertools import islice

import pytest
import torch

from conf.runtime import RankInfo
from conf.schema import ConfigError, OptimSection
from data.loader import StepWindow, TrainLoader, collate, on_device
from data.reader import ShardReader
from data.records import TokenizedSample, TTTBatch


@pytest.fixture
def reader(write_cache, some_samples: list[TokenizedSample], tmp_path) -> ShardReader:
    return ShardReader(write_cache(tmp_path / "cache", some_samples))


def loader_of(reader: ShardReader, rank: int = 0, world: int = 1, **optim) -> TrainLoader:
    settings = OptimSection(**{"batch_size": 6, "micro_batch_size": 2, "epochs": 3.0} | optim)
    return TrainLoader(reader, settings, seed=7, ranks=RankInfo(rank, world, rank))


def samples_in(window: StepWindow) -> list[int]:
    """The random states of the fixture begin with the sample's index."""
    return [
        int(batch.aux[row, 0, 0])
        for batch in window.batches
        for row in range(len(batch.lengths))
        if batch.lengths[row] > 0
    ]


def test_each_epoch_has_every_training_sample_once(reader: ShardReader):
    loader = loader_of(reader)
    assert loader.steps_per_epoch == 3 and loader.total_steps == 9  # 16 samples: 6, 6, 4
    windows = list(loader.windows())
    assert len(windows) == 9
    orders = []
    for epoch in range(3):
        inside = windows[3 * epoch : 3 * epoch + 3]
        assert [len(samples_in(window)) for window in inside] == [6, 6, 4]
        orders.append([index for window in inside for index in samples_in(window)])
        assert sorted(orders[-1]) == reader.train_indices
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("world", [2, 4, 5])
def test_a_step_sees_the_same_samples_on_any_number_of_ranks(reader: ShardReader, world: int):
    alone = list(loader_of(reader).windows())
    ranks = [list(loader_of(reader, rank, world).windows()) for rank in range(world)]
    for step, window in enumerate(alone):
        parts = [samples_in(windows[step]) for windows in ranks]
        together = [index for part in parts for index in part]
        assert sorted(together) == sorted(samples_in(window))
        assert len({len(windows[step].batches) for windows in ranks}) == 1
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_resume_at_any_step_gives_the_same_windows(reader: ShardReader):
    whole = list(loader_of(reader).windows())
    for start in (1, 3, 5, 8):
        rest = list(loader_of(reader).windows(start))
        assert len(rest) == 9 - start
        for before, after in zip(whole[start:], rest, strict=True):
            for one, other in zip(before.batches, after.batches, strict=True):
                assert torch.equal(one.input_ids, other.input_ids)
                assert torch.equal(one.aux, other.aux)
    assert list(loader_of(reader).windows(9)) == []


def test_seeds_give_other_orders(reader: ShardReader):
    other = TrainLoader(reader, loader_of(reader).optim, seed=8, ranks=RankInfo(0, 1, 0))
    assert other.samples_of(0) != loader_of(reader).samples_of(0)


def test_fewer_samples_than_one_batch(reader: ShardReader):
    loader = loader_of(reader, batch_size=100, micro_batch_size=4)
    window = next(loader.windows())
    assert loader.steps_per_epoch == 1
    assert sorted(samples_in(window)) == reader.train_indices
    assert len(window.batches) == 4


def test_a_rank_without_samples_gets_idle_batches(reader: ShardReader):
    windows = list(loader_of(reader, rank=4, world=5, batch_size=3).windows())
    for window in windows:
        (batch,) = window.batches
        assert batch.lengths.tolist() == [0] and not batch.loss_mask.any()
        assert batch.aux.shape == (1, 1, 24) and batch.last.shape == (1, 1, 8)
        assert batch.aux.dtype == torch.bfloat16


def test_total_steps(reader: ShardReader):
    assert loader_of(reader, epochs=0.5).total_steps == 2
    assert loader_of(reader, epochs=0.01).total_steps == 1
    assert loader_of(reader, max_steps=4).total_steps == 4
    assert len(list(loader_of(reader, max_steps=4).windows())) == 4


def test_batches_hold_the_cache_and_padding_is_never_supervised(reader: ShardReader):
    for window in loader_of(reader).windows():
        for batch in window.batches:
            check_batch(batch, reader)


def check_batch(batch: TTTBatch, reader: ShardReader) -> None:
    assert batch.input_ids.shape == batch.loss_mask.shape == batch.argmax.shape == batch.lse.shape
    assert int(batch.lengths.max()) == batch.input_ids.shape[1]
    for row, length in enumerate(batch.lengths.tolist()):
        cached = reader.read(int(batch.aux[row, 0, 0]))
        assert torch.equal(batch.input_ids[row, :length], cached.sample.input_ids)
        assert torch.equal(batch.loss_mask[row, :length], cached.sample.loss_mask)
        assert torch.equal(batch.aux[row, :length], cached.aux)
        assert torch.equal(batch.last[row, :length], cached.last)
        assert torch.equal(batch.argmax[row, :length], cached.argmax)
        assert torch.equal(batch.lse[row, :length], cached.lse)
        assert not batch.loss_mask[row, length:].any()
        for states in (batch.input_ids, batch.aux, batch.last):
            assert not states[row, length:].any()


def test_samples_of_like_length_share_a_batch(reader: ShardReader):
    """Padding of a window stays under that of the worst pairing by far: sorted neighbours."""
    for window in loader_of(reader).windows():
        lengths = [length for batch in window.batches for length in batch.lengths.tolist()]
        assert lengths == sorted(lengths, reverse=True)


def test_an_error_while_reading_reaches_the_trainer(reader: ShardReader, monkeypatch):
    loader = loader_of(reader)

    def broken(index: int):
        raise OSError(5, "Input/output error")

    windows = loader.windows()
    next(windows)
    monkeypatch.setattr(reader, "read", broken)
    with pytest.raises(OSError, match="Input/output"):
        list(windows)


def test_leaving_early_ends_the_reading_thread(reader: ShardReader):
    windows = loader_of(reader, epochs=100.0).windows()
    assert len(list(islice(windows, 2))) == 2
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    windows.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_it_reads_no_further_than_two_windows_ahead(reader: ShardReader, monkeypatch):
    loader = loader_of(reader, epochs=100.0)
    steps: list[int] = []
    window = loader.window
    monkeypatch.setattr(loader, "window", lambda step: steps.append(step) or window(step))
    windows = loader.windows()
    for _ in range(5):
        next(windows)
    windows.close()
    assert max(steps) <= 4 + 2


def test_nothing_to_train_on_is_named(write_cache, some_samples, tmp_path):
    held_out = [sample for sample in some_samples if sample.held_out]
    reader = ShardReader(write_cache(tmp_path / "other", held_out))
    with pytest.raises(ConfigError, match=r"data\.valid_share: all 4 samples"):
        loader_of(reader)


def test_on_device_converts_states_only(reader: ShardReader):
    batch = on_device(collate([reader.read(0)]), torch.device("cpu"), torch.float32)
    assert batch.aux.dtype == batch.last.dtype == batch.lse.dtype == torch.float32
    assert batch.input_ids.dtype == batch.argmax.dtype == batch.lengths.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.bool
