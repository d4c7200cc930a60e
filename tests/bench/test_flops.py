"""The benchmarks' documents, counted by hand and by data/amount.py."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

from flops import chain_rows, counts_of, step_flops
from workload import Shape, answer_length

from conf.schema import Supervise
from data import amount

SMALL = Shape(batch=2, tokens=10)


def test_chain_rows_of_an_answer_at_the_end():
    """40 % of 10 tokens: the answer [6, 10), labels x[7..9], first chain row 5."""
    assert chain_rows(SMALL, 40, 4) == [6, 4, 2, 0]


def test_chain_rows_when_all_is_answer():
    """Row -1 does not exist: rows 0 <= t <= 7 - k."""
    assert chain_rows(SMALL, 100, 3) == [16, 14, 12]


@pytest.mark.parametrize("share", [8, 40, 100])
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_counts_are_those_of_the_documents_masks(share: int, depth: int):
    shape = Shape(batch=2, tokens=24)
    mask = torch.zeros(2, 24, dtype=torch.bool)
    mask[:, 24 - answer_length(shape, share) :] = True
    starts = torch.tensor([0, 24, 48])
    assert counts_of(shape, share, depth) == amount.counts_of(
        mask.flatten(), starts, depth, Supervise.span
    )


def test_the_shape_of_the_benchmark():
    """D 576: what one pass at 40 % and K = 7 costs, added up term by term."""
    rows = chain_rows(Shape(), 40, 7)
    assert rows == [4 * (204 - k) for k in range(7)]
    tokens = 2048 * (4 * 1728 * 576 + 2 * 576 * 192 * 12)
    fed = 816 * 6 * 576 * (576 + 2 * 192)
    row = 6 * (2 * 576 * 576 + 3 * 576 * 1536 + 576 * 8192)
    chain = sum(rows) * row + sum(rows[1:]) * 2 * 576 * 192 * 6
    teacher = 816 * 2 * 576 * 8192
    assert step_flops(Shape(), 40, 7).products == tokens + fed + chain + teacher
