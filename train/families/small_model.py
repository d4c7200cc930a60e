"""The training step of the small model: plain distillation of one token ahead.

Row t of the house guesses x[t+2] from x[0..t+1]. The small model reads tokens alone, so it guesses
there at the packed row of x[t+1]:

    |            | EAGLE-3, step 0            | small model              |
    |------------|----------------------------|--------------------------|
    | reads      | fuse(aux[t]) and x[t+1]    | x[t+1] at packed row t+1 |
    | keys seen  | rows 0..t of the document  | rows 0..t+1              |
    | position   | t                          | t+1                      |
    | target     | softmax(logits(last[t+1])) | the same, i.e. of x[t+2] |

Deeper steps would add nothing: fed with the data's tokens, step k at row t is step 0 at row t+k. So
ttt.depth is 1, and what that trains is what any number of chained guesses needs. An answer's first
token stays out, as in the other families: at serving the verifier gives it.
Shapes: T packed rows, R rows that are supervised.
"""

import torch
from torch import Tensor, nn

from data.records import TTTBatch
from models.marks import part
from models.small_model import SmallModel
from train.loss import Distillation, grade
from train.ttt import TTTOutput


class SmallModelTest(nn.Module):
    """What DeepSpeed wraps: the model, whose forward is one pass over the pack, and the loss."""

    def __init__(self, draft: SmallModel, distillation: Distillation):
        super().__init__()
        self.draft = draft
        self.distillation = distillation

    def compile_parts(self) -> None:
        """torch.compile the loss; what is inside the model is the library's."""
        self.distillation.grade = torch.compile(grade, dynamic=True)

    def forward(self, batch: TTTBatch, row_weights: Tensor) -> TTTOutput:
        """row_weights [B]: what one row of each document adds to the loss."""
        chains = batch.chains
        assert len(chains.steps) == 1, "ttt.depth is 1: see conf/family_rules.py"
        states = states_at(self.draft, batch, chains.steps[0].rows)
        with part("loss"):
            weights = row_weights[chains.documents]
            guesses = self.distillation(self.draft, batch, [states], weights)
        figures = (guesses.losses, torch.ones_like(guesses.losses), guesses.hits)
        return TTTOutput(guesses.loss, *(figure.sum()[None] for figure in figures))


def states_at(draft: SmallModel, batch: TTTBatch, rows: Tensor) -> Tensor:
    """What the head reads after x[t+1], for house rows t [R] -> [R, width].

    The whole pack runs: a row gives keys to those behind it. Its mask costs T^2 bytes.
    """
    with part("keys"):
        mask = draft.pack_mask(batch.positions)
        states = draft(batch.input_ids[None], batch.positions[None], mask)[0]
    # A pack without chains runs row 0 in their place, and may have no other row.
    return states.index_select(0, (rows + 1).clamp_max(len(states) - 1))
