"""The accept rules, and those for chains: pure functions on tensors, no model.

A round proposes a chain of N tokens; the verifier's distributions after the root and after each of
them are rows 0..N of ``target``. Every rule returns how many proposals stand and the verifier's own
next token, distributed exactly as the verifier alone would emit them, the LOSSY rule of
eval/typical.py apart. Leading dimensions [...] are independent sequences. Sources: Leviathan et al.
(2211.17192, algorithm 1) for ``rejection``; a proposal without a distribution is one that has
probability 1. Trees are in eval/tree_verify.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from models.sampling import Dice, draw_at, likeliest


class AcceptRule(Enum):
    greedy = "greedy"  # the verifier's argmax or nothing; chains and trees
    argmax_draft = "argmax_draft"  # the draft's argmax, accepted with its target probability
    rejection = "rejection"  # a draw of the draft, accepted with min(1, target/draft)
    tree_one_hot = "tree_one_hot"  # the draft's top ranks, in turn, each as argmax_draft
    tree_without_replacement = "tree_without_replacement"  # distinct draws, in turn, as rejection
    # Whatever the verifier finds likely enough; chains and trees. Whoever names it says what it is.
    typical = "typical (LOSSY)"


LOSSY = frozenset({AcceptRule.typical})  # the others emit what the verifier alone would


@dataclass(frozen=True)
class Verdict:
    accepted: Tensor  # [...] int64: guesses that stand, one a level
    token: Tensor  # [...] int64: what the verifier emits after them
    path: Tensor  # [..., depth] int64: nodes 1..M that stand, in order; 0 from ``accepted`` on


def accept_greedy(target: Tensor, ids: Tensor, counts: Tensor | None = None) -> Verdict:
    """Proposals ``ids`` [..., N] stand while each is the argmax of its row of [..., N+1, V].

    Logits do as well as probabilities. No more than ``counts`` [...] of a sequence stand.
    """
    best = likeliest(target)  # [..., N+1]
    accepted = leading(best[..., :-1] == ids, counts)
    return on_chain(accepted, best.gather(-1, accepted[..., None]).squeeze(-1), ids)


def accept_certain(
    target: Tensor, ids: Tensor, dice: Dice, counts: Tensor | None = None
) -> Verdict:
    """Proposals that had probability 1 (a draft's argmax, an n-gram's guess).

    min(1, target/1) is the token's own target probability; the residual is the target without it.
    """
    accepted = leading(dice.roll(ids.shape[-1]) < of_ids(target, ids), counts)
    ruled_out = target.new_zeros(*ids.shape, target.shape[-1])  # [..., N, V]
    ruled_out.scatter_(-1, ids[..., None], 1.0)
    return on_chain(accepted, draw_after(target, ruled_out, accepted, dice, counts), ids)


def accept_drawn(
    target: Tensor, draft: Tensor, ids: Tensor, dice: Dice, counts: Tensor | None = None
) -> Verdict:
    """Proposals drawn from ``draft`` [..., N, V]: u < target/draft, written without a division."""
    rolls = dice.roll(ids.shape[-1])
    accepted = leading(rolls * of_ids(draft, ids) < of_ids(target, ids), counts)
    return on_chain(accepted, draw_after(target, draft, accepted, dice, counts), ids)


def leading(stands: Tensor, counts: Tensor | None = None) -> Tensor:
    """[..., N] bool -> [...] how many are true before the first that is not, ``counts`` at most."""
    if counts is not None:
        stands = stands & (torch.arange(stands.shape[-1], device=stands.device) < counts[..., None])
    return stands.long().cumprod(-1).sum(-1)


def on_chain(accepted: Tensor, token: Tensor, ids: Tensor) -> Verdict:
    """In a chain the nodes that stand are 1, 2, ... up to ``accepted``."""
    nodes = torch.arange(1, ids.shape[-1] + 1, device=ids.device)
    return Verdict(accepted, token, torch.where(nodes <= accepted[..., None], nodes, 0))


def of_ids(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The probability [..., N] fp64 of each proposal in its row."""
    rows = probabilities[..., : ids.shape[-1], :]
    return rows.gather(-1, ids[..., None]).squeeze(-1).double()


def draw_after(
    target: Tensor, draft: Tensor, accepted: Tensor, dice: Dice, counts: Tensor | None = None
) -> Tensor:
    """Draw the token after ``accepted`` proposals from (target - draft)+ of that row, [...].

    Where no proposal was rejected, after the last or after ``counts``, nothing is ruled out: a row
    of zeros makes the bonus token the same case. A residual of 0 means target = draft; no rejection
    happens there but by rounding, and the draw is from the target itself.
    """
    wanted = row_of(target, accepted).double()  # [..., V]
    taken = row_of(F.pad(draft, (0, 0, 0, 1)), accepted).double()
    if counts is not None:
        taken = taken * (accepted < counts)[..., None]
    residual = (wanted - taken).clamp_min_(0)
    return draw_left(residual, wanted, dice)


def row_of(rows: Tensor, index: Tensor) -> Tensor:
    """[..., R, V] and [...] -> row ``index`` of each sequence, [..., V]."""
    where = index[..., None, None].expand(*index.shape, 1, rows.shape[-1])
    return rows.gather(-2, where).squeeze(-2)


@dataclass(frozen=True)
class Rows:
    """Distributions [..., R, V], made of ``values`` [..., R, n] when they are asked for.

    A walk over a tree visits few of its rows, and each costs several passes over the vocabulary.
    """

    values: Tensor  # logits
    make: Callable[[Tensor], Tensor]  # [..., n] -> [..., V]; a row does not depend on the others

    def every(self) -> Tensor:
        return self.make(self.values)

    def at(self, index: Tensor) -> Tensor:
        """Row ``index`` [...] of each sequence: [..., V]."""
        return self.make(row_of(self.values, index))


def given(distributions: Tensor) -> Rows:
    """Those that are there already."""
    return Rows(distributions, lambda rows: rows)


def draw_left(residual: Tensor, wanted: Tensor, dice: Dice) -> Tensor:
    """Draw [...] from ``residual`` [..., V], of any sum, or from ``wanted`` where it is 0."""
    empty = residual.sum(-1, keepdim=True) == 0
    return draw_at(torch.where(empty, wanted, residual), dice.roll())


def scatter_to_target(draft: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Probabilities on the draft vocabulary [..., Vd] -> on target ids [..., V].

    ``target_ids`` [Vd] names the verifier's token of each draft token; all others get 0. Ratios are
    only meaningful after this.
    """
    spread = draft.new_zeros(*draft.shape[:-1], vocab_size)
    return spread.index_copy_(-1, target_ids, draft)


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Sum of min(target, draft) over the vocabulary: [..., V] twice -> [...].

    The chance that a draw of the draft is accepted = 1 - total variation (Leviathan, theorem 3.5).
    """
    return torch.minimum(target, draft).sum(-1)
