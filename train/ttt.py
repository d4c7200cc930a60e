"""The training-time test: the draft unrolled on its own states. The algorithm lives here.

One sample, row t (EAGLE-3, section 3.1; DESIGN of this house, index table):

    |            | step 0                       | step k                                       |
    |------------|------------------------------|----------------------------------------------|
    | hidden in  | fuse(aux[t])                 | the draft's own output of step k-1 at row t  |
    | token in   | x[t+1]                       | x[t+1+k], from the data                      |
    | target     | softmax(logits(last[t+1]))   | softmax(logits(last[t+1+k])), i.e. of x[t+2+k] |
    | keys seen  | step-0 keys 0..t             | the same, plus one key at row t a later step |
    | position   | t                            | t+k                                          |

Gradients run through all steps. Rows that never carry loss give step-0 keys and nothing else, and
a chain stops after its last supervised step (data/chains.py), so the cost follows the supervised
rows and the result does not change. With further decoder layers the table holds in each of them,
with keys of its own. At step 0 all rows run through all layers but the last, whose keys are made of
what comes out there: the last layer alone is trimmed then. Later steps run chains in every layer.
Shapes: T packed rows, R chains of a step, K steps, D width.

With ttt.feed=own the token of step k is the draft's own likeliest one at row t of step k-1, as in
serving; nothing is differentiated through the choice. The target stays the verifier's word after
x[..t+1+k], so where a guess was wrong the chain is off its target's prefix: it is taught to come
back to a text that it has left.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import Feed, TTTSection
from data.chains import ChainStep, shifted
from data.records import TTTBatch
from models.attention import Kernel
from models.eagle3 import DraftOutput, Eagle3Draft
from models.marks import part
from models.memory import TTTMemory
from train.loss import CHUNK_LOGITS, Distillation, grade
from train.step_weights import look_for, step_weights


@dataclass(frozen=True)
class TTTOutput:
    """``loss`` is a share of the whole window's; the rest are sums over this batch, by step."""

    loss: Tensor  # []
    sums: Tensor  # [K] summed row losses, unweighted
    counts: Tensor  # [K] supervised rows
    hits: Tensor  # [K] rows where the draft's argmax is the verifier's, over the full vocabulary


@dataclass(frozen=True)
class Opening:
    """What the first step starts from, for all packed rows."""

    hidden: Tensor  # [T, D] what enters the last layer at step 0: fp32 or wider
    tokens: Tensor  # [T] x[t+1]
    memories: list[TTTMemory]  # of each layer, with the step-0 keys


def open_unroll(
    draft: Eagle3Draft, batch: TTTBatch, kernel: Kernel, recompute: bool = False
) -> Opening:
    """Fuse the verifier's states and make the keys of step 0, which every step sees."""
    with part("keys"):
        hidden = draft.fuse(batch.aux)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))  # the residual stream
        # The last row of a document is paired with a token of the next; no other row sees its key.
        tokens = shifted(batch.input_ids, 1)
        share = draft.share_of(tokens, asks=False)
    memories = [TTTMemory(kernel, batch.chains.whole) for _ in draft.stack]
    given = (share, hidden, batch.positions, memories)
    if recompute and len(memories) > 1:  # keys alone are not worth it
        hidden = checkpoint(draft.remember, *given, use_reentrant=False, preserve_rng_state=False)
    else:
        hidden = draft.remember(*given)
    return Opening(hidden, tokens, memories)


