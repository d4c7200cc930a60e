"""The step on a GPU: packs through pinned memory, both flash kernels, against fp64 on the CPU."""

from copy import deepcopy

import pytest
import torch
from transformers import LlamaConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from conf.schema import LossKind, TTTSection
from data.loader import moved_batch, on_device
from models.kernels import CUDA_FLASH, FLASH_ATTN, PLAIN
from train.loss import Distillation
from train.ttt import TrainingTimeTest

DEPTH = 5
# Of the whole gradient, by the number of roundings to bf16 on its way; the head is random here.
BOUND = 3e-2


@pytest.mark.gpu("step", seconds=20)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernel", [CUDA_FLASH, FLASH_ATTN, PLAIN], ids=lambda kernel: kernel.name)
def test_a_pack_on_the_gpu_has_the_gradient_of_the_cpu(lab, kernel, recompute):
    if kernel is FLASH_ATTN and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    draft, device = lab.draft(fc_norm=True, qk_norm=recompute), torch.device("cuda")
    pack = lab.pack(lab.documents([[0, 0, 1, 1, 1, 1, 0, 1, 1, 1], [0] * 3, [0, 1] * 9]), DEPTH)
    exact = lab.step(lab.module(draft, DEPTH), pack).grads
    pinned = moved_batch(pack, torch.Tensor.pin_memory)
    assert pinned.aux.is_pinned() and pinned.chains.steps[0].runs.sequences.keys.is_pinned()
    there = on_device(pinned, device, torch.bfloat16)
    head = lab.head[draft.d2t + torch.arange(len(draft.d2t))].to(device, torch.bfloat16)
    teacher = Distillation(LossKind.kl, head, LlamaConfig())
    copy = deepcopy(draft).to(device, torch.bfloat16)
    module = TrainingTimeTest(copy, teacher, TTTSection(depth=DEPTH), kernel, recompute)
    module(there, torch.ones(pack.samples, device=device)).loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm
    wrong = [found[name].double().cpu() - exact[name] for name in exact]
    assert float(norm(wrong) / norm(list(exact.values()))) <= BOUND
