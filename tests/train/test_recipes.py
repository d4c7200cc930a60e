"""What may be chosen of the training-time test, each against its plain twin: feed, weights, mix."""

from dataclasses import replace

import pytest
import torch

from conf.schema import Feed, LossKind, StepWeights, Supervise
from models.kernels import CPU_FLASH
from train import loss as loss_module
from train import step_weights, ttt
from train.step_weights import reached
from train.ttt import likeliest, unroll, unroll_own

DEPTH = 4
MASKS = [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0] * 4, [0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]]
RECIPES = {
    "own tokens": {"feed": Feed.own},
    "as reached": {"weights": StepWeights.reached},
    "missed twice": {"weights": StepWeights.missed},
    "all at once": {"feed": Feed.own, "weights": StepWeights.reached, "kind": LossKind.mix},
    "and as missed": {"feed": Feed.own, "weights": StepWeights.missed, "kind": LossKind.mix},
}


def twins(lab, **choices):
    """(how far the loss is from the plain twin's, how far the gradients are), relative."""
    plain, draft, documents = lab.recipe(DEPTH, **choices), lab.draft(), lab.documents(MASKS)
    module = lab.module_of(draft, plain)
    found = lab.step(module, lab.pack(documents, DEPTH, plain.rule))
    twin = plain.total(draft, documents)
    loss = abs(found.loss - twin.item()) / twin.item()
    return loss, lab.apart(found.grads, lab.gradients(twin, module))


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("choices", RECIPES.values(), ids=RECIPES.keys())
def test_loss_and_gradients_equal_the_plain_twin(choices, rule, lab):
    loss, gradients = twins(lab, rule=rule, **choices)
    assert loss <= 1e-12 and gradients <= 1e-12


def other_row(draft, normed):
    """The choice of the row before."""
    return likeliest(draft, normed).roll(1)


def with_itself(chains, overlaps):
    return reached(chains, overlaps) * overlaps


def of_the_target(chains, overlaps):
    """Guesses of one target side by side, in place of those of one chain."""
    before = torch.zeros_like(chains.targets_of, dtype=torch.bool)
    before[1:] = chains.targets_of[1:] == chains.targets_of[:-1]
    return torch.where(before, overlaps.roll(1), 1.0)


def of_each_guess(overlaps, chains):
    return torch.exp(-loss_module.ETA * overlaps)


MISTAKES = [
    ({"feed": Feed.own}, ttt, "likeliest", other_row),
    ({"weights": StepWeights.reached}, step_weights, "reached", with_itself),
    ({"weights": StepWeights.reached}, step_weights, "reached", of_the_target),
    ({"kind": LossKind.mix}, loss_module, "kl_shares", of_each_guess),
]


@pytest.mark.parametrize(("choices", "module", "name", "wrong"), MISTAKES)
def test_a_mistake_in_it_is_caught(choices, module, name, wrong, lab, monkeypatch):
    """Negative control: the token of another chain, a product one step on or over other guesses,
    a share that is each guess's own."""
    monkeypatch.setattr(module, name, wrong)
    loss, gradients = twins(lab, **choices)
    assert loss > 1e-4 and gradients > 1e-3


@pytest.mark.parametrize("choices", RECIPES.values(), ids=RECIPES.keys())
def test_it_is_no_name_for_the_default(choices, lab):
    draft, batch = lab.draft(), lab.pack(lab.documents(MASKS), DEPTH)
    default = lab.step(lab.module(draft, DEPTH), batch)
    chosen = lab.step(lab.module_of(draft, lab.recipe(DEPTH, **choices)), batch)
    assert abs(chosen.loss - default.loss) > 1e-3 * default.loss


def test_misses_weigh_twice_and_hits_once(lab):
    """By a draft that always hits, and one that never does."""
    draft, batch = lab.draft(), lab.pack(lab.documents(MASKS), DEPTH)
    missed = lab.module_of(draft, lab.recipe(DEPTH, weights=StepWeights.missed))
    once = lab.module(draft, DEPTH)
    outside = int((~draft.t2d).nonzero()[0])
    never = replace(batch, argmax=torch.full_like(batch.argmax, outside))
    assert lab.step(missed, never).loss == pytest.approx(2 * lab.step(once, never).loss, rel=1e-12)
    draft.lm_head.weight.data.zero_()  # the likeliest of equal ones is the first
    always = replace(batch, argmax=torch.full_like(batch.argmax, int(draft.d2t[0])))
    found = lab.step(missed, always)
    assert torch.equal(found.output.hits, found.output.counts)
    assert found.loss == pytest.approx(lab.step(once, always).loss, rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 1 << 23])
def test_own_tokens_are_those_of_serving(chunk, lab, monkeypatch):
    """Step by step what ``unroll_own`` proposes, which tests/train/test_unroll.py compares with
    chained decoding; the tokens are chosen in chunks."""
    draft, batch = lab.draft(qk_norm=True, layers=2), lab.pack(lab.documents(MASKS), DEPTH)
    proposed = unroll_own(draft, lab.through(lab.documents(MASKS), 1), CPU_FLASH, DEPTH)
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", chunk)
    different = 0
    steps = {feed: unroll(draft, batch, CPU_FLASH, feed=feed) for feed in Feed}
    for k, step in enumerate(batch.chains.steps):
        expected = proposed[k, step.rows]
        assert torch.equal(likeliest(draft, steps[Feed.own][k]), expected)
        different += int((likeliest(draft, steps[Feed.data][k]) != expected).sum())
    assert different  # negative control


def test_recomputing_steps_of_own_tokens_changes_nothing(lab):
    module = lab.module_of(lab.draft(layers=2), lab.recipe(DEPTH, feed=Feed.own))
    batch = lab.pack(lab.documents(MASKS), DEPTH)
    kept = lab.step(module, batch)
    module.recompute = True
    again = lab.step(module, batch)
    assert again.loss == kept.loss
    assert lab.apart(again.grads, kept.grads) <= 1e-14


@pytest.mark.parametrize("choices", RECIPES.values(), ids=RECIPES.keys())
def test_nothing_supervised_gives_zero_gradients(choices, lab):
    module = lab.module_of(lab.draft(), lab.recipe(DEPTH, **choices))
    found = lab.step(module, lab.pack(lab.documents([[0] * 10, [0, 1, 0]]), DEPTH))
    assert found.loss == 0.0
    assert all(not grad.any() and grad.isfinite().all() for grad in found.grads.values())
