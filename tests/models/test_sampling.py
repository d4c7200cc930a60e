"""The filter by hand, its edges, and draws against the exact distribution."""

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conf.schema import ConfigError, JobError
from models.sampling import (
    HEAD,
    NO_TOKEN,
    OwnDice,
    Sampling,
    SharedDice,
    draw_at,
    likeliest,
    probabilities,
    refuse_no_token,
)

INF = math.inf
HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def dist(logits: Tensor | list[float], **filters: float) -> list[float]:
    settings = {"temperature": 1.0, **filters}
    probs = probabilities(torch.as_tensor(logits), Sampling(**settings))  # pyright: ignore
    assert probs.dtype == torch.float32
    return [round(p, 6) for p in probs.tolist()]


def test_greedy_is_one_hot_and_ignores_the_filters():
    """User report B72: top-p at temperature 0 changed the output."""
    for filters in ({"top_p": 0.1}, {"top_k": 1}, {"min_p": 1.0}):
        assert dist([1.0, 3.0, 3.0, 2.0], temperature=0.0, **filters) == [0, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_is_the_first_of_the_largest(dtype: torch.dtype):
    scores = torch.randn(4, 3, 5000).to(dtype).clamp(max=2.5)  # many share the largest
    assert ((scores == scores.amax(-1, keepdim=True)).sum(-1) > 1).all()
    assert torch.equal(likeliest(scores), scores.argmax(-1))
    first = (scores == scores.amax(-1, keepdim=True)).long().cumsum(-1).eq(0).sum(-1)
    assert torch.equal(likeliest(scores), first)
    scores[0, 0, 17] = torch.nan
    scores[1, 1] = -torch.inf
    found = likeliest(scores)
    assert found[0, 0] == NO_TOKEN == found[1, 1]
    assert int((found == NO_TOKEN).sum()) == 2
    with pytest.raises(JobError, match="NaN or -inf"):
        refuse_no_token(found[0].tolist())
    refuse_no_token(found[2].tolist())


def test_temperature():
    assert dist(HALVES, temperature=0.5) == [
        round(p / (0.25 + 0.0625 + 2 * 0.015625), 6) for p in (0.25, 0.0625, 0.015625, 0.015625)
    ]
    assert dist([0.0, 1000.0, -1000.0], temperature=1e-6) == [0, 1, 0]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1.0, 4)]
)
def test_top_p_keeps_the_crossing_token(top_p: float, kept: int):
    """Powers of two are exact, so the borders are too: mass 0.5 is reached by the first token."""
    probs = dist(HALVES, top_p=top_p)
    assert sum(p > 0 for p in probs) == kept
    assert math.isclose(sum(probs), 1.0, abs_tol=3e-6)
    assert probs[0] == round(0.5 / sum([0.5, 0.25, 0.125, 0.125][:kept]), 6)


def test_top_p_over_a_flat_vocabulary_needs_the_whole_sort():
    """More tokens than the quick sort of the head covers, beside a row for which it is enough."""
    size = 4 * HEAD
    flat, sharp = torch.zeros(size), torch.zeros(size)
    sharp[7] = 30.0
    probs = probabilities(torch.stack([flat, sharp]), Sampling(1.0, top_p=0.75))
    assert int((probs[0] > 0).sum()) == size * 3 // 4
    assert int((probs[1] > 0).sum()) == 1
    assert torch.allclose(probs.sum(-1), torch.ones(2))


def test_the_filters_follow_the_temperature():
    """At T=0.5 the first token holds 0.73 of the mass, at T=1 only 0.5."""
    assert dist(HALVES, top_p=0.7)[1] > 0
    assert dist(HALVES, temperature=0.5, top_p=0.7) == [1, 0, 0, 0]
    assert dist(HALVES, min_p=0.5) == [round(2 / 3, 6), round(1 / 3, 6), 0, 0]
    assert dist(HALVES, temperature=0.5, min_p=0.5) == [1, 0, 0, 0]


def test_top_k_keeps_what_equals_the_last():
    assert dist(HALVES, top_k=2) == [round(2 / 3, 6), round(1 / 3, 6), 0, 0]
    assert dist(HALVES, top_k=3) == dist(HALVES)
    assert dist(HALVES, top_k=9) == dist(HALVES)