def unroll(
    draft: Eagle3Draft,
    batch: TTTBatch,
    kernel: Kernel,
    recompute: bool = False,
    feed: Feed = Feed.data,
) -> list[Tensor]:
    """Run the chains of ``batch`` -> K times [R, D], what the head reads.

    ``recompute``: keep a step's states and keys only, and compute its inside again in the backward.
    """
    opening, chains = open_unroll(draft, batch, kernel, recompute), batch.chains
    hidden, memories = opening.hidden.index_select(0, chains.steps[0].rows), opening.memories
    near = draft.share_of(opening.tokens[chains.near]) if feed is Feed.data else None

    def advance(
        step: ChainStep, fed: Tensor, hidden: Tensor, memories: list[TTTMemory], known: bool
    ) -> DraftOutput:
        share = draft.share_of(fed) if near is None else near.index_select(0, fed)
        return draft(share, hidden, step.positions, memories, known)

    normed: list[Tensor] = []
    for k, step in enumerate(chains.steps):
        memories = [memory.following(step.runs, step.kept) for memory in memories]
        fed = step.tokens
        if near is None:
            fed = likeliest(draft, normed[-1]) if k else opening.tokens[step.rows]
            fed = fed if step.kept is None else fed[step.kept]
        hidden = hidden if step.kept is None else hidden.index_select(0, step.kept)
        given = (step, fed, hidden, memories, k == 0)
        if recompute:  # nothing is drawn at random
            output = checkpoint(advance, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            output = advance(*given)
        hidden = output.hidden
        normed.append(output.normed)
    return normed


@torch.no_grad()
def likeliest(draft: Eagle3Draft, normed: Tensor) -> Tensor:
    """normed [R, D] -> [R] target ids; the head in chunks, as in the loss."""
    head = draft.lm_head.weight
    chunks = normed.split(max(1, CHUNK_LOGITS[normed.device.type] // len(head)))
    return draft.to_target_ids(torch.cat([(chunk @ head.T).argmax(-1) for chunk in chunks]))


def unroll_own(draft: Eagle3Draft, batch: TTTBatch, kernel: Kernel, depth: int) -> Tensor:
    """Run K steps fed with the draft's own argmax, as in serving -> [K, T] proposed target ids.

    Entry [k, t] is the guess of x[t+2+k] after the verified prefix x[0..t+1]; -1 where row t is
    not among the batch's chains.
    """
    opening, step = open_unroll(draft, batch, kernel), batch.chains.steps[0]
    proposed = batch.input_ids.new_full((depth, len(batch.input_ids)), -1)
    share = draft.share_of(opening.tokens[step.rows])
    hidden, memories = opening.hidden[step.rows], opening.memories
    for k in range(depth):
        memories = [memory.following(step.runs, None) for memory in memories]
        output = draft(share, hidden, step.positions + k, memories, known=k == 0)
        hidden = output.hidden
        tokens = likeliest(draft, output.normed)
        share = draft.share_of(tokens)
        proposed[k, step.rows] = tokens
    return proposed


class TrainingTimeTest(nn.Module):
    """What DeepSpeed wraps: the draft, whose forward is unroll + loss in one call."""

    def __init__(
        self,
        draft: Eagle3Draft,
        distillation: Distillation,
        ttt: TTTSection,
        kernel: Kernel,
        recompute: bool = False,
    ):
        super().__init__()
        self.draft = draft
        self.distillation = distillation
        self.ttt = ttt
        self.kernel = kernel
        self.recompute = recompute

    def compile_parts(self) -> None:
        """torch.compile what is elementwise around the products. Lengths vary without a limit, so
        rows are symbolic, and each part compiles for one row and for many."""
        for layer in self.draft.stack:
            layer.mlp.compile(dynamic=True)
        self.distillation.grade = torch.compile(grade, dynamic=True)

    def forward(self, batch: TTTBatch, row_weights: Tensor | None, own: int = 0):
        """row_weights [B]: what one row of each document adds to the loss -> TTTOutput.

        With ``own`` > 0 nothing is trained: the draft feeds itself that many steps and its
        proposals [own, T] come back, for the held-out acceptance.
        """
        if own:
            return unroll_own(self.draft, batch, self.kernel, own)
        assert row_weights is not None
        chains = batch.chains
        steps = unroll(self.draft, batch, self.kernel, self.recompute, self.ttt.feed)
        with part("loss"):
            ahead = look_for(self.ttt.weights, self.distillation.kind)
            first = ahead and self.distillation.look(ahead, self.draft, batch, steps)
            weights = step_weights(self.ttt, chains, row_weights, first)
            guesses = self.distillation(self.draft, batch, steps, weights, first)
        figures = torch.stack((guesses.losses, torch.ones_like(guesses.losses), guesses.hits))
        totals = figures.new_zeros(3, self.ttt.depth).index_add_(1, chains.depths, figures)
        return TTTOutput(guesses.loss, *totals)
