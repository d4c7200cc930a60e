"""The accept rules of speculative decoding alone: pure functions on tensors, no model.

A round proposes N tokens; the verifier's distributions after the root and after each of them are
rows 0..N of ``target``. Every rule returns how many proposals stand and the verifier's own next
token, distributed exactly as the verifier alone would emit them. Leading dimensions [...] are
independent sequences. Sources: Leviathan et al. (2211.17192, algorithm 1) for ``rejection``; a
proposal without a distribution is one that has probability 1.
"""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from models.sampling import draw


class AcceptRule(Enum):
    greedy = "greedy"  # the verifier's argmax or nothing
    argmax_draft = "argmax_draft"  # the draft's argmax, accepted with its target probability
    rejection = "rejection"  # a draw of the draft, accepted with min(1, target/draft)


@dataclass(frozen=True)
class Verdict:
    accepted: Tensor  # [...] int64, 0..N: leading proposals that stand
    token: Tensor  # [...] int64: what the verifier emits after them


def verify(
    rule: AcceptRule, target: Tensor, draft: Tensor | None, ids: Tensor, generator: torch.Generator
) -> Verdict:
    """Judge proposals ``ids`` [..., N] by ``rule``.

    ``target`` [..., N+1, V] are probabilities (logits do for ``greedy``); ``draft`` [..., N, V] are
    the probabilities the proposals were drawn from, on target ids, and only ``rejection`` reads
    them. Raises ValueError when it gets none.
    """
    if rule is AcceptRule.greedy:
        return accept_greedy(target, ids)
    if rule is AcceptRule.argmax_draft:
        return accept_certain(target, ids, generator)
    if draft is None:
        raise ValueError(
            "rule=rejection: needs the draft's probabilities; draw proposals from the draft, or "
            "take rule=argmax_draft for proposals without a distribution"
        )
    return accept_drawn(target, draft, ids, generator)


def accept_greedy(target: Tensor, ids: Tensor) -> Verdict:
    """Proposals stand while each is the argmax of its row of ``target`` [..., N+1, V]."""
    best = target.argmax(-1)  # [..., N+1]
    accepted = leading(best[..., :-1] == ids)
    return Verdict(accepted, best.gather(-1, accepted[..., None]).squeeze(-1))


def accept_certain(target: Tensor, ids: Tensor, generator: torch.Generator) -> Verdict:
    """Proposals that had probability 1 (a draft's argmax, an n-gram's guess).

    min(1, target/1) is the token's own target probability; the residual is the target without it.
    """
    accepted = leading(uniform_like(ids, generator) < of_ids(target, ids))
    ruled_out = target.new_zeros(*ids.shape, target.shape[-1])  # [..., N, V]
    ruled_out.scatter_(-1, ids[..., None], 1.0)
    return Verdict(accepted, draw_after(target, ruled_out, accepted, generator))


def accept_drawn(target: Tensor, draft: Tensor, ids: Tensor, generator: torch.Generator) -> Verdict:
    """Proposals drawn from ``draft`` [..., N, V]: u < target/draft, written without a division."""
    draft_of_id = of_ids(draft, ids)
    accepted = leading(uniform_like(ids, generator) * draft_of_id < of_ids(target, ids))
    return Verdict(accepted, draw_after(target, draft, accepted, generator))


def leading(stands: Tensor) -> Tensor:
    """[..., N] bool -> [...] how many are true before the first that is not."""
    return stands.long().cumprod(-1).sum(-1)


def of_ids(probabilities: Tensor, ids: Tensor) -> Tensor:
    """The probability [..., N] fp64 of each proposal in its row."""
    rows = probabilities[..., : ids.shape[-1], :]
    return rows.gather(-1, ids[..., None]).squeeze(-1).double()


def uniform_like(ids: Tensor, generator: torch.Generator) -> Tensor:
    """fp64 in [0, 1): 53 random bits, so that rare tokens are accepted as rarely as they should."""
    uniform = torch.rand(
        ids.shape, dtype=torch.float64, device=generator.device, generator=generator
    )
    return uniform.to(ids.device)


def draw_after(
    target: Tensor, draft: Tensor, accepted: Tensor, generator: torch.Generator
) -> Tensor:
    """Draw the token after ``accepted`` proposals from (target - draft)+ of that row, [...].

    After the last proposal nothing is ruled out: a row of zeros makes the bonus token the same
    case. A residual of 0 means target = draft; no rejection happens there but by rounding, and the
    draw is from the target itself.
    """
    row = accepted[..., None, None].expand(*accepted.shape, 1, target.shape[-1])
    wanted = target.gather(-2, row).squeeze(-2).double()  # [..., V]
    taken = F.pad(draft, (0, 0, 0, 1)).gather(-2, row).squeeze(-2).double()
    residual = (wanted - taken).clamp_min_(0)
    empty = residual.sum(-1, keepdim=True) == 0
    return draw(torch.where(empty, wanted, residual), generator)


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
