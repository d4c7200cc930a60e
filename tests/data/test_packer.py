"""Packs: within the budget, every sample once, always the same, and nearly as few as can be."""

import time
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from data.packer import CHUNK, Packing, pack


def some_lengths(seed: int, count: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, longest + 1, (count,), generator=generator).tolist()


def fewest(lengths: tuple[int, ...], budget: int) -> int:
    """The fewest packs possible, by trying every set of samples."""
    everything = (1 << len(lengths)) - 1

    def size(chosen: int) -> int:
        return sum(length for i, length in enumerate(lengths) if chosen >> i & 1)

    fits = [size(chosen) <= budget for chosen in range(everything + 1)]

    @lru_cache(None)
    def best(left: int) -> int:
        if not left:
            return 0
        first = left & -left  # some pack holds it
        others, chosen, least = left ^ first, left ^ first, len(lengths)
        while True:
            if fits[chosen | first]:
                least = min(least, 1 + best(others ^ chosen))
            if not chosen:
                return least
            chosen = (chosen - 1) & others

    return best(everything)


@pytest.mark.parametrize("budget", [1, 16, 64, 1000])
def test_every_sample_once_and_never_over_the_budget(budget: int):
    for seed in range(20):
        lengths = some_lengths(seed, count=30, longest=60)
        packs = pack(lengths, budget)
        assert sorted(number for chosen in packs for number in chosen) == list(range(30))
        for chosen in packs:
            held = sum(lengths[number] for number in chosen)
            assert held <= budget or len(chosen) == 1  # a longer sample lies alone
        assert packs == pack(list(lengths), budget)


def test_a_sample_as_long_as_the_budget_and_one_longer():
    assert sorted(map(sorted, pack([8, 3, 9, 5], 8))) == [[0], [1, 3], [2]]
    assert pack([], 8) == []


def too_many(packer: Callable, lengths: list[int], budget: int) -> bool:
    """More than 11/9 of the fewest packs and 6/9 of one: what best fit, longest first, keeps."""
    return 9 * len(packer(lengths, budget)) > 11 * fewest(tuple(lengths), budget) + 6


def in_order(lengths: list[int], budget: int) -> list[list[int]]:
    """Next fit: what a packer without sorting or looking back makes."""
    packs: list[list[int]] = [[]]
    for number, length in enumerate(lengths):
        if sum(lengths[i] for i in packs[-1]) + length > budget:
            packs.append([])
        packs[-1].append(number)
    return packs


def test_nearly_as_few_as_possible():
    tried = [some_lengths(seed, count=9, longest=45) for seed in range(30)]
    assert not any(too_many(pack, lengths, 60) for lengths in tried)
    assert any(too_many(in_order, lengths, 60) for lengths in tried)  # the bound can be missed


def test_the_order_of_arrival_does_not_spoil_it():
    """Thirds, halves and sixths that fill packs to the last token, the smallest first."""
    lengths = [198] * 12 + [401] * 12 + [601] * 12
    assert len(pack(lengths, 1200)) == 12
    assert len(in_order(lengths, 1200)) > 15
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(36, generator=generator).tolist()
        assert len(pack([lengths[i] for i in order], 1200)) == 12


def test_many_samples_leave_little_room():
    lengths = some_lengths(3, count=400, longest=2048)
    assert len(pack(lengths, 8192)) <= 1.01 * sum(lengths) / 8192 + 1


def packing_of(lengths: list[int], budget: int, seed: int = 0) -> Packing:
    return Packing.of(torch.tensor(lengths), budget, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_packing_holds_every_sample_once(count: int):
    lengths = some_lengths(1, count, longest=90)
    packing = packing_of(lengths, 128)
    packs = [packing[number] for number in range(len(packing))]
    assert sorted(number for chosen in packs for number in chosen) == list(range(count))
    assert all(packs) and all(sum(lengths[i] for i in chosen) <= 128 for chosen in packs)
    again = packing_of(lengths, 128)
    assert packs == [again[number] for number in range(len(again))]


def test_chunks_leave_little_more_room_than_the_whole():
    lengths = some_lengths(2, count=5 * CHUNK + 1, longest=2048)
    packing = packing_of(lengths, 8192)
    assert len(packing) <= 1.02 * sum(lengths) / 8192 + 1


def test_a_pack_holds_samples_from_all_over_the_data():
    """The data are sorted by length and packed in the order of the seed."""
    lengths = sorted(some_lengths(3, count=4 * CHUNK, longest=200))
    packing, other = packing_of(lengths, 1024), packing_of(lengths, 1024, seed=1)
    spreads = [max(packing[n]) - min(packing[n]) for n in range(len(packing))]
    assert sum(spreads) / len(spreads) > CHUNK
    assert not torch.equal(packing.samples, other.samples)


def test_the_time_grows_with_the_samples_and_not_with_their_square():
    """Ten times the samples take about ten times as long; trying every pack would take a hundred.

    Two samples fit a pack, so there are half as many packs as samples.
    """

    def seconds(count: int) -> float:
        lengths = torch.tensor(some_lengths(4, count, longest=60)) + 70
        begin = time.process_time()
        Packing.of(lengths, 260, torch.Generator().manual_seed(0))
        return time.process_time() - begin

    few = min(seconds(3 * CHUNK) for _ in range(3))
    assert seconds(30 * CHUNK) < 30 * few
