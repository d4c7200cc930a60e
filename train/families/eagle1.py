"""EAGLE-1's training: the guessed state is pulled to the verifier's own, and its logits after it.

Li et al. 2401.15077, section 4.1, with the constants of the authors' code. One sample, row t; the
state f[t] is the verifier's final one, last[t]:

    | reads     | f[0..t] with noise, x[1..t+1]                                          |
    | guesses   | f[t+1], whose logits are those of x[t+2]                               |
    | loss      | SmoothL1(guess, f[t+1]) + 0.1 * CE(softmax(head f[t+1]), head guess)   |
    | keys seen | 0..t of the document                                                   |
    | position  | t                                                                      |

The rows that carry loss are those of step 0 of data/chains.py; the others give keys and nothing
else. There is no second step: the head never reads its own guess in training. Against that drift
the paper adds noise to the states it reads, drawn anew at every step from TTTBatch.draw, which
follows from seed, step and pack alone: a run that resumes draws what it would have drawn.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from data.chains import shifted
from data.records import TTTBatch
from models.attention import Kernel
from models.eagle1 import Eagle1Draft
from models.marks import part
from models.memory import TTTMemory
from train.loss import CHUNK_LOGITS, product
from train.ttt import TTTOutput

LOGITS_SHARE = 0.1  # of the loss of the logits
NOISE = 0.1  # on each side of 0, of a state in a document of NOISE_LENGTH tokens
NOISE_LENGTH = 512  # shorter ones get more, longer ones less


class FeatureRegression(nn.Module):
    """What DeepSpeed wraps: the draft, whose forward is one step + loss in one call."""

    def __init__(self, draft: Eagle1Draft, kernel: Kernel):
        super().__init__()
        self.draft = draft
        self.kernel = kernel

    def forward(self, batch: TTTBatch, row_weights: Tensor) -> TTTOutput:
        """row_weights [B]: what one row of each document adds to the loss. K is 1."""
        chains, step = batch.chains, batch.chains.steps[0]
        with part("keys"):
            states = self.draft.fuse(batch.aux)  # [T, D]
            if self.training:
                states = states + noise_of(batch, states)
            share = self.draft.share_of(shifted(batch.input_ids, 1))
            memory = TTTMemory(self.kernel)
            self.draft.remember(share, states, batch.positions, [memory])
        memory = memory.following(step.runs, None)
        rows = share[step.rows], states[step.rows]
        guesses = self.draft(*rows, step.positions, [memory], known=True).hidden  # [R, D]
        with part("loss"):
            # In the order of Chains.targets_of; with one step a target has one guess.
            emitted = guesses if step.emits is None else guesses[step.emits]
            ordered = torch.empty_like(emitted).index_copy(0, step.slots, emitted)
            asked = Asked.of(batch, self.draft, row_weights[chains.documents])
            loss, losses, hits = _Graded.apply(asked, ordered)
        ones = torch.ones_like(losses)
        return TTTOutput(loss, losses.sum()[None], ones.sum()[None], hits.to(ones).sum()[None])


def noise_of(batch: TTTBatch, states: Tensor) -> Tensor:
    """[T, D] uniform, from -NOISE to NOISE where the document has NOISE_LENGTH tokens."""
    firsts = (batch.positions == 0).nonzero().flatten()
    ends = torch.cat([firsts[1:], firsts.new_tensor([len(batch.positions)])])
    lengths = (ends - firsts)[(batch.positions == 0).cumsum(0) - 1]  # [T]
    generator = torch.Generator(states.device).manual_seed(batch.draw)
    drawn = torch.rand(states.shape, generator=generator, device=states.device)
    widths = 2 * NOISE * NOISE_LENGTH / lengths
    return ((drawn - 0.5) * widths[:, None]).to(states.dtype)


@dataclass(frozen=True)
class Asked:
    """What the fused function reads beside the guesses: nothing here gets a gradient."""

    last: Tensor  # [P, D] the verifier's own states at the places of the guesses
    best: Tensor  # [P] the verifier's argmax there
    head: Tensor  # [V, D]
    weights: Tensor  # [P]

    @classmethod
    def of(cls, batch: TTTBatch, draft: Eagle1Draft, weights: Tensor) -> "Asked":
        targets = batch.chains.targets[batch.chains.targets_of]
        places = targets if batch.asking is None else batch.asking[targets]
        head = draft.lm_head.weight.detach()
        return cls(batch.last[places], batch.argmax[places], head, weights)


class _Graded(torch.autograd.Function):
    """Chunk by chunk, with the gradients in the same pass: no rows x vocabulary is kept."""

    @staticmethod
    def forward(ctx, asked: Asked, guesses: Tensor):
        losses, hits = (
            guesses.new_empty(len(guesses)),
            torch.empty_like(asked.best, dtype=torch.bool),
        )
        of_guesses = torch.empty_like(guesses)
        size = max(1, CHUNK_LOGITS[guesses.device.type] // len(asked.head))
        for first in range(0, len(guesses), size):
            rows = slice(first, first + size)
            guess, wanted = guesses[rows], asked.last[rows].to(guesses.dtype)
            teacher = product(asked.last[rows].to(asked.head.dtype), asked.head.T).softmax(-1)
            logits = product(guess.to(asked.head.dtype), asked.head.T)
            hits[rows] = logits.argmax(-1) == asked.best[rows]
            known = logits.log_softmax(-1)
            entropy = -torch.linalg.vecdot(teacher, known)
            distance = F.smooth_l1_loss(guess, wanted, reduction="none").mean(-1)
            losses[rows] = distance + LOGITS_SHARE * entropy
            of_logits = known.exp_().sub_(teacher).to(asked.head.dtype)
            pull = (guess - wanted).clamp_(-1, 1) / guess.shape[1]
            grad = pull.add_(product(of_logits, asked.head), alpha=LOGITS_SHARE)
            of_guesses[rows] = grad * asked.weights[rows, None]
        ctx.save_for_backward(of_guesses)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * asked.weights).sum(), losses, hits

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        return None, ctx.saved_tensors[0] * grad
