"""What the guesses of a chain weigh against each other in the loss."""

import torch
from torch import Tensor

from conf.schema import LossKind, StepWeights, TTTSection
from data.chains import Chains
from train.loss import Guesses


def look_for(weights: StepWeights, kind: LossKind) -> LossKind | None:
    """The kind of loss that must have graded the guesses before they are trained; None: no need."""
    if weights is StepWeights.reached or kind is LossKind.mix:
        return LossKind.tv
    return LossKind.ce if weights is StepWeights.missed else None


def step_weights(
    ttt: TTTSection, chains: Chains, row_weights: Tensor, first: Guesses | None
) -> Tensor:
    """row_weights [B] of one row of each document -> [P] of each supervised guess.

    ``first`` as ``look_for`` says. decay: decay**k. missed: decay**k, doubled where the draft's
    likeliest token is not the verifier's. reached: the chance that rejection sampling accepts all
    that the chain guessed before. Times the row's weight; nothing is differentiated through them.
    """
    rows = row_weights[chains.documents]
    if ttt.weights is StepWeights.reached:
        assert first is not None
        return rows * reached(chains, 1 - first.losses).to(rows)
    decayed = rows * ttt.decay ** chains.depths.to(rows)
    if ttt.weights is StepWeights.missed:
        assert first is not None
        return decayed * (2 - first.hits.to(rows))
    return decayed


def reached(chains: Chains, overlaps: Tensor) -> Tensor:
    """overlaps [P] sum min(target, draft) of each guess -> [P] product over the same chain's
    guesses before it.

    A guess that is not supervised (ttt.supervise=any has chains that begin before an answer) has
    no target that is stored, and counts as accepted.
    """
    weights = torch.ones_like(overlaps)
    chance = overlaps.new_ones(len(chains.steps[0].rows))  # that a round gets to this step
    for step in chains.steps:
        chance = chance if step.kept is None else chance[step.kept]  # [R]
        emitting = slice(None) if step.emits is None else step.emits
        weights[step.slots] = chance[emitting]
        chance = chance.clone()
        chance[emitting] *= overlaps[step.slots]
    return weights
