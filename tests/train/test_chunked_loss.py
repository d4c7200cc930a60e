"""The fused loss by finite differences: the gradients that it makes in its forward are its own.

Values are compared with the definitions elsewhere; here the derivative is, and nothing else.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conf.schema import LossKind
from train import loss as loss_module
from train.loss import Distillation

DEPTH = 3
MASKS = [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]  # guesses of one target: one, two and three
SIZE = 12  # of the draft's vocabulary
AT_ONCE, BY_THREE, BY_TARGET = 1 << 22, 3 * SIZE, 1  # logits of a chunk


@pytest.fixture
def problem(make_draft, make_document, make_pack, head) -> Callable:
    """-> the loss as a function of head weight and every step's states, and these as leaves."""

    def make(kind: LossKind, last_weight: float = 1.1):
        draft = make_draft(draft_vocab_size=SIZE)
        batch = make_pack([make_document(m, seed) for seed, m in enumerate(MASKS)], DEPTH)
        distillation = Distillation(kind, head[draft.d2t + torch.arange(SIZE)], LlamaConfig())
        inside = draft.t2d[batch.argmax[batch.chains.targets]]
        assert inside.any() and not inside.all()  # ce tells them apart
        guesses = len(batch.chains.targets_of)
        weights = torch.linspace(0.3, last_weight, guesses, dtype=torch.float64)
        generator = torch.Generator().manual_seed(3)
        steps = [
            torch.randn(len(step.rows), head.shape[1], dtype=torch.float64, generator=generator)
            for step in batch.chains.steps
        ]
        leaves = [draft.lm_head.weight, *(step.requires_grad_() for step in steps)]
        # What mix weighs KL by is no part of its derivative: the same wherever the loss is asked.
        first = distillation.look(LossKind.tv, draft, batch, [s.detach().clone() for s in steps])

        def loss(_, *states: Tensor) -> Tensor:
            return distillation(draft, batch, list(states), weights, first).loss

        return loss, leaves

    return make


@pytest.mark.parametrize("kind", list(LossKind))
@pytest.mark.parametrize("chunk", [AT_ONCE, BY_THREE, BY_TARGET])
def test_gradcheck(kind, chunk, problem, monkeypatch):
    """Every number at once; by chunks along one random direction, which costs less."""
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", chunk)
    loss, leaves = problem(kind)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=chunk != AT_ONCE)


@pytest.mark.parametrize("kind", list(LossKind))
def test_gradcheck_of_the_states_alone(kind, problem):
    """With a frozen head no gradient of it is made."""
    loss, leaves = problem(kind)
    leaves[0].requires_grad_(False)
    assert torch.autograd.gradcheck(loss, leaves)


@pytest.mark.parametrize("kind", list(LossKind))
@pytest.mark.parametrize("by", [3.0, -0.25, 0.0])
def test_the_gradients_are_scaled_by_the_one_that_comes_in(kind, by, problem):
    grads = []
    for factor in (1.0, by):
        loss, leaves = problem(kind)
        grads.append(torch.autograd.grad(loss(*leaves) * factor, leaves))
    for plain, scaled in zip(*grads, strict=True):
        assert torch.allclose(scaled, plain * by, rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", list(LossKind))
def test_the_states_that_are_given_stay_as_they_are(kind, problem):
    """Gradients overwrite the gathered copy: the model's own states serve its other readers."""
    loss, leaves = problem(kind)
    before = [leaf.detach().clone() for leaf in leaves]
    loss(*leaves).backward()
    assert all(torch.equal(now, then) for now, then in zip(leaves, before, strict=True))


@pytest.mark.parametrize("kind", list(LossKind))
def test_without_gradients_the_loss_is_the_same(kind, problem):
    loss, leaves = problem(kind)
    trained = loss(*leaves)
    with torch.no_grad():
        assert torch.equal(loss(*leaves), trained)


def test_a_gradient_of_other_weights_is_caught(problem):
    """Negative control: gradcheck refuses the gradients of guesses that weigh 1 % more."""
    loss, leaves = problem(LossKind.kl)
    other, _ = problem(LossKind.kl, last_weight=1.111)

    class OfOthers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            with torch.enable_grad():
                states = [g.detach().requires_grad_() for g in given[1:]]
                ctx.grads = torch.autograd.grad(other(None, *states), states)
            return loss(*given).detach()

        @staticmethod
        def backward(ctx, grad):
            return None, *(grad * g for g in ctx.grads)

    leaves[0].requires_grad_(False)
    assert not torch.autograd.gradcheck(OfOthers.apply, leaves, raise_exception=False)
