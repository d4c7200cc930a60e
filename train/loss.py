"""The distillation loss: how far the draft's guess is from the verifier's distribution."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from conf.schema import LossKind
from data.records import TTTBatch
from models.eagle3 import Eagle3Draft
from models.verifier import scaled_logits


@dataclass(frozen=True)
class Teacher:
    """The verifier's word on R positions, restricted to the draft vocabulary."""

    log_probs: Tensor  # [R, Vd] fp32, renormalised over the draft vocabulary
    mass: Tensor  # [R, Vd] fp32, probabilities over the full vocabulary: rows sum to 1 or less
    argmax: Tensor  # [R] int64, the verifier's own token, any id of the full vocabulary


@dataclass(frozen=True)
class StepLoss:
    losses: Tensor  # [R] fp32, one a supervised row
    hits: Tensor  # [R] bool
    samples: Tensor  # [R] int64, which sample of the batch a row belongs to


class Distillation:
    """Holds the verifier's head rows of the draft vocabulary; frozen, outside the optimizer."""

    def __init__(self, kind: LossKind, head: Tensor, config: PreTrainedConfig):
        self.kind = kind
        self.head = head  # [Vd, D]
        self.config = config

    def __call__(
        self, draft: Eagle3Draft, batch: TTTBatch, steps: list[Tensor], rows: Tensor
    ) -> list[StepLoss]:
        """steps K x [B, R, D], rows [K, B, R] of the sample's last R rows -> one StepLoss a step.

        The target of row t at step k is position t+1+k. Every position that a later step predicts
        is one that step 0 predicts too, so the teacher is computed once, for step 0's targets.
        """
        first = batch.input_ids.shape[1] - rows.shape[-1]
        samples, places = rows[0].nonzero(as_tuple=True)
        teacher = self.teacher(batch, samples, first + places + 1)
        index = torch.zeros_like(batch.input_ids)
        index[samples, first + places + 1] = torch.arange(len(samples), device=index.device)
        parts = []
        for k, normed in enumerate(steps):
            samples, places = rows[k].nonzero(as_tuple=True)
            logits = draft.logits(normed[samples, places]).to(teacher.log_probs.dtype)  # [R, Vd]
            chosen = index[samples, first + places + 1 + k]
            guess = draft.to_target_ids(logits.argmax(-1))
            hits = guess == teacher.argmax[chosen]
            losses = row_losses(self.kind, logits, teacher, chosen, draft.t2d)
            parts.append(StepLoss(losses, hits, samples))
        return parts

    @torch.no_grad()
    def teacher(self, batch: TTTBatch, samples: Tensor, places: Tensor) -> Teacher:
        last = batch.last[samples, places].to(self.head.dtype)  # [R, D]
        logits = scaled_logits(F.linear(last, self.head), self.config)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lse = batch.lse[samples, places].to(logits.dtype)
        return Teacher(
            log_probs=logits.log_softmax(-1),
            mass=(logits - lse[:, None]).exp(),
            argmax=batch.argmax[samples, places],
        )


def row_losses(
    kind: LossKind, logits: Tensor, teacher: Teacher, chosen: Tensor, member: Tensor
) -> Tensor:
    """logits [R, Vd] of the draft against teacher rows ``chosen`` [R] -> [R] losses.

    kl: KL(target || draft) over the draft vocabulary. ce: the verifier's argmax; no loss where it
    is outside the vocabulary (``member`` [V] bool). tv: 1 - sum min(target, draft); lk: -log of
    that sum; both with the target's mass over the full vocabulary.
    """
    log_draft = logits.log_softmax(-1)
    match kind:
        case LossKind.kl:
            log_target = teacher.log_probs[chosen]
            return (log_target.exp() * (log_target - log_draft)).sum(-1)
        case LossKind.ce:
            target = teacher.argmax[chosen]
            draft_id = member.long().cumsum(0)[target] - 1  # rank among the members
            inside = member[target]
            picked = log_draft.gather(-1, draft_id.clamp_min(0)[:, None]).squeeze(-1)
            return torch.where(inside, -picked, torch.zeros_like(picked))
        case LossKind.tv:
            return 1 - torch.minimum(teacher.mass[chosen], log_draft.exp()).sum(-1)
        case LossKind.lk:
            overlap = torch.minimum(teacher.mass[chosen], log_draft.exp()).sum(-1)
            return -overlap.clamp_min(torch.finfo(overlap.dtype).tiny).log()
