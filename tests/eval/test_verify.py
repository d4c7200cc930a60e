"""The accept rules against hand-made distributions."""

import pytest
import torch

from conf.shapes import chain
from eval.propose import Proposal
from eval.rounds import verify
from eval.verify import (
    AcceptRule,
    Verdict,
    accept_certain,
    accept_drawn,
    accept_greedy,
    given,
    overlap,
    scatter_to_target,
)
from models.sampling import SharedDice

MANY = 40_000


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def dice() -> SharedDice:
    return SharedDice(0, MANY)


def many(row: list[list[float]]) -> torch.Tensor:
    return torch.tensor(row).expand(MANY, len(row), len(row[0]))


def on_chain(
    rule: AcceptRule, target: torch.Tensor, draft: torch.Tensor | None, ids: torch.Tensor
) -> Verdict:
    """The door that a round takes."""
    length = ids.shape[-1]
    proposal = Proposal(
        ids, torch.arange(length).expand(ids.shape), chain(length), source=torch.arange(length)
    )
    offered = None if draft is None else given(draft)
    return verify(rule, given(target), offered, proposal, SharedDice(0, *ids.shape[:-1]))


def shares(tokens: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(tokens, minlength=size).double() / len(tokens)


@pytest.mark.parametrize(
    ("ids", "accepted", "token"),
    [([3, 1], 2, 0), ([3, 2], 1, 1), ([0, 1], 0, 3), ([], 0, 3)],
)
def test_greedy_stops_at_the_first_miss(ids: list[int], accepted: int, token: int):
    target = torch.eye(4)[[3, 1, 0][: len(ids) + 1]]
    verdict = accept_greedy(target, torch.tensor(ids, dtype=torch.long))
    assert (int(verdict.accepted), int(verdict.token)) == (accepted, token)


def test_a_right_guess_after_a_wrong_one_does_not_count():
    target = torch.eye(4)[[0, 1, 2, 3]]
    verdict = accept_greedy(target, torch.tensor([0, 3, 2]))
    assert (int(verdict.accepted), int(verdict.token)) == (1, 1)


def test_no_proposal_is_a_plain_step():
    target, none = torch.tensor([[0.0, 1.0, 0.0]]), torch.zeros(0, dtype=torch.long)
    for verdict in (
        accept_greedy(target, none),
        accept_certain(target, none, SharedDice(0)),
        accept_drawn(target, torch.zeros(0, 3), none, SharedDice(0)),
    ):
        assert (int(verdict.accepted), int(verdict.token)) == (0, 1)
        assert verdict.path.shape == (0,)


def test_counts_bound_what_stands_and_the_next_token_is_the_targets_own():
    """Full agreement, so all would stand; where the bound is met nothing is ruled out."""
    rows = torch.eye(4)[[1, 2, 3, 0]].expand(4, 4, 4)
    ids, counts = torch.tensor([1, 2, 3]).expand(4, 3), torch.tensor([0, 1, 2, 3])
    for verdict in (
        accept_greedy(rows, ids, counts),
        accept_certain(rows, ids, SharedDice(0, 4), counts),
        accept_drawn(rows, rows[:, :3], ids, SharedDice(0, 4), counts),
    ):
        assert torch.equal(verdict.accepted, counts)
        assert verdict.token.tolist() == [1, 2, 3, 0]
        assert verdict.path.tolist() == [[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3]]


@pytest.mark.parametrize("rule", [AcceptRule.rejection, AcceptRule.tree_without_replacement])
def test_draws_need_draft_probabilities(rule: AcceptRule):
    with pytest.raises(ValueError, match=f"rule={rule.value}"):
        on_chain(rule, torch.eye(2), None, torch.tensor([0]))


def test_equal_distributions_accept_everything(generator: torch.Generator, dice: SharedDice):
    target = torch.rand(MANY, 3, 5, generator=generator)
    target /= target.sum(-1, keepdim=True)
    draft = target[:, :2]
    ids = torch.stack(
        [torch.multinomial(draft[:, k], 1, generator=generator)[:, 0] for k in (0, 1)], 1
    )
    verdict = accept_drawn(target, draft, ids, dice)
    assert bool((verdict.accepted == 2).all())


def test_empty_residual_draws_from_the_target(dice: SharedDice):
    """Rounding can reject where the residual sums to 0: the draft is a hair above the target."""
    target = many([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]])
    draft = many([[1.0, 0.0, 0.5]])
    verdict = accept_drawn(target, draft, torch.zeros(MANY, 1, dtype=torch.long), dice)
    rejected = verdict.token[verdict.accepted == 0]
    assert 0.45 < len(rejected) / MANY < 0.55
    torch.testing.assert_close(
        shares(rejected, 3), torch.tensor([0.5, 0.0, 0.5]).double(), atol=0.02, rtol=0
    )


