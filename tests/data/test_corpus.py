"""The prepared folder against a plain account of the same samples, and its memory."""

import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from data.columns import Columns, runs_of
from data.corpus import Chosen, Origin, Provenance, SourceFacts, labels, load_prepared, write
from data.encoder import Made, SampleBlock, block_of
from data.records import Skipped

VOCAB = 50
ORIGIN = Origin(
    Provenance("print", ["a", "b"], "t", "t", {}, "k", VOCAB),
    [SourceFacts("a", 1.0, 100), SourceFacts("b", 1.0, 100)],
)


def some_blocks(count: int, length: int = 12) -> list[SampleBlock]:
    """Blocks of up to 16 samples from two sources in turn; some begin with a supervised token."""
    draw = np.random.default_rng(5)
    blocks = []
    for first in range(0, count, 16):
        made = []
        for number in range(first, min(first + 16, count)):
            size = int(draw.integers(2, length))
            tokens = draw.integers(0, VOCAB, size).astype(np.int32)
            mask = (draw.random(size) < 0.6).astype(np.uint8)
            made.append(Made(f"n{number}-é", tokens, mask, number % 3 == 0, []))
        blocks.append(block_of(made, len(blocks) % 2))
    return blocks


def publish(folder: Path, blocks: list[SampleBlock], kept: np.ndarray, held: np.ndarray) -> None:
    with closing(Columns(folder)) as columns:
        for block in blocks:
            columns.add(block)
        rows = Skipped(len(kept), int(kept.sum()))
        write(folder, columns, Chosen(kept, held[kept], 0, 0, 0), rows, ORIGIN)


@pytest.mark.parametrize("block", [1 << 20, 7])
def test_the_folder_holds_what_was_kept(tmp_path: Path, monkeypatch, block: int):
    monkeypatch.setattr("data.columns.BLOCK", block)
    monkeypatch.setattr("data.corpus.COUNTED", block)
    blocks = some_blocks(70)
    draw = np.random.default_rng(6)
    kept, held = draw.random(70) < 0.8, draw.random(70) < 0.3
    publish(tmp_path / "out", blocks, kept, held)
    prepared = load_prepared(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "samples.json",
        "samples.safetensors",
    ]
    counts = np.zeros((2, VOCAB), np.int64)
    number = place = 0
    for one in blocks:
        for tokens, mask in zip(
            *(np.split(a, one.lengths.cumsum()[:-1]) for a in (one.tokens, one.mask)),
            strict=True,
        ):
            if kept[number]:
                sample = prepared.samples[place]
                assert sample.id == f"n{number}-é" and sample.greedy == (number % 3 == 0)
                assert sample.input_ids.tolist() == tokens.tolist()
                assert sample.loss_mask.tolist() == mask.tolist()
                assert sample.held_out == held[number]
                for at in range(1, len(tokens)):
                    counts[int(held[number]), tokens[at]] += mask[at] and mask[at - 1]
                place += 1
            number += 1
    assert place == len(prepared.samples) == kept.sum()
    assert torch.equal(prepared.token_counts, torch.from_numpy(counts[0]))
    assert torch.equal(prepared.held_out_counts, torch.from_numpy(counts[1]))
    assert counts.sum() > 100


def test_labels_by_hand():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], np.uint8)
    expected = [0, 0, 1, 0, 0, 0, 1, 1]
    assert labels(mask, np.array([0, 4])).tolist() == expected
    # Two samples whose answers touch: the second one's first token is nobody's prediction.
    assert labels(np.array([0, 1, 1, 1], np.uint8), np.array([0, 2])).tolist() == [0, 0, 0, 1]
    assert labels(np.array([1, 1, 1], np.uint8), np.array([0])).tolist() == [0, 1, 1]


def test_runs_by_hand():
    kept = np.array([True, False, True, True, False])
    lengths = np.array([3, 2, 1, 4, 5])
    assert runs_of(kept, lengths) == [range(3), range(5, 10)]
    assert runs_of(np.ones(5, np.bool_), lengths) == [range(15)]
    assert runs_of(np.zeros(5, np.bool_), lengths) == []


def test_tokens_never_lie_in_memory(tmp_path: Path, monkeypatch):
    """Four times the tokens in as many samples cost no more memory."""
    monkeypatch.setattr("data.columns.BLOCK", 1 << 12)
    monkeypatch.setattr("data.corpus.COUNTED", 1 << 12)
    peaks, sizes = [], []
    for length in (100, 400):
        blocks = some_blocks(2000, length)
        every = np.ones(2000, np.bool_)
        tracemalloc.start()
        publish(tmp_path / str(length), blocks, every, ~every)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(sum(block.tokens.nbytes for block in blocks))
    assert sizes[1] > 3.5 * sizes[0]
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < sizes[1] / 2


def test_the_second_of_two_equal_ones_gives_way(tmp_path: Path):
    every = np.ones(20, np.bool_)
    for _ in range(2):
        publish(tmp_path / "out", some_blocks(20), every, ~every)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(load_prepared(tmp_path / "out").samples) == 20