def test_min_p_is_relative_to_the_likeliest():
    assert dist(HALVES, min_p=0.25) == dist(HALVES)
    assert dist(HALVES, min_p=0.26) == dist(HALVES, top_k=2)
    assert dist(HALVES, min_p=1.0) == [1, 0, 0, 0]


def test_top_p_sees_what_top_k_left():
    """Of the two that top-k leaves the first holds 2/3, in the whole vocabulary 1/2."""
    assert dist(HALVES, top_k=2, top_p=0.6) == [1, 0, 0, 0]
    assert dist(HALVES, top_p=0.6) == dist(HALVES, top_k=2)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8, "top_p": 0.8},
        {"top_k": 12, "top_p": 0.95, "min_p": 0.08},
    ],
    ids=str,
)
def test_the_library_keeps_the_same_tokens(filters: dict):
    """Its own warpers, in the order in which generate applies them."""
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    if "top_k" in filters:
        warpers.append(TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        warpers.append(MinPLogitsWarper(filters["min_p"]))
    no_ids = torch.zeros(50, 0, dtype=torch.long)
    theirs = warpers(no_ids, logits).softmax(-1)  # pyright: ignore[reportArgumentType]
    ours = probabilities(logits, Sampling(0.8, **filters))
    assert torch.equal(ours > 0, theirs > 0) and bool((ours == 0).any())
    torch.testing.assert_close(ours, theirs)


def test_infinite_and_missing_logits():
    nan = math.nan
    assert dist([0.0, -INF, 0.0, nan]) == [0.5, 0, 0.5, 0]
    assert dist([INF, 0.0, INF, nan]) == [0.5, 0, 0.5, 0]
    assert dist([nan, -INF, -5.0], temperature=0.0) == [0, 0, 1]
    assert dist([-INF, -5.0], top_p=0.5) == [0, 1]
    for temperature in (0.0, 1.0):
        with pytest.raises(JobError, match=r"nothing to choose.*float32"):
            probabilities(torch.tensor([[0.0, 1.0], [nan, -INF]]), Sampling(temperature))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
)
def test_refuses_settings_out_of_range(wrong: dict):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*must be"):
        Sampling(**wrong)


def test_bfloat16_logits_become_float32():
    logits = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    probs = probabilities(logits, Sampling(0.7, top_p=0.9))
    assert probs.shape == (3, 5, 40) and probs.dtype == torch.float32
    assert torch.allclose(probs.sum(-1), torch.ones(3, 5), atol=1e-6)


def test_draws_invert_the_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    edges = torch.tensor([0.0, 0.2499999, 0.25, 0.999, 1 - 2**-53], dtype=torch.float64)
    assert draw_at(probs.expand(5, -1), edges).tolist() == [1, 1, 3, 3, 3]
    thirds = torch.full((3,), 1 / 3)
    assert int(draw_at(torch.cat([thirds, torch.zeros(5)]), edges[-1])) == 2


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(filters: dict):
    """Chi-square against the exact probabilities, 5 seeds, 1e-4 over all of them."""
    count, seeds = 20000, 5
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    probs = probabilities(logits, Sampling(0.9, **filters))
    support = probs > 0
    for seed in range(seeds):
        ids = draw_at(probs.expand(count, -1), SharedDice(seed, count).roll())
        seen = torch.bincount(ids, minlength=12).double()
        assert float(seen[~support].sum()) == 0
        wanted = probs[support].double() * count
        statistic = float(((seen[support] - wanted) ** 2 / wanted).sum())
        freedom = int(support.sum()) - 1
        assert chi2.sf(statistic, freedom) > 1e-4 / seeds


def test_draw_shapes():
    probs = probabilities(torch.randn(2, 3, 9), Sampling(1.0))
    dice = SharedDice(5, 2, 3)
    assert draw_at(probs, dice.roll()).shape == (2, 3)
    assert draw_at(probs[0, 0], SharedDice(5).roll()).shape == ()


def test_own_dice_do_not_depend_on_the_others():
    cpu = torch.device("cpu")
    together, alone = OwnDice([1, 2, 3], cpu), OwnDice([3], cpu)
    first = together.roll(4)
    assert torch.equal(first[2:], alone.roll(4))
    together.keep([2, 0])
    again = together.roll()
    assert torch.equal(again[:1], alone.roll()) and again.shape == (2,)
    assert len(set(first.flatten().tolist())) == 12
