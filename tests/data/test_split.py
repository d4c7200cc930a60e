"""The split by conversation and prompt, weights, copies: from ids and tokens alone."""

import numpy as np
import pytest

from data.split import (
    TAKE,
    Digests,
    Split,
    base_id,
    copies,
    digest_of,
    is_taken,
    place,
    prompt_digest,
    split,
)


def digests(words: list[str]) -> Digests:
    return np.array([digest_of(word.encode()) for word in words], np.int64)


def split_of(names: list[str], share: float, prompts: list[str] | None = None) -> Split:
    """Split samples of these ids; without ``prompts`` each conversation has its own."""
    bases = [base_id(name) for name in names]
    places = np.array([place(base) for base in bases])
    return split(digests(bases), places, digests(prompts or bases), share)


def test_split_depends_on_the_id_alone():
    names = [f"p{i}" for i in range(2000)]
    flags = split_of(names, 0.05).held_out
    assert 60 <= flags.sum() <= 140
    assert np.array_equal(split_of(names[::-1], 0.05).held_out, flags[::-1])
    assert np.array_equal(split_of([f"{name}#7" for name in names], 0.05).held_out, flags)
    assert [place(name) < 0.05 for name in names] == flags.tolist()
    assert np.array_equal(split_of([*names, "more"], 0.05).held_out[:-1], flags)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("a#1#2", "a#1"),
        ("json-001", "json-001"),
        ("QWJhYvA_0", "QWJhYvA"),  # ShareGPT's parts of one conversation
        ("i6IyJda_12", "i6IyJda"),
        ("i6IyJda_12#3", "i6IyJda"),
        ("seed_task_35", "seed_task_35"),  # names in words stay apart
        ("dataset_1", "dataset_1"),
        ("identity_7", "identity_7"),
        ("gsm8k_7", "gsm8k_7"),
        ("QWJhYvA_", "QWJhYvA_"),
        ("QWJhYvA_b", "QWJhYvA_b"),
    ],
)
def test_base_id(name: str, base: str):
    assert base_id(name) == base


def test_parts_of_a_conversation_stay_together():
    names = [f"Qw{i:05}_{part}" for i in range(300) for part in range(4)]
    flags = split_of(names, 0.2).held_out.reshape(300, 4)
    assert 30 <= flags[:, 0].sum() <= 90
    assert (flags == flags[:, :1]).all()
    apart = np.array([place(name) < 0.2 for name in names]).reshape(300, 4)
    assert (apart != apart[:, :1]).any()  # what a split by the whole id would do


def test_no_held_out_prompt_is_trained_on():
    names = [f"p{i}" for i in range(1000)]
    prompts = [f"q{i % 600}" for i in range(1000)]  # the first 400 prompts come twice
    found = split_of(names, 0.3, prompts)
    held = {prompt for prompt, flag in zip(prompts, found.held_out, strict=True) if flag}
    trained = {prompt for prompt, flag in zip(prompts, found.held_out, strict=True) if not flag}
    assert held and not held & trained
    by_id = np.array([place(name) < 0.3 for name in names])
    leaked = {p for p, f in zip(prompts, by_id, strict=True) if f}
    leaked &= {p for p, f in zip(prompts, by_id, strict=True) if not f}
    assert leaked  # what a split by id alone would do
    assert found.moved == by_id.sum() - found.held_out.sum() > 0
    assert found.overlap == 0


def test_a_chain_of_shared_prompts_is_one_group():
    """a and b share a prompt, b and c another, so c follows a; its order has no say."""
    names = ["a", "b#1", "b#2", "c", "lone"]
    prompts = ["x", "x", "y", "y", "z"]
    for share in (0.01, 0.3, 0.5):
        flags = split_of(names, share, prompts).held_out
        assert len(set(flags[:4].tolist())) == 1 and flags[4] != flags[0]
        assert np.array_equal(split_of(names[::-1], share, prompts[::-1]).held_out, flags[::-1])


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.9999])
def test_one_is_held_out_and_one_is_not(share: float):
    assert 0 < split_of(["a", "b", "c"], share).held_out.sum() < 3
    assert not split_of(["a", "a#1"], share).held_out.any()


def test_the_smaller_side_is_held_out_where_ids_hold_out_none():
    names = [f"n{i}" for i in range(50)]
    flags = split_of(names, 1e-9, ["same"] * 49 + ["other"]).held_out
    assert flags.tolist() == [False] * 49 + [True]


def test_one_prompt_for_all_is_split_by_id_and_said():
    found = split_of([f"p{i}" for i in range(40)], 0.5, ["same"] * 40)
    assert 0 < found.held_out.sum() < 40
    assert found.overlap == found.held_out.sum() and found.moved == 0


def test_weights_take_a_share_of_the_conversations():
    names = [f"p{i}#{k}" for i in range(3000) for k in range(2)]
    taken = np.array([is_taken(name, 0.25) for name in names]).reshape(3000, 2)
    assert 650 <= taken[:, 0].sum() <= 850
    assert (taken[:, 0] == taken[:, 1]).all()
    more = np.array([is_taken(name, 0.5) for name in names]).reshape(3000, 2)
    assert (more >= taken).all()  # a larger weight keeps what a smaller one took
    assert all(is_taken(name, 1.0) for name in names)
    held = np.array([place(f"p{i}") < 0.25 for i in range(3000)])
    assert 100 <= (held & taken[:, 0]).sum() <= 280  # two independent draws from one id
    assert place("p0", TAKE) != place("p0")


def test_copies_are_all_but_the_first():
    assert copies(digests(["a", "b", "a", "a", "c", "b"])).tolist() == [0, 0, 1, 1, 0, 1]


def test_prompt_digests_follow_the_tokens():
    assert prompt_digest([1, 2, 3]) == prompt_digest(np.array([1, 2, 3], np.int64))
    assert len({prompt_digest(ids) for ids in ([], [1], [1, 2], [2, 1], [1, 2, 0])}) == 5
