"""The count of training FLOPs, against what torch counts while the real step runs."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from conf.schema import HeadInit, LossKind, RunConfig, Supervise, TTTSection
from data.amount import counts_of
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.flops import Counts, eagle1_flops, eagle3_flops, medusa_flops, model_flops
from models.kernels import CPU_FLASH
from models.medusa import MedusaConfig, MedusaDraft
from models.small_model import ModelConfig, SmallModel
from train import budget
from train.budget import eagle1_sizes, eagle3_sizes, medusa_sizes
from train.families.eagle1 import FeatureRegression
from train.families.medusa import MedusaTraining
from train.families.small_model import SmallModelTest
from train.loss import Distillation

aten = torch.ops.aten
MASKS = [[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0]]


def counted_by_torch(step: Callable[[], Tensor]) -> int:
    """Forward and backward. The counter knows no in-place addmm_, by which the head's gradient is
    added up, and not the CPU's flash attention."""

    def added(_total: list[int], left: list[int], right: list[int], **_: object) -> int:
        return 2 * left[0] * left[1] * right[1]

    known = {aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        step().backward()
    return counter.get_total_flops()


def settings(kind: LossKind = LossKind.kl, trained: bool = True) -> RunConfig:
    cfg = RunConfig()
    cfg.loss.kind = kind
    cfg.draft.head_init = HeadInit.verifier if trained else HeadInit.frozen
    return cfg


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize(
    ("switches", "kind", "trained"),
    [
        ({}, LossKind.kl, True),
        ({"fc_norm": True, "qk_norm": True}, LossKind.tv, True),
        ({"norm_before_fc": True, "norm_output": True}, LossKind.ce, False),
        ({"layers": 3, "fc_norm": True}, LossKind.kl, True),
    ],
)
@pytest.mark.parametrize("depth", [1, 4])
def test_a_real_step_costs_what_is_counted(lab, switches, kind, trained, rule, depth):
    documents = lab.documents(MASKS)
    batch = lab.pack(documents, depth, rule)
    module = lab.module(lab.draft(**switches), depth, rule, kind)
    module.draft.lm_head.requires_grad_(trained)
    mask = torch.cat([d.mask for d in documents])
    starts = torch.tensor([0, *(len(d.ids) for d in documents)]).cumsum(0)
    chains = counts_of(mask, starts, depth, rule)
    weights = torch.ones(len(documents), dtype=torch.float64)
    found = counted_by_torch(lambda: module(batch, weights).loss)
    sizes = eagle3_sizes(settings(kind, trained), module.draft.config)
    assert eagle3_flops(sizes, chains).products == found
    longer = replace(chains, fed=chains.fed + 1)
    assert eagle3_flops(sizes, longer).products != found


def counts(documents, depth: int = 1) -> Counts:
    mask = torch.cat([d.mask for d in documents])
    starts = torch.tensor([0, *(len(d.ids) for d in documents)]).cumsum(0)
    return counts_of(mask, starts, depth, Supervise.span)


def test_eagle1(lab):
    config = Eagle1Config(
        hidden_size=24, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=40, aux_layers=[9], rms_norm_eps=1e-5, max_positions=256,
        rope={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    documents = [replace(one, aux=one.aux[:, :24]) for one in lab.documents(MASKS)]
    module = FeatureRegression(Eagle1Draft(config).double(), CPU_FLASH).eval()
    batch, weights = lab.pack(documents, 1), torch.ones(3, dtype=torch.float64)
    found = counted_by_torch(lambda: module(batch, weights).loss)
    assert eagle1_flops(eagle1_sizes(config), counts(documents)).products == found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [LossKind.kl, LossKind.ce])
def test_medusa(lab, shared: bool, kind: LossKind):
    config = MedusaConfig(24, 40, 16, heads=3, layers=2, shared_rows=shared)
    documents = lab.documents(MASKS)
    draft = MedusaDraft(config).double()
    draft.t2d[:16] = True
    teacher = Distillation(kind, lab.head[:16], LlamaConfig())
    module = MedusaTraining(draft, teacher, TTTSection(depth=3))
    batch, weights = lab.pack(documents, 3), torch.ones(3, dtype=torch.float64)
    found = counted_by_torch(lambda: module(batch, weights).loss)
    sizes = medusa_sizes(settings(kind), config)
    assert medusa_flops(sizes, counts(documents, 3)).products == found


def test_small_model(lab, monkeypatch):
    layout = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=None,
    )  # fmt: skip
    config = ModelConfig(layout.to_dict(), 40, 256)
    documents = lab.documents(MASKS)
    module = SmallModelTest(
        SmallModel.new(config).double(), Distillation(LossKind.kl, lab.head, LlamaConfig())
    )
    batch, weights = lab.pack(documents, 1), torch.ones(3, dtype=torch.float64)
    found = counted_by_torch(lambda: module(batch, weights).loss)
    monkeypatch.setattr(budget, "load_facts", lambda *_: SimpleNamespace(hidden_size=24))
    sizes = budget.model_sizes(settings(), config)
    assert model_flops(sizes, counts(documents)).products == found
