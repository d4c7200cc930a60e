"""Medusa's training: every head on the verifier's own states, nothing unrolled.

Index table of one sample, row t: head k reads last[t] and guesses x[t+2+k]; its target is the
verifier's distribution at last[t+1+k], as for any other draft (2401.10774, section 3.2). With
loss.kind=ce and ttt.decay=0.8 this is the paper's Medusa-1 on the verifier's own choices.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.schema import TTTSection
from data.chains import Chains
from data.records import TTTBatch
from models.marks import part
from models.medusa import MedusaDraft
from train.loss import Distillation, grade
from train.ttt import TTTOutput


@dataclass(frozen=True)
class HeadOfStep:
    """Head ``k`` as the loss takes a draft."""

    draft: MedusaDraft
    k: int

    @property
    def lm_head(self) -> nn.Linear:
        return self.draft.rows(self.k)

    @property
    def t2d(self) -> Tensor:
        return self.draft.t2d

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft.to_target_ids(draft_ids)

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        return self.draft.to_draft_ids(target_ids)


def step_alone(chains: Chains, k: int) -> Chains:
    """The supervised guesses of step ``k`` as chains of their own, in the order of their rows.

    Heads share no rows, so a chunk of the loss is one head's; each makes its targets' teacher anew,
    which the cross-entropy does not need at all.
    """
    step, count = chains.steps[k], chains.counts[k]
    places = torch.arange(count, device=step.slots.device)
    rows = step.rows if step.emits is None else step.rows[step.emits]
    return replace(
        chains,
        steps=[replace(step, rows=rows, emits=None, slots=places)],
        targets=chains.targets[chains.targets_of[step.slots]],
        targets_of=places,
        depths=torch.zeros_like(places),
        documents=chains.documents[step.slots],
        ends=list(range(count + 1)),
        counts=[count],
    )


class MedusaTraining(nn.Module):
    """What DeepSpeed wraps: the heads, whose forward is their guesses and the loss in one call."""

    def __init__(self, draft: MedusaDraft, distillation: Distillation, ttt: TTTSection):
        super().__init__()
        self.draft = draft
        self.distillation = distillation
        self.ttt = ttt

    def compile_parts(self) -> None:
        """torch.compile what is elementwise; rows vary without a limit."""
        self.distillation.grade = torch.compile(grade, dynamic=True)

    def forward(self, batch: TTTBatch, row_weights: Tensor) -> TTTOutput:
        """row_weights [B]: what one row of each document adds to the loss.

        A head without a supervised row runs on none, so that every weight gets a gradient.
        """
        losses: list[Tensor] = []
        figures: list[Tensor] = []
        for k in range(self.ttt.depth):
            chains = step_alone(batch.chains, k)
            rows = chains.steps[0].rows
            # Rows that are supervised ask: x[t+1] lies in the answer, so their state is kept.
            asking = rows if batch.asking is None else batch.asking[rows]
            with part("mlp"):
                read = self.draft.read(batch.last[asking], k)
            weights = row_weights[chains.documents] * self.ttt.decay**k
            with part("loss"):
                head, alone = HeadOfStep(self.draft, k), replace(batch, chains=chains)
                guesses = self.distillation(head, alone, [read], weights)
            losses.append(guesses.loss)
            made = torch.full_like(guesses.losses.sum(), chains.counts[0])
            figures.append(torch.stack((guesses.losses.sum(), made, guesses.hits.sum().to(made))))
        return TTTOutput(torch.stack(losses).sum(), *torch.stack(figures, -1))
