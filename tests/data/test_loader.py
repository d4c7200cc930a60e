"""The loader: the same samples a step for any number of ranks, exactly resumed, packed in full."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.runtime import RankInfo
from conf.schema import ConfigError, OptimSection, Supervise, TTTSection
from data.chains import Chains
from data.loader import AHEAD, StepWindow, TrainLoader, batch_of, on_device
from data.reader import ShardReader
from data.records import CachedPack, TokenizedSample, TTTBatch

BUDGET = 80  # tokens; the longest sample has 64
TTT = TTTSection(depth=3, supervise=Supervise.any)


@pytest.fixture
def reader(write_cache, some_samples: list[TokenizedSample], tmp_path) -> ShardReader:
    return ShardReader(write_cache(tmp_path / "cache", some_samples))


def loader_of(reader: ShardReader, rank: int = 0, world: int = 1, **optim) -> TrainLoader:
    settings = OptimSection(
        **{"packs_per_step": 2, "micro_batch_tokens": BUDGET, "epochs": 3.0} | optim
    )
    return TrainLoader(reader, settings, TTT, seed=7, ranks=RankInfo(rank, world, rank))


def spans_of(batch: TTTBatch) -> list[tuple[int, int]]:
    """[begin, end) of the samples of a pack, by its positions."""
    begins = (batch.positions == 0).nonzero().flatten().tolist()
    return list(pairwise([*begins, len(batch.positions)]))


def is_idle(batch: TTTBatch) -> bool:
    return len(batch.input_ids) == 1  # no sample of the fixture is that short


def samples_in(window: StepWindow) -> list[int]:
    """The random states of the fixture begin with the sample's index."""
    return [
        int(batch.aux[begin, 0])
        for batch in window.batches
        for begin, _ in spans_of(batch)
        if not is_idle(batch)
    ]


def same(ours, theirs) -> bool:
    """Are two values, dataclasses and lists of tensors included, equal to the last bit?"""
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if is_dataclass(ours):
        names = [part.name for part in fields(ours) if part.compare]
        return all(same(getattr(ours, name), getattr(theirs, name)) for name in names)
    return ours == theirs


