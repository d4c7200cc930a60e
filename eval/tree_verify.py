"""The accept rules for trees: one walk from the root, depth by depth and child by child.

``target`` [..., M+1, V] has the verifier's distribution after the root and after each guess, on its
own path. At a node its children are tested in turn. The first that stands is the next node; each
that does not changes what the later ones, and the verifier's own token, are tested against and
drawn from. Sources: EAGLE's evaluate_posterior for ``tree_one_hot``; SpecInfer (2305.09781) and
EAGLE-1 for draws, here without replacement. Exact: tests/eval/test_tree_verify.py enumerates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.propose import Proposal
from eval.verify import Rows, Verdict, draw_left, row_of
from models.sampling import Dice, likeliest


def walk_greedy(target: Tensor, proposal: Proposal, counts: Tensor | None = None) -> Verdict:
    """A guess stands where it is the argmax of its parent's row (logits do) and its parent stands.

    One argmax a row, then the walk is on ids.
    """
    best = likeliest(target)  # [..., M+1]
    hit = proposal.ids == best.gather(-1, proposal.parents)  # [..., M]
    node = torch.zeros_like(best[..., 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    path: list[Tensor] = []
    for level in range(proposal.shape.depth):
        here = hit & (proposal.parents == node[..., None])
        alive = alive & here.any(-1)
        if counts is not None:
            alive = alive & (counts > level)
        node = torch.where(alive, here.long().argmax(-1) + 1, node)
        path.append(torch.where(alive, node, 0))
    token = best.gather(-1, node[..., None]).squeeze(-1)
    return as_verdict(path, token)


def walk_certain(
    target: Rows, proposal: Proposal, dice: Dice, counts: Tensor | None = None
) -> Verdict:
    """Guesses that had probability 1: child x stands with r(x), r the target at its parent.

    After a rejection r(x) = 0 and r is renormalised.
    """
    return walk(Tree(proposal, target, None), dice, counts)


def walk_drawn(
    target: Rows, draft: Rows, proposal: Proposal, dice: Dice, counts: Tensor | None = None
) -> Verdict:
    """Siblings drawn without replacement from rows of ``draft`` [..., P, V], on target ids.

    Child x stands with min(1, r(x)/d(x)); after a rejection r = (r - d)+ and d(x) = 0, both
    renormalised. Where d has no token left, a child was no draw and never stands.
    """
    return walk(Tree(proposal, target, draft), dice, counts)


@dataclass(frozen=True)
class Tree:
    """A proposal with the distributions that judge it."""

    proposal: Proposal
    target: Rows  # [..., M+1, V]
    draft: Rows | None  # [..., P, V]; None: every guess had probability 1

    def left_at(self, node: Tensor, first_child: Tensor) -> "Left":
        """Before any child of ``node`` [...] is tested. ``first_child`` is 0 where it has none."""
        target = self.target.at(node).double()
        whole = torch.ones_like(target[..., 0])
        if self.draft is None:
            return Left(target, whole, None, whole)
        assert self.proposal.source is not None
        source = self.proposal.source.expand(self.proposal.ids.shape)
        row = source.gather(-1, (first_child - 1).clamp_min(0)[..., None]).squeeze(-1)
        return Left(target, whole, self.draft.at(row).double(), whole)


@dataclass(frozen=True)
class Left:
    """What is left of a node's distributions after the children tested so far; fp64.

    ``target`` and ``draft`` [..., V] are not renormalised: their sums are kept beside them, 1 at
    the start. A target whose sum is 0 was equal to the draft: only rounding rejects there.
    """

    target: Tensor
    target_mass: Tensor  # [...]
    draft: Tensor | None
    draft_mass: Tensor  # [...]

    def judge(self, token: Tensor, uniform: Tensor) -> tuple[Tensor, "Left"]:
        """Whether child ``token`` [...] stands, [...] bool, and what is left if it does not."""
        at = token[..., None]
        wanted = self.target.gather(-1, at).squeeze(-1)
        if self.draft is None:
            target = self.target.scatter(-1, at, 0.0)
            stands = uniform * self.target_mass < wanted
            return stands, Left(target, target.sum(-1), None, self.draft_mass)
        offered = self.draft.gather(-1, at).squeeze(-1)
        # No token left: offered and mass are 0, nothing stands and nothing more is ruled out.
        stands = uniform * offered * self.target_mass < wanted * self.draft_mass
        target = normalised(self.target, self.target_mass)
        target = (target - normalised(self.draft, self.draft_mass)).clamp_min_(0)
        draft = self.draft.scatter(-1, at, 0.0)
        return stands, Left(target, target.sum(-1), draft, draft.sum(-1))

    def where(self, condition: Tensor, other: "Left") -> "Left":
        """This one where ``condition`` [...] holds, elsewhere ``other``."""
        wide = condition[..., None]
        draft = None
        if self.draft is not None and other.draft is not None:
            draft = torch.where(wide, self.draft, other.draft)
        return Left(
            torch.where(wide, self.target, other.target),
            torch.where(condition, self.target_mass, other.target_mass),
            draft,
            torch.where(condition, self.draft_mass, other.draft_mass),
        )


ChildJudge = Callable[[Left, Tensor, Tensor], tuple[Tensor, Left]]


def normalised(values: Tensor, mass: Tensor) -> Tensor:
    return values / torch.where(mass > 0, mass, 1.0)[..., None]


def walk(tree: Tree, dice: Dice, counts: Tensor | None, judge: ChildJudge = Left.judge) -> Verdict:
    """Rolls a number a guess and one for the verifier's token, whatever comes out.

    ``judge`` is another in tests of wrong rules.
    """
    proposal = tree.proposal
    children = children_of(proposal.parents)  # [..., M+1, W]
    uniform = dice.roll(proposal.ids.shape[-1])  # [..., M]
    node = torch.zeros_like(proposal.ids[..., 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    left = tree.left_at(node, row_of(children, node)[..., 0])
    path: list[Tensor] = []
    for level in range(proposal.shape.depth):
        if counts is not None:
            alive = alive & (counts > level)
        waiting, own = alive, row_of(children, node)  # [..., W]: those of the node
        for child in own.unbind(-1):
            tested = waiting & (child > 0)
            if not bool(tested.any()):
                break
            guess = (child - 1).clamp_min(0)[..., None]
            token = proposal.ids.gather(-1, guess).squeeze(-1)
            stands, after = judge(left, token, uniform.gather(-1, guess).squeeze(-1))
            left = after.where(tested & ~stands, left)
            node = torch.where(tested & stands, child, node)
            waiting = waiting & ~(tested & stands)
        alive = alive & ~waiting
        path.append(torch.where(alive, node, 0))
        if not bool(alive.any()):
            path += [torch.zeros_like(node)] * (proposal.shape.depth - len(path))
            break
        left = tree.left_at(node, row_of(children, node)[..., 0]).where(alive, left)
    token = draw_left(left.target, tree.target.at(node).double(), dice)
    return as_verdict(path, token)


def children_of(parents: Tensor) -> Tensor:
    """parents [..., M] -> the children [..., M+1, W] of each node in order, 0 where no more."""
    nodes = parents.shape[-1]
    same = parents[..., :, None] == parents[..., None, :]
    rank = same.tril(-1).sum(-1)  # [..., M]: siblings before it
    width = int(rank.max()) + 1
    table = parents.new_zeros(*parents.shape[:-1], (nodes + 1) * width)
    numbers = torch.arange(1, nodes + 1, device=parents.device).expand_as(parents)
    return table.scatter_(-1, parents * width + rank, numbers).unflatten(-1, (nodes + 1, width))


def as_verdict(path: list[Tensor], token: Tensor) -> Verdict:
    nodes = torch.stack(path, -1)  # [..., depth]
    return Verdict((nodes > 0).sum(-1), token, nodes)
