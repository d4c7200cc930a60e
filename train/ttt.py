"""The training-time test: the draft unrolled on its own states. The algorithm lives here.

One sample, row t (EAGLE-3, section 3.1; DESIGN of this house, index table):

    |            | step 0                       | step k                                       |
    |------------|------------------------------|----------------------------------------------|
    | hidden in  | fuse(aux[t])                 | the draft's own output of step k-1 at row t  |
    | token in   | x[t+1]                       | x[t+1+k], from the data                      |
    | target     | softmax(logits(last[t+1]))   | softmax(logits(last[t+1+k])), i.e. of x[t+2+k] |
    | keys seen  | step-0 keys 0..t             | the same, plus one key at row t a later step |
    | position   | t                            | t+k                                          |

Gradients run through all steps. Shapes: B batch, T tokens, K steps, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.schema import Supervise, TTTSection
from data.records import TTTBatch
from models.attention import TTTMemory
from models.eagle3 import Eagle3Draft
from train.loss import Distillation


@dataclass(frozen=True)
class TTTOutput:
    """``loss`` is a share of the whole window's; the rest are sums over this batch, by step."""

    loss: Tensor  # []
    sums: Tensor  # [K] summed row losses, unweighted
    counts: Tensor  # [K] supervised rows
    hits: Tensor  # [K] rows where the draft's argmax is the verifier's, over the full vocabulary


def unroll(draft: Eagle3Draft, batch: TTTBatch, depth: int, first: int = 0) -> list[Tensor]:
    """Run K steps fed with the data's tokens -> K times [B, T - first, D], what the head reads.

    Rows before ``first`` carry no loss at any step. With one layer all that others need of them
    are their step-0 keys, so nothing else is computed; the rest stays exactly the same.
    """
    hidden = draft.fuse(batch.aux)
    memory = TTTMemory()
    tokens, positions = shifted(batch.input_ids, 1), positions_of(batch.input_ids)
    if first:
        draft.remember(tokens[:, :first], hidden[:, :first], positions[:, :first], memory)
        hidden, positions = hidden[:, first:], positions[:, first:]
    steps = []
    for k in range(depth):
        tokens = shifted(batch.input_ids, 1 + k)[:, first:]
        output = draft(tokens, hidden, positions + k, memory)
        hidden = output.hidden
        steps.append(output.normed)
    return steps


def unroll_own(draft: Eagle3Draft, batch: TTTBatch, depth: int) -> Tensor:
    """Run K steps fed with the draft's own argmax, as in serving -> [K, B, T] proposed target ids.

    Entry [k, b, t] is the guess of x[t+2+k] after the verified prefix x[0..t+1].
    """
    hidden = draft.fuse(batch.aux)
    memory = TTTMemory()
    positions = positions_of(batch.input_ids)
    tokens = shifted(batch.input_ids, 1)
    proposed = []
    for k in range(depth):
        output = draft(tokens, hidden, positions + k, memory)
        hidden = output.hidden
        tokens = draft.to_target_ids(draft.logits(output.normed).argmax(-1))
        proposed.append(tokens)
    return torch.stack(proposed)


def positions_of(input_ids: Tensor) -> Tensor:
    """[B, T] -> [B, T]: 0, 1, 2, ... in every row of the batch."""
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def shifted(values: Tensor, by: int) -> Tensor:
    """values [B, T] -> [B, T] with entry t holding values[t + by], and zero beyond the end."""
    moved = torch.zeros_like(values)
    if by < values.shape[1]:
        moved[:, :-by] = values[:, by:]
    return moved


def supervised_rows(loss_mask: Tensor, depth: int, rule: Supervise) -> Tensor:
    """Which rows carry loss at which step: loss_mask [B, T] bool -> [K, B, T] bool.

    Labels of an answer [a, b) are x[a+1..b-1]: at serving the verifier gives x[a]. ``span``: rows
    a-1 <= t <= b-3-k, so that x[t+1..t+2+k] lie in one answer. ``any``: every row whose x[t+2+k]
    is a label.
    """
    starts = loss_mask & ~torch.cat([torch.zeros_like(loss_mask[:, :1]), loss_mask[:, :-1]], 1)
    span = starts.cumsum(1) * loss_mask  # [B, T] number of the answer a token is in, 0 outside
    label = (loss_mask & ~starts).long()
    rows = []
    for k in range(depth):
        if rule is Supervise.span:
            first, end = shifted(span, 1), shifted(span, 2 + k)
            rows.append((end > 0) & (first == end))
        else:
            rows.append(shifted(label, 2 + k) > 0)
    return torch.stack(rows)


def first_needed(rows: Tensor) -> int:
    """rows [K, B, T] -> the first row that any sample needs at any step; 0 when none does."""
    needed = rows.any(0).any(0).nonzero()
    return int(needed[0]) if len(needed) else 0


class TrainingTimeTest(nn.Module):
    """What DeepSpeed wraps: the draft, whose forward is unroll + loss in one call."""

    def __init__(self, draft: Eagle3Draft, distillation: Distillation, ttt: TTTSection):
        super().__init__()
        self.draft = draft
        self.distillation = distillation
        self.ttt = ttt

    def forward(self, batch: TTTBatch, row_weights: Tensor | None, own: int = 0):
        """row_weights [B]: what one row of each sample adds to the loss -> TTTOutput.

        With ``own`` > 0 nothing is trained: the draft feeds itself that many steps and its
        proposals [own, B, T] come back, for the held-out acceptance.
        """
        if own:
            return unroll_own(self.draft, batch, own)
        assert row_weights is not None
        rows = supervised_rows(batch.loss_mask, self.ttt.depth, self.ttt.supervise)
        first = first_needed(rows)
        steps = unroll(self.draft, batch, self.ttt.depth, first)
        parts = self.distillation(self.draft, batch, steps, rows[..., first:])
        loss = sum((step.sum() * 0.0 for step in steps), self.draft.lm_head.weight.sum() * 0.0)
        for k, part in enumerate(parts):
            weighted = (part.losses * row_weights[part.samples]).sum()
            loss = loss + self.ttt.decay**k * weighted
        return TTTOutput(
            loss=loss,
            sums=torch.stack([part.losses.detach().sum() for part in parts]),
            counts=rows.sum((1, 2)),
            hits=torch.stack([part.hits.sum() for part in parts]),
        )