def test_each_epoch_has_every_training_sample_once(reader: ShardReader):
    loader = loader_of(reader)
    packs = len(loader.packing)
    assert packs % 2, "the last step of an epoch is to be a partial one"
    assert loader.steps_per_epoch == packs // 2 + 1 and loader.total_steps == 3 * (packs // 2 + 1)
    windows = list(loader.windows())
    assert len(windows) == loader.total_steps
    orders = []
    for epoch in range(3):
        inside = windows[epoch * loader.steps_per_epoch :][: loader.steps_per_epoch]
        assert [len(window.batches) for window in inside] == [2] * (packs // 2) + [1]
        orders.append([index for window in inside for index in samples_in(window)])
        assert sorted(orders[-1]) == reader.train_indices
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("packs", [1, 2, 5])
def test_ranks_split_a_step_without_overlap_or_loss(reader: ShardReader, world: int, packs: int):
    def loaders(rank: int, of: int) -> TrainLoader:
        return loader_of(reader, rank, of, packs_per_step=packs, micro_batch_tokens=70)

    alone = list(loaders(0, 1).windows())
    ranks = [list(loaders(rank, world).windows()) for rank in range(world)]
    assert {len(windows) for windows in ranks} == {len(alone)}
    for step, window in enumerate(alone):
        parts = [samples_in(windows[step]) for windows in ranks]
        together = [index for part in parts for index in part]
        assert len(set(together)) == len(together)  # no sample on two ranks
        assert sorted(together) == sorted(samples_in(window))
        laps = -(-len(window.batches) // world)
        assert [len(windows[step].batches) for windows in ranks] == [laps] * world
        for place, batch in enumerate(window.batches):  # rank r takes packs r, r + W, ...
            assert same(batch, ranks[place % world][step].batches[place // world])


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("budget", [1, 30, 80, 1000])
def test_no_pack_is_over_the_budget(reader: ShardReader, world: int, budget: int):
    for rank in range(world):
        loader = loader_of(reader, rank, world, micro_batch_tokens=budget)
        for batch in (batch for window in loader.windows() for batch in window.batches):
            assert len(batch.input_ids) <= budget or batch.samples == 1  # a longer sample is alone


def test_a_larger_budget_makes_fewer_steps(reader: ShardReader):
    def steps(budget: int) -> int:
        return loader_of(reader, packs_per_step=1, micro_batch_tokens=budget).steps_per_epoch

    tokens = int(reader.lengths[reader.train_indices].sum())
    assert steps(1) == 16 > steps(64) > steps(128) > steps(256) > steps(tokens) == 1


def test_the_same_step_twice_is_the_same_window(reader: ShardReader):
    one, other = loader_of(reader), loader_of(reader)
    for step in (0, 4, 8, one.total_steps - 1):
        assert same(one.window(step), other.window(step))
        assert same(one.window(step), one.window(step))
    assert not same(one.window(0), one.window(1))


def test_resume_at_any_step_gives_the_same_windows(reader: ShardReader):
    whole = list(loader_of(reader).windows())
    for start in (1, 3, 5, 8):
        rest = list(loader_of(reader).windows(start))
        assert len(rest) == len(whole) - start
        for before, after in zip(whole[start:], rest, strict=True):
            assert same(before, after)
    assert list(loader_of(reader).windows(len(whole))) == []


def test_seeds_give_other_orders(reader: ShardReader):
    one = loader_of(reader)
    other = TrainLoader(reader, one.optim, TTT, seed=8, ranks=RankInfo(0, 1, 0))
    assert other.packs_of(0) != one.packs_of(0)


def test_a_data_set_smaller_than_one_step(reader: ShardReader):
    loader = loader_of(reader, packs_per_step=100)
    window = next(loader.windows())
    assert loader.steps_per_epoch == 1
    assert sorted(samples_in(window)) == reader.train_indices
    tokens = int(reader.lengths[reader.train_indices].sum())
    assert tokens / BUDGET <= len(window.batches) <= 1.3 * tokens / BUDGET


def test_a_rank_without_packs_gets_idle_ones(reader: ShardReader):
    windows = list(loader_of(reader, rank=4, world=5, packs_per_step=3).windows())
    for window in windows:
        (batch,) = window.batches
        assert is_idle(batch) and batch.samples == 1 and batch.positions.tolist() == [0]
        assert batch.aux.shape == (1, 24) and batch.last.shape == (0, 8)
        assert batch.aux.dtype == batch.last.dtype == torch.bfloat16
        assert not batch.aux.any() and len(batch.argmax) == len(batch.lse) == 0
        assert batch.chains.counts == [0] * TTT.depth
        assert [step.rows.tolist() for step in batch.chains.steps] == [[0]] * TTT.depth


def test_a_rank_with_fewer_packs_is_filled_up(reader: ShardReader):
    """Packs of one sample each: a rank with fewer idles while the others work."""
    ranks = [
        list(loader_of(reader, r, 5, packs_per_step=7, micro_batch_tokens=1).windows())
        for r in range(5)
    ]
    for windows in zip(*ranks, strict=True):
        idle = [sum(map(is_idle, window.batches)) for window in windows]
        work = [len(samples_in(window)) for window in windows]
        assert [len(window.batches) for window in windows] == [max(work)] * 5
        assert idle == [max(work) - one for one in work] and any(idle)


def test_total_steps(reader: ShardReader):
    steps = loader_of(reader).steps_per_epoch
    assert loader_of(reader, epochs=0.5).total_steps == round(steps / 2)
    assert loader_of(reader, epochs=2.5).total_steps == round(2.5 * steps)
    assert loader_of(reader, epochs=0.01).total_steps == 1
    assert loader_of(reader, max_steps=4).total_steps == 4
    assert len(list(loader_of(reader, max_steps=4).windows())) == 4


def test_ten_packs_by_four_are_three_steps(write_cache, some_samples, tmp_path):
    ten = [sample for sample in some_samples if not sample.held_out][:10]
    reader = ShardReader(write_cache(tmp_path / "ten", ten))
    loader = loader_of(reader, packs_per_step=4, micro_batch_tokens=1, epochs=1.0)
    assert loader.total_steps == loader.steps_per_epoch == 3  # the schedule's length, too
    assert [len(samples_in(window)) for window in loader.windows()] == [4, 4, 2]


@pytest.mark.parametrize("rule", list(Supervise))
def test_packs_hold_the_cache_and_nothing_else(reader: ShardReader, rule: Supervise):
    loader = loader_of(reader)
    loader.ttt = TTTSection(depth=3, supervise=rule)
    several = 0
    for window in loader.windows():
        for batch in window.batches:
            check_batch(batch, reader, rule)
            several += batch.samples > 1
    assert several > 3


def check_batch(batch: TTTBatch, reader: ShardReader, rule: Supervise) -> None:
    rows, spans, masks = len(batch.input_ids), spans_of(batch), []
    assert len(spans) == batch.samples
    assert len(batch.positions) == len(batch.aux) == rows
    asked = 0
    for begin, end in spans:
        part = slice(begin, end)
        cached = reader.read(int(batch.aux[begin, 0]))
        assert torch.equal(batch.input_ids[part], cached.sample.input_ids)
        assert torch.equal(batch.positions[part], torch.arange(end - begin))
        assert torch.equal(batch.aux[part], cached.aux)
        asks = cached.sample.loss_mask.roll(-1)
        asks[-1] = False  # nothing follows the last row, not even the sample behind it
        assert batch.asking is not None
        assert batch.asking[part][asks].tolist() == list(range(asked, asked + int(asks.sum())))
        these = slice(asked, asked + int(asks.sum()))
        assert torch.equal(batch.last[these], cached.last)
        assert torch.equal(batch.argmax[these], cached.argmax)
        assert torch.equal(batch.lse[these], cached.lse)
        asked = these.stop
        masks.append(cached.sample.loss_mask)
    assert asked == len(batch.last) == len(batch.argmax) == len(batch.lse)
    starts = torch.tensor([0, *(end for _, end in spans)])
    assert same(batch.chains, Chains.of(torch.cat(masks), starts, TTT.depth, rule))
    assert (batch.chains.roots > 0).all()


def test_an_error_while_reading_reaches_the_trainer(reader: ShardReader, monkeypatch):
    loader = loader_of(reader)

    def broken(indices: list[int]):
        raise OSError(5, "Input/output error")

    windows = loader.windows()
    next(windows)
    monkeypatch.setattr(reader, "read_pack", broken)
    with pytest.raises(OSError, match="Input/output"):
        list(windows)


def test_leaving_early_ends_the_reading_thread(reader: ShardReader):
    windows = loader_of(reader, epochs=100.0).windows()
    assert len(list(islice(windows, 2))) == 2
    assert any(thread.name.startswith("loader") for thread in threading.enumerate())
    windows.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_it_reads_no_further_ahead_than_it_says(reader: ShardReader, monkeypatch):
    loader = loader_of(reader, epochs=100.0)
    steps: list[int] = []
    window = loader.window
    monkeypatch.setattr(loader, "window", lambda step: steps.append(step) or window(step))
    windows = loader.windows()
    for _ in range(5):
        next(windows)
    windows.close()
    assert max(steps) <= 4 + AHEAD


def test_what_is_asked_of_the_disk_is_what_is_read(reader: ShardReader, monkeypatch):
    """In the order of the steps, across epochs, and a window before it is read."""
    loader = loader_of(reader, rank=1, world=2, packs_per_step=4)
    asked: list[list[int]] = []
    monkeypatch.setattr(reader, "expect", asked.append)
    monkeypatch.setattr("data.loader.SOON", 1)
    monkeypatch.setattr("data.loader.AHEAD", 1)  # one thread: what was asked has an order
    windows = loader.windows()
    first = next(windows)
    assert len(asked) >= 2
    read = [samples_in(window) for window in [first, *windows]]
    assert asked == read and len(read) == loader.total_steps


def test_the_system_fetches_all_bytes_of_a_sample(reader: ShardReader, monkeypatch):
    """Every byte of a shard's rows belongs to one sample's stretches, and to no other's."""
    fetched: dict[str, list[tuple[int, int]]] = {}

    def note(handle: int, begin: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        fetched.setdefault(name, []).append((begin, begin + size))

    monkeypatch.setattr(os, "posix_fadvise", note)
    reader.expect(list(range(len(reader)))[::-1])
    assert sorted(fetched) == [entry.name for entry in reader.manifest.shards]
    for entry in reader.manifest.shards:
        spans = sorted(fetched[entry.name])
        assert all(one[1] <= two[0] for one, two in pairwise(spans))
        rows = entry.tokens * (4 + 1 + 24 * 2) + entry.asking * (8 * 2 + 4 + 4)
        assert sum(end - begin for begin, end in spans) == rows


def test_steps_do_not_wait_for_a_loader_that_is_quick_enough(reader: ShardReader, monkeypatch):
    """Reading a window takes 20 ms here, a step 30: only the first one waits."""
    loader = loader_of(reader, epochs=10.0)
    read = reader.read_pack

    def slow(indices: list[int]) -> CachedPack:
        time.sleep(0.01)
        return read(indices)

    def waits(windows: Iterator[StepWindow]) -> float:
        next(windows)
        total = 0.0
        for _ in range(6):
            time.sleep(0.03)
            begin = time.perf_counter()
            next(windows)
            total += time.perf_counter() - begin
        return total

    monkeypatch.setattr(reader, "read_pack", slow)
    ahead, plain = waits(loader.windows()), waits(map(loader.window, range(7)))
    assert plain > 6 * 0.01
    assert ahead < plain / 2


def test_nothing_to_train_on_is_named(write_cache, some_samples, tmp_path):
    held_out = [sample for sample in some_samples if sample.held_out]
    reader = ShardReader(write_cache(tmp_path / "other", held_out))
    with pytest.raises(ConfigError, match=r"data\.valid_share: all 4 samples"):
        loader_of(reader)


def test_on_device_moves_all_and_converts_states_only(reader: ShardReader):
    cached = [reader.read(0), reader.read(2)]
    starts = CachedPack.of(cached).starts
    assert starts.tolist() == [0, 5, 5 + 33]
    mask = torch.cat([one.sample.loss_mask for one in cached])
    packed = batch_of(CachedPack.of(cached), Chains.of(mask, starts, 3, Supervise.span))
    batch = on_device(packed, torch.device("cpu"), torch.float32)
    assert batch.aux.dtype == batch.last.dtype == batch.lse.dtype == torch.float32
    assert batch.input_ids.dtype == batch.argmax.dtype == batch.positions.dtype == torch.int64
    assert same(batch.chains, packed.chains)
    away = on_device(packed, torch.device("meta"), torch.float32)
    for part in fields(away):
        value = getattr(away, part.name)
        assert not isinstance(value, Tensor) or value.device.type == "meta", part.name
    assert away.chains.targets.device.type == away.chains.steps[1].rows.device.type == "meta"


def test_what_a_step_draws_follows_from_the_step_and_the_pack_alone(reader: ShardReader):
    """Not from the rank that has the pack, nor from the step at which a run began."""
    alone = [[b.draw for b in window.batches] for window in loader_of(reader).windows()]
    later = [[b.draw for b in window.batches] for window in loader_of(reader).windows(2)]
    assert alone[2:] == later
    flat = [draw for step in alone for draw in step]
    assert len(set(flat)) == len(flat) > 4
    pair = [[w.batches[0].draw for w in loader_of(reader, rank, 2).windows()] for rank in (0, 1)]
    assert [list(step) for step in zip(*pair, strict=True)] == [
        step if len(step) == 2 else [step[0], other]
        for step, other in zip(alone, pair[1], strict=True)
    ]
