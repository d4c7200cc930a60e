"""A chunk's guesses graded: each kind of loss and its gradient, from what teacher and draft say."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from conf.schema import LossKind

NONE = torch.empty(0)  # a field that the kind of loss at hand does not read


@dataclass(frozen=True)
class Teacher:
    """The verifier's word on M targets, restricted to the draft vocabulary."""

    ids: Tensor  # [M] the verifier's argmax, any id of the full vocabulary
    probs: Tensor = NONE  # [M, Vd] kl, mix: renormalised over the draft vocabulary; tv, lk: not
    negentropy: Tensor = NONE  # [M] kl, mix: sum of probs * log probs
    mass: Tensor = NONE  # [M] mix: what the draft vocabulary holds of the whole distribution
    draft_ids: Tensor = NONE  # [M] ce: the argmax as a draft id, where it has one
    inside: Tensor = NONE  # [M] bool, ce: it has

    def repeated(self, rows: Tensor) -> "Teacher":
        """One row a guess in place of one a target: rows [P] -> P of them."""
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        return Teacher(**{k: v if v is NONE else v[rows] for k, v in known.items()})


@dataclass(frozen=True)
class Looked:
    """What the draft says in one chunk: M targets with m guesses each."""

    logits: Tensor  # [M, m, Vd]
    probs: Tensor  # [M, m, Vd]
    best: Tensor  # [M, m] argmax
    shares: Tensor = NONE  # [M, m] mix: the weight of KL


@dataclass(frozen=True)
class Graded:
    losses: Tensor  # [M, m]
    of_logits: Tensor  # [M, m, Vd] gradient of each loss by its logits


def grade(kind: LossKind, found: Looked, teacher: Teacher) -> Graded:
    """m guesses a target against M teacher rows; ``found`` is used up.

    kl: KL(target || draft) over the draft vocabulary. ce: the verifier's argmax; no loss where it
    is outside the vocabulary. tv: 1 - sum min(target, draft); lk: -log of that sum; both with the
    target's mass over the full vocabulary. mix: share * kl + (1 - share) * tv, each with its own
    target (LK losses, 2602.23881: lk is theirs of alpha, mix theirs of lambda).
    """
    logits, probs, best = found.logits, found.probs, found.best[..., None]
    lse = (logits.gather(-1, best) - probs.gather(-1, best).log()).squeeze(-1)
    if kind is LossKind.ce:
        label = teacher.draft_ids[:, None, None].expand_as(best)
        inside = teacher.inside[:, None]
        losses = (lse - logits.gather(-1, label).squeeze(-1)) * inside
        probs.scatter_add_(-1, label, torch.full_like(lse[..., None], -1.0))
        return Graded(losses, probs.mul_(inside[..., None]))
    wanted = teacher.probs[:, None]
    if kind in (LossKind.tv, LossKind.lk):
        overlap, of_miss = overlapping(probs, wanted)
        if kind is LossKind.tv:
            return Graded(1 - overlap, of_miss)
        overlap = overlap.clamp_min(torch.finfo(overlap.dtype).tiny)
        return Graded(-overlap.log(), of_miss.div_(overlap[..., None]))
    losses = teacher.negentropy[:, None] - logits.mul_(wanted).sum(-1) + lse
    if kind is LossKind.kl:
        return Graded(losses, probs.sub_(wanted))
    of_kl = logits.copy_(probs).sub_(wanted)
    overlap, of_miss = overlapping(probs, wanted * teacher.mass[:, None, None])
    shares = found.shares
    return Graded((1 - overlap).lerp(losses, shares), of_miss.lerp_(of_kl, shares[..., None]))


def overlapping(probs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """-> sum min(wanted, probs), and the gradient of 1 minus it; ``probs`` is used up."""
    overlap = torch.minimum(wanted, probs).sum(-1)
    short = (probs < wanted).to(probs.dtype)  # tokens whose overlap the draft can still raise
    return overlap, probs.mul_(torch.linalg.vecdot(probs, short)[..., None] - short)
