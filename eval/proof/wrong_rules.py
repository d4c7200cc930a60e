"""Accept rules that look plausible and change the distribution; the counting test fails them."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from eval.propose import Proposal
from eval.tree_verify import Left, Tree, walk
from eval.typical import accept_typical
from eval.verify import (
    Verdict,
    accept_certain,
    accept_drawn,
    given,
    leading,
    of_ids,
    on_chain,
    row_of,
)
from models.sampling import Dice, draw_at

OUTSIDE = 0.3  # of not_renormalised: the draft's full softmax has this mass off the vocabulary


class Control(Enum):
    no_residual = "no_residual"  # after a miss the draw is from the target itself
    not_renormalised = "not_renormalised"  # ratio with the full softmax, draw from the pruned one
    top1_with_ratio = "top1_with_ratio"  # an argmax proposal judged as if it had been drawn
    cold_bonus = "cold_bonus"  # after a full acceptance the draw ignores temperature and filters
    top_k_with_ratio = "top_k_with_ratio"  # a tree of top ranks judged as if it had been drawn
    siblings_not_renormalised = "siblings_not_renormalised"  # r(x) = 0, the rest as it was
    draft_not_renormalised = "draft_not_renormalised"  # later draws tested with the whole draft
    no_tree_residual = "no_tree_residual"  # siblings tested against, and drawn from, the target
    typical = "typical"  # Medusa's, which a person can choose as eval.rule


@dataclass(frozen=True)
class Seen:
    """What a judge of a round knows."""

    proposal: Proposal
    target: Tensor  # [..., M+1, V] probabilities
    draft: Tensor  # [..., P, V] probabilities, on target ids
    warm: Tensor  # [..., M+1, V] the target's at temperature 1 without filters


def judge_wrongly(control: Control, seen: Seen, dice: Dice) -> Verdict:
    proposal, target, draft = seen.proposal, seen.target, seen.draft
    if control is Control.no_residual:
        return accept_without_residual(target, draft, proposal.ids, dice)
    if control is Control.not_renormalised:
        return accept_drawn(target, draft * (1 - OUTSIDE), proposal.ids, dice)
    if control is Control.top1_with_ratio:
        return accept_drawn(target, draft, proposal.ids, dice)
    if control is Control.cold_bonus:
        return accept_with_cold_bonus(seen, dice)
    if control is Control.siblings_not_renormalised:
        return walk(Tree(proposal, given(target), None), dice, None, judge_by_whole_target)
    if control is Control.draft_not_renormalised:
        return walk(Tree(proposal, given(target), given(draft)), dice, None, judge_by_whole_draft)
    if control is Control.no_tree_residual:
        return walk(Tree(proposal, given(target), given(draft)), dice, None, judge_afresh)
    if control is Control.typical:
        return accept_typical(given(target), proposal)
    assert control is Control.top_k_with_ratio
    return walk(Tree(proposal, given(target), given(draft)), dice, None)


def accept_without_residual(target: Tensor, draft: Tensor, ids: Tensor, dice: Dice) -> Verdict:
    rolls = dice.roll(ids.shape[-1])
    accepted = leading(rolls * of_ids(draft, ids) < of_ids(target, ids))
    return on_chain(accepted, draw_at(row_of(target, accepted), dice.roll()), ids)


def accept_with_cold_bonus(seen: Seen, dice: Dice) -> Verdict:
    ids = seen.proposal.ids
    verdict = accept_certain(seen.target, ids, dice)
    bonus = draw_at(seen.warm[..., -1, :], dice.roll())
    every = verdict.accepted == ids.shape[-1]
    return replace(verdict, token=torch.where(every, bonus, verdict.token))


def judge_by_whole_target(left: Left, token: Tensor, uniform: Tensor) -> tuple[Tensor, Left]:
    stands, after = left.judge(token, uniform)
    return stands, replace(after, target_mass=torch.ones_like(after.target_mass))


def judge_by_whole_draft(left: Left, token: Tensor, uniform: Tensor) -> tuple[Tensor, Left]:
    stands, after = left.judge(token, uniform)
    return stands, replace(after, draft_mass=torch.ones_like(after.draft_mass))


def judge_afresh(left: Left, token: Tensor, uniform: Tensor) -> tuple[Tensor, Left]:
    stands, after = left.judge(token, uniform)
    return stands, replace(after, target=left.target, target_mass=left.target_mass)
