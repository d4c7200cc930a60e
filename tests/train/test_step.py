"""The whole training step against its plain twin: trimmed, packed and fused, yet the same."""

import pytest
import torch
from transformers import LlamaConfig

from conf.schema import LossKind, Supervise, TTTSection
from models.kernels import CPU_FLASH, PLAIN
from train.loss import Distillation
from train.ttt import TrainingTimeTest

DEPTH = 5
MASKS = {
    "two answers": [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]],
    "short answers": [[0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]],
    "from the first token to the last": [[1] * 9],
    "packed": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0] * 4, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
}


def random_masks(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 24, (4,), generator=generator).tolist()
    return [(torch.rand(length, generator=generator) < 0.6).int().tolist() for length in lengths]


ALL_MASKS = {**MASKS, **{f"random {seed}": random_masks(seed) for seed in range(3)}}


def module_of(draft, head, kind=LossKind.kl, rule=Supervise.span, kernel=CPU_FLASH):
    ids = draft.d2t + torch.arange(len(draft.d2t))
    ttt = TTTSection(depth=DEPTH, decay=0.8, supervise=rule)
    return TrainingTimeTest(draft, Distillation(kind, head[ids], LlamaConfig()), ttt, kernel)


def gradients(loss, module):
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def apart(ours, theirs) -> float:
    """Largest difference of any gradient, relative to that gradient's largest entry."""
    return max(
        float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-30))
        for n in theirs
        if float(theirs[n].abs().max()) > 0
    )


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("masks", ALL_MASKS.values(), ids=ALL_MASKS.keys())
def test_loss_and_gradients_equal_the_plain_twin(
    masks, rule, kernel, make_draft, make_document, make_pack, head, plain_sum
):
    draft = make_draft(fc_norm=True)
    documents = [make_document(mask, seed) for seed, mask in enumerate(masks)]
    module = module_of(draft, head, rule=rule, kernel=kernel)
    output = module(make_pack(documents, DEPTH, rule), torch.ones(len(masks)).double())
    twin = sum(plain_sum(draft, d, DEPTH, rule, LossKind.kl) for d in documents)
    assert output.loss.item() == pytest.approx(twin.item(), rel=1e-12)
    assert apart(gradients(output.loss, module), gradients(twin, module)) <= 1e-12


@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_equals_its_definition(
    kind, make_draft, make_document, make_pack, head, plain_sum
):
    draft = make_draft()
    documents = [make_document(mask, seed) for seed, mask in enumerate(MASKS["packed"])]
    module = module_of(draft, head, kind)
    output = module(make_pack(documents, DEPTH), torch.ones(len(documents)).double())
    twin = sum(plain_sum(draft, d, DEPTH, Supervise.span, kind) for d in documents)
    assert output.loss.item() == pytest.approx(twin.item(), rel=1e-12)
    assert apart(gradients(output.loss, module), gradients(twin, module)) <= 1e-12
