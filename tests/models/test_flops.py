"""FLOPs by hand, term by term. (tests/train/test_flops.py lets torch count a real step.)"""

from dataclasses import replace

from models.flops import (
    Counts,
    Sizes,
    eagle1_flops,
    eagle3_flops,
    medusa_flops,
    model_flops,
    ngram_flops,
)

# D 4, 2 query heads and 1 key head of width 3, MLP 5, 7 tokens scored, 2 aux states.
SMALL = Sizes(hidden=4, heads=2, kv_heads=1, head_dim=3, mlp=5, scored=7, aux=2)
NOTHING = Counts(10, [0, 0], [0, 0], 0, 0, [0, 0], 55)
# Rows 5, 6 and 7 ask, then 5 and 6: they see 6 + 7 + 8 and 6 + 7 keys.
SOME = Counts(10, [3, 2], [3, 2], 3, 3, [21, 13], 55)
FC = 4 * (8 * 4)  # FLOPs a row: 8 wide in, 4 out, no input gradient
KEYS = 6 * (4 * 6)  # of one half of the input, key and value 3 wide each
QUERY = 6 * (4 * 6)
ANSWER = 6 * (6 * 4 + 3 * 4 * 5)
HEAD, TEACHER = 6 * 4 * 7, 2 * 4 * 7
PAIR = 2 * 6 * 6


def test_without_chain_rows_the_keys_of_all_tokens_remain():
    assert eagle3_flops(SMALL, NOTHING).total == 10 * (FC + 2 * KEYS)


def test_an_unroll_shares_what_the_tokens_add():
    found = eagle3_flops(SMALL, SOME)
    shared = 3 * (QUERY + KEYS)
    rows = 5 * (QUERY + ANSWER + HEAD) + 2 * KEYS
    assert found.products == 10 * (FC + 2 * KEYS) + shared + rows + 3 * TEACHER
    assert found.attention == 34 * PAIR


def test_a_second_layer_needs_the_first_one_for_all_rows():
    one, two = (eagle3_flops(replace(SMALL, layers=n), SOME) for n in (1, 2))
    first = 10 * (2 * QUERY + ANSWER) + 2 * (QUERY + ANSWER)  # both halves at step 0
    last = (10 + 2) * KEYS  # reads D, not 2 D
    assert two.products - one.products == first + last
    assert two.attention == one.attention + (55 + 13) * PAIR
    three = eagle3_flops(replace(SMALL, layers=3), SOME)
    assert three.products - two.products == (10 + 2) * (QUERY + KEYS + ANSWER)


def test_what_is_frozen_costs_less():
    whole = eagle3_flops(SMALL, SOME).products
    assert whole - eagle3_flops(replace(SMALL, head_trained=False), SOME).products == 5 * HEAD / 3
    assert whole - eagle3_flops(replace(SMALL, teacher=False), SOME).products == 3 * TEACHER
    assert eagle3_flops(replace(SMALL, states_normed=True), SOME).products - whole == 10 * FC / 2


def test_other_families():
    eagle1 = eagle1_flops(replace(SMALL, head_trained=False), SOME)
    rows = 3 * (4 * 16 + QUERY + ANSWER + HEAD * 2 // 3 + TEACHER)
    assert eagle1.products == 10 * (4 * 8 * 4 + KEYS) + rows
    assert eagle1.attention == 21 * PAIR
    medusa = medusa_flops(SMALL, SOME)
    assert (medusa.products, medusa.attention) == (5 * (4 * 16 + HEAD + TEACHER), 0)
    deep = medusa_flops(replace(SMALL, layers=2), SOME)
    assert deep.products - medusa.products == 5 * 6 * 16
    model = model_flops(replace(SMALL, layers=2, verifier=8), SOME)
    layers = 10 * 2 * (QUERY + KEYS + ANSWER)
    assert model.products == layers + 3 * HEAD + 3 * 2 * TEACHER
    assert model.attention == 2 * 55 * PAIR
    assert ngram_flops().total == 0


def test_counts_add_up():
    assert (SOME + NOTHING).pairs == SOME.pairs and (SOME + SOME).rows == [6, 4]
    assert (SOME + NOTHING).tokens == 20
