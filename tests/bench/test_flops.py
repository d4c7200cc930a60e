"""The benchmark's count of floating-point operations, against counts by hand."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

from flops import attention_flops, chain_rows, needed_flops
from workload import Shape

# D 4, 2 query heads and 1 key head of width 3, MLP 5, draft vocabulary 7, 2 aux layers.
SMALL = Shape(
    batch=1,
    tokens=10,
    hidden=4,
    heads=2,
    kv_heads=1,
    head_dim=3,
    mlp=5,
    vocab=20,
    draft_vocab=7,
    aux=2,
)
FC = 4 * (8 * 4)  # FLOPs a row: 8 wide in, 4 out, no input gradient
KEY_VALUE = 2 * (4 * 3 * 4 + 4 * 3 * 6)  # two of: embedding half, then state half, 3 wide out
QUERY = 4 * 6 * 4 + 4 * 6 * 6
OTHERS = 6 * (6 * 4 + 3 * 4 * 5 + 4 * 7)  # o, three of the MLP, draft head
TEACHER = 2 * 4 * 7


def test_without_chain_rows_the_keys_of_all_tokens_remain():
    assert needed_flops(SMALL, [0, 0], 0, 10) == 10 * (FC + KEY_VALUE)


def test_a_chain_row_pays_for_its_keys_from_step_one_on():
    step0 = needed_flops(SMALL, [3], 2, 10)
    assert step0 == 10 * (FC + KEY_VALUE) + 3 * (QUERY + OTHERS) + 2 * TEACHER
    both = needed_flops(SMALL, [3, 2], 2, 10)
    assert both - step0 == 2 * (QUERY + KEY_VALUE + OTHERS)


def test_chain_rows_of_an_answer_at_the_end():
    """40 % of 10 tokens: the answer [6, 10), labels x[7..9], first chain row 5."""
    assert chain_rows(SMALL, 40, 4) == [3, 2, 1, 0]


def test_chain_rows_when_all_is_answer():
    """Row -1 does not exist: rows 0 <= t <= 7 - k."""
    assert chain_rows(SMALL, 100, 3) == [8, 7, 6]


def test_the_shape_of_the_benchmark():
    """D 576: what one pass at 40 % and K = 7 costs, added up term by term."""
    rows = chain_rows(Shape(), 40, 7)
    assert rows == [4 * (204 - k) for k in range(7)]
    tokens = 2048 * (4 * 1728 * 576 + 2 * 576 * 192 * 10)
    row = 576 * 576 * 10 + 6 * (576 * 576 + 3 * 576 * 1536 + 576 * 8192)
    chain = sum(rows) * row + sum(rows[1:]) * 2 * 576 * 192 * 10
    teacher = 816 * 2 * 576 * 8192
    assert needed_flops(Shape(), rows, 816, 2048) == tokens + chain + teacher


def test_attention_counts_the_keys_that_a_row_sees():
    """Rows 5, 6, 7 see 6, 7 and 8 keys; rows 5 and 6 see 6 and 7. Two products, each trained."""
    assert attention_flops(SMALL, 40, [3, 2]) == (21 + 13) * 2 * 6 * (2 * 3)


def test_attention_of_two_documents_is_twice_that_of_one():
    pair = replace(SMALL, batch=2)
    assert attention_flops(pair, 40, [6, 4]) == 2 * attention_flops(SMALL, 40, [3, 2])


def test_attention_when_all_is_answer():
    """Row t sees t + 1 keys: 1 + 2 + ... + 8."""
    assert attention_flops(SMALL, 100, [8]) == 36 * 2 * 6 * (2 * 3)
