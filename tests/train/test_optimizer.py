"""Muon and AdamW as one optimizer: who steps on what, how far, and that its state goes on."""

from dataclasses import replace

import pytest
import torch

from conf.schema import OptimKind, OptimSection
from models.kernels import CPU_FLASH
from train.optimizer import optimizer_of

LR = 1e-2
STEPS = 4


@pytest.fixture
def trained(lab):
    """Make a draft and its optimizer, and take steps on the training-time test."""

    def make(kind: OptimKind, steps: int, state: dict | None = None, draft=None):
        draft = draft or lab.draft(qk_norm=True).float()
        module = lab.module(draft, 2, kernel=CPU_FLASH)
        module.distillation.head = module.distillation.head.float()
        optimizer = optimizer_of(OptimSection(kind=kind, weight_decay=0.1), module)
        if state is not None:
            optimizer.load_state_dict(state)
        document = lab.document([0] * 4 + [1] * 60)
        exact = lab.pack([document], 2)
        states = {name: getattr(exact, name).float() for name in ("aux", "last", "lse")}
        batch = replace(exact, **states)
        for group in optimizer.param_groups:
            group["lr"] = LR
        for _ in range(steps):
            optimizer.zero_grad()
            module(batch, torch.ones(1)).loss.backward()
            optimizer.step()
        return draft, optimizer

    return make


def moved(lab, draft) -> dict[str, torch.Tensor]:
    """How far each trained parameter is from where it began, decay taken out; after one step."""
    before = dict(lab.draft(qk_norm=True).float().named_parameters())
    return {
        name: (p - before[name] * (1 - LR * 0.1)).detach() / LR
        for name, p in draft.named_parameters()
        if p.requires_grad
    }


def spread(update: torch.Tensor) -> tuple[float, float]:
    """Median and largest singular value, as Muon scales them to one."""
    values = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
    return float(values.median()), float(values.max())


def test_inner_matrices_take_orthogonal_steps_and_the_rest_takes_those_of_adamw(lab, trained):
    by_muon = moved(lab, trained(OptimKind.muon, 1)[0])
    by_adamw = moved(lab, trained(OptimKind.adamw, 1)[0])
    inner = {n for n, u in by_muon.items() if u.dim() == 2 and "lm_head" not in n}
    assert len(inner) == 8  # fc; query, key, value, output; gate, up, down
    for name, update in by_muon.items():
        if name in inner:
            middle, high = spread(update)
            assert middle > 0.6 and high < 1.3, name
            assert spread(by_adamw[name])[1] > 1.3, name  # negative control
            rms = float(update.square().mean().sqrt())
            assert 0.1 < rms < 0.3  # AdamW's is near 0.2 to 0.4 (2502.16982)
        else:
            assert torch.equal(update, by_adamw[name]), name


@pytest.mark.parametrize("kind", list(OptimKind))
def test_a_loaded_state_goes_on_bit_for_bit(kind, lab, trained):
    whole, _ = trained(kind, STEPS)
    half, optimizer = trained(kind, STEPS // 2)
    copy = lab.draft(qk_norm=True).float()
    copy.load_state_dict(half.state_dict())
    forgetful = lab.draft(qk_norm=True).float()
    forgetful.load_state_dict(half.state_dict())
    trained(kind, STEPS - STEPS // 2, optimizer.state_dict(), copy)
    trained(kind, STEPS - STEPS // 2, None, forgetful)
    same = [torch.equal(a, b) for a, b in zip(whole.parameters(), copy.parameters(), strict=True)]
    assert all(same)
    other = zip(whole.parameters(), forgetful.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in other)  # negative control
