"""The count of training FLOPs, against what torch counts while the real step runs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from conf.schema import LossKind, Supervise
from data.amount import counts_of
from models.flops import Sizes, eagle3_flops
from train.ttt import TrainingTimeTest

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


def sizes_of(module: TrainingTimeTest, head_trained: bool = True) -> Sizes:
    config = module.draft.config
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        scored=config.draft_vocab_size,
        aux=len(config.aux_layers),
        states_normed=config.fc_norm or config.norm_before_fc,
        head_trained=head_trained,
        teacher=module.distillation.kind is not LossKind.ce,
    )


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize(
    ("switches", "kind", "trained"),
    [
        ({}, LossKind.kl, True),
        ({"fc_norm": True, "qk_norm": True}, LossKind.tv, True),
        ({"norm_before_fc": True, "norm_output": True}, LossKind.ce, False),
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
    counts = counts_of(mask, starts, depth, rule)
    weights = torch.ones(len(documents), dtype=torch.float64)
    found = counted_by_torch(lambda: module(batch, weights).loss)
    sizes = sizes_of(module, trained)
    assert eagle3_flops(sizes, counts).products == found
    longer = replace(counts, fed=counts.fed + 1)
    assert eagle3_flops(sizes, longer).products != found
