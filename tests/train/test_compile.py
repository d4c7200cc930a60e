"""engine.compile: the same step, and a bounded number of compilations however lengths vary."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

DEPTH = 3
# Rows, answers and documents all differ, down to a pack of one supervised row and of none.
PACKS = [
    [[0, 0, 1, 1, 1, 1, 1, 1]],
    [[0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]],
    [[1] * 17],
    [[0, 1, 1]],
    [[0] * 5],
    [[0, 1] * 6],
    *([[0] * n + [1] * (30 - n)] for n in range(2, 26, 3)),
]
MOST_GRAPHS = 4  # the MLP and the loss, each for one row (or one guess a target) and for many


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_parts_give_the_same_step_and_stop_compiling(lab):
    draft = lab.draft()
    packs = [lab.pack(lab.documents(masks), DEPTH) for masks in PACKS]
    module = lab.module(draft, DEPTH)
    plain = [lab.step(module, pack) for pack in packs]
    counters.clear()
    torch.compiler.reset()
    module.compile_parts()
    for pack, eager in zip(packs, plain, strict=True):
        compiled = lab.step(module, pack)
        assert compiled.loss == pytest.approx(eager.loss, rel=1e-10)
        if sum(pack.chains.counts):
            assert lab.apart(compiled.grads, eager.grads) <= 1e-10
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
