"""The judgement of a round: from the two sides' logits to what stands and what was measured."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.acceptance import RANKS
from eval.propose import Proposal, top_ranks
from eval.round_plan import RoundPlan
from eval.tree_verify import walk_certain, walk_drawn, walk_greedy
from eval.typical import accept_typical
from eval.verify import (
    AcceptRule,
    Rows,
    Verdict,
    accept_certain,
    accept_drawn,
    accept_greedy,
    overlap,
    scatter_to_target,
)
from models.sampling import Dice, Sampling, probabilities

PLAIN_SOFTMAX = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    overlap: Tensor | None  # [..., N] sum of min(target, draft) at each guess of a chain
    ranks: Tensor | None  # [..., N] rank 0..9 of the verifier's argmax there, or -1


def judge_proposal(
    proposal: Proposal,
    target_logits: Tensor,
    draft_target_ids: Tensor,
    plan: RoundPlan,
    dice: Dice,
    counts: Tensor | None = None,
) -> Outcome:
    """Turn logits [..., M+1, V] into the distributions that ``plan`` needs, and apply its rule.

    Only the first ``counts`` [...] levels of a sequence may stand; None: all.
    """

    def target_after(sampling: Sampling) -> Rows:
        return Rows(target_logits, lambda rows: probabilities(rows, sampling))

    def draft_after(sampling: Sampling) -> Rows | None:
        def on_target_ids(rows: Tensor) -> Tensor:
            chances = probabilities(rows, sampling)
            return scatter_to_target(chances, draft_target_ids, target_logits.shape[-1])

        return None if proposal.logits is None else Rows(proposal.logits, on_target_ids)

    target, draft = target_after(plan.sampling), draft_after(plan.sampling)
    verdict = verify(plan.rule, target, draft, proposal, dice, counts)
    if not plan.measures(proposal.shape):
        return Outcome(verdict, None, None)
    if plan.sampling.greedy:
        # At temperature 0 both would be one-hot and say no more than the acceptance does.
        target, draft = target_after(PLAIN_SOFTMAX), draft_after(PLAIN_SOFTMAX)
    assert draft is not None
    shared = overlap(target.every()[..., :-1, :], draft.every())
    return Outcome(verdict, shared, ranks_of(proposal, target_logits, draft_target_ids))


def verify(
    rule: AcceptRule,
    target: Rows,
    draft: Rows | None,
    proposal: Proposal,
    dice: Dice,
    counts: Tensor | None = None,
) -> Verdict:
    """Judge a proposal by ``rule``.

    ``target`` has the verifier's distributions [..., M+1, V]; ``draft`` [..., P, V] are those the
    guesses were drawn from, on target ids, and only the rules for draws read them. Raises
    ValueError when those get none.
    """
    ids, chain = proposal.ids, proposal.shape.is_chain
    if rule is AcceptRule.greedy and chain:
        return accept_greedy(target.values, ids, counts)
    if rule is AcceptRule.greedy:
        return walk_greedy(target.values, proposal, counts)
    if rule is AcceptRule.argmax_draft:
        return accept_certain(target.every(), ids, dice, counts)
    if rule is AcceptRule.tree_one_hot:
        return walk_certain(target, proposal, dice, counts)
    if rule is AcceptRule.typical:
        return accept_typical(target, proposal, counts)
    if draft is None:
        raise ValueError(
            f"rule={rule.value}: needs the draft's probabilities; draw proposals from the draft, "
            "or take argmax_draft or tree_one_hot for proposals without a distribution"
        )
    if rule is AcceptRule.rejection:
        return accept_drawn(target.every(), draft.every(), ids, dice, counts)
    return walk_drawn(target, draft, proposal, dice, counts)


def ranks_of(proposal: Proposal, target_logits: Tensor, draft_target_ids: Tensor) -> Tensor:
    """[..., N]: where the verifier's argmax stands among a chain's draft tokens, -1 beyond."""
    assert proposal.logits is not None
    best = target_logits[..., :-1, :].argmax(-1)  # [..., N]
    guesses = draft_target_ids[top_ranks(proposal.logits, RANKS)]  # [..., N, 10]
    hit = guesses == best[..., None]
    return torch.where(hit.any(-1), hit.long().argmax(-1), -1)