def test_disjoint_supports_always_reject_and_emit_the_target(
    generator: torch.Generator, dice: SharedDice
):
    target = many([[0.0, 0.0, 0.3, 0.7], [1.0, 0.0, 0.0, 0.0]])
    draft = many([[0.5, 0.5, 0.0, 0.0]])
    ids = torch.randint(0, 2, (MANY, 1), generator=generator)
    verdict = accept_drawn(target, draft, ids, dice)
    assert not bool(verdict.accepted.any())
    torch.testing.assert_close(
        shares(verdict.token, 4), torch.tensor([0, 0, 0.3, 0.7]).double(), atol=0.01, rtol=0
    )


def test_rejection_emits_the_residual_and_accepts_the_overlap(
    generator: torch.Generator, dice: SharedDice
):
    target, draft = many([[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]), many([[0.2, 0.3, 0.5]])
    ids = torch.multinomial(draft[:, 0], 1, generator=generator)
    verdict = accept_drawn(target, draft, ids, dice)
    alpha = float(overlap(target[0, 0], draft[0, 0]))
    assert alpha == pytest.approx(0.6)
    assert float(verdict.accepted.double().mean()) == pytest.approx(alpha, abs=0.01)
    rejected = verdict.accepted == 0
    assert bool((verdict.token[rejected] == 0).all())  # (target - draft)+ holds token 0 alone
    assert bool((verdict.token[~rejected] == 2).all())  # the bonus of row 1


def test_argmax_draft_accepts_with_the_target_probability(dice: SharedDice):
    target = many([[0.6, 0.3, 0.1], [0.0, 1.0, 0.0]])
    verdict = accept_certain(target, torch.zeros(MANY, 1, dtype=torch.long), dice)
    assert float(verdict.accepted.double().mean()) == pytest.approx(0.6, abs=0.01)
    rejected = verdict.token[verdict.accepted == 0]
    torch.testing.assert_close(
        shares(rejected, 3), torch.tensor([0, 0.75, 0.25]).double(), atol=0.015, rtol=0
    )


def test_argmax_draft_with_a_certain_target_never_rejects(dice: SharedDice):
    target = many([[1.0, 0.0], [0.0, 1.0]])
    verdict = accept_certain(target, torch.zeros(MANY, 1, dtype=torch.long), dice)
    assert bool((verdict.accepted == 1).all()) and bool((verdict.token == 1).all())


def test_filtered_tokens_are_neither_accepted_nor_emitted():
    target = many([[0.0, 0.4, 0.6], [0.0, 0.4, 0.6]])
    ids = torch.zeros(MANY, 1, dtype=torch.long)
    for rule in (AcceptRule.argmax_draft, AcceptRule.rejection):
        verdict = on_chain(rule, target, many([[1.0, 0.0, 0.0]]), ids)
        assert not bool((verdict.token == 0).any()) and not bool(verdict.accepted.any())


def test_one_hot_distributions_make_every_rule_greedy(generator: torch.Generator):
    target = torch.eye(5)[torch.randint(0, 5, (200, 4), generator=generator)]
    ids = torch.where(
        torch.rand(200, 3, generator=generator) < 0.7,
        target[:, :3].argmax(-1),
        torch.randint(0, 5, (200, 3), generator=generator),
    )
    expected = accept_greedy(target, ids)
    for rule in AcceptRule:
        verdict = on_chain(rule, target, torch.eye(5)[ids], ids)
        assert torch.equal(verdict.accepted, expected.accepted)
        assert torch.equal(verdict.token, expected.token)


def test_scatter_puts_draft_probabilities_on_target_ids():
    spread = scatter_to_target(torch.tensor([[0.1, 0.2, 0.7]]), torch.tensor([4, 0, 2]), 6)
    assert spread.tolist() == [[pytest.approx(v) for v in (0.2, 0, 0.7, 0, 0.1, 0)]]
