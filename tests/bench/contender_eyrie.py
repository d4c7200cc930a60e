"""Eyrie's own step: ``train.ttt.TrainingTimeTest`` on the batch that its loader would give it.

In bfloat16 weights, states and gradients are bf16, softmax and the sums of the head's gradient
fp32; the fp32 masters belong to the optimizer, which no contender runs.
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from contender import Outcome, clear, run, take_step
from transformers import LlamaConfig
from workload import EPS, ROPE_THETA, Case, Shape, Workload

from conf.schema import LossKind, TTTSection
from data.chains import Chains
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from models.kernels import CPU_FLASH
from train.loss import Distillation
from train.ttt import TrainingTimeTest


def draft_config(shape: Shape) -> DraftConfig:
    return DraftConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        draft_vocab_size=shape.draft_vocab,
        aux_layers=list(range(1, shape.aux + 1)),  # their number matters alone
        rms_norm_eps=EPS,
        max_positions=max(2048, 2 * shape.tokens),
        rope={"rope_type": "default", "rope_theta": ROPE_THETA},
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


class Eyrie:
    packages = ("transformers",)

    def __init__(self, work: Workload, compiled: bool):
        self.work = work
        self.compiled = compiled
        self.drafts = {"float32": self.draft(torch.float32), "bfloat16": self.draft(torch.bfloat16)}
        self.trained = torch.nn.ModuleList(self.drafts.values())
        rows = [F.linear(last, work.head) for last in work.last]  # the cache keeps these two
        self.argmax = torch.cat([row.argmax(-1) for row in rows])
        self.lse = torch.cat([row.logsumexp(-1) for row in rows])

    def draft(self, dtype: torch.dtype) -> Eagle3Draft:
        draft = Eagle3Draft(draft_config(self.work.shape))
        vocabulary = {"d2t": self.work.d2t, "t2d": self.work.t2d}
        weights = self.work.draft | vocabulary | {"embed_tokens.weight": self.work.embedding}
        draft.load_state_dict(weights)
        return draft.to(dtype)

    def module(self, draft: Eagle3Draft, depth: int) -> TrainingTimeTest:
        head = self.work.head[self.work.members].to(draft.lm_head.weight.dtype)
        teacher = Distillation(LossKind.kl, head, LlamaConfig())
        return TrainingTimeTest(draft, teacher, TTTSection(depth=depth), CPU_FLASH)

    def batch(self, case: Case, dtype: torch.dtype) -> TTTBatch:
        work, shape = self.work, self.work.shape
        starts = torch.arange(shape.batch + 1) * shape.tokens
        mask = work.loss_mask(case.share).flatten()
        return TTTBatch(
            input_ids=work.input_ids.flatten(),
            positions=torch.arange(shape.tokens).repeat(shape.batch),
            aux=work.aux.flatten(0, 1).to(dtype),
            last=work.last.flatten(0, 1).to(dtype),
            argmax=self.argmax,
            lse=self.lse.to(torch.promote_types(dtype, torch.float32)),
            samples=shape.batch,
            chains=Chains.of(mask, starts, case.depth, TTTSection().supervise),
        )

    def prepare(self, case: Case) -> Callable[[], Outcome]:
        draft = self.drafts[case.dtype]
        module, batch = self.module(draft, case.depth), self.batch(case, draft.fc.weight.dtype)
        if self.compiled:
            module.compile_parts()

        def forward() -> Outcome:
            output = module(batch, row_weights(batch))
            return Outcome(output.loss, list(output.counts))

        return forward

    def gradient_error(self, case: Case) -> float:
        """Against the same weights and states in fp64."""
        draft = self.drafts[case.dtype]
        clear(draft)
        take_step(self.prepare(case))
        gradients = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
        exact = self.module(deepcopy(draft).double(), case.depth)
        clear(exact)
        batch = self.batch(case, draft.fc.weight.dtype)
        wide = {name: getattr(batch, name).double() for name in ("aux", "last", "lse")}
        batch = replace(batch, **wide)
        exact(batch, row_weights(batch)).loss.backward()
        reference = {n: p.grad for n, p in exact.draft.named_parameters() if p.grad is not None}
        wrong = [gradients[name].double() - reference[name] for name in reference]
        norm = torch.nn.utils.get_total_norm
        return float(norm(wrong) / norm(list(reference.values())))


def row_weights(batch: TTTBatch) -> torch.Tensor:
    """[B]: the loss is a mean over the rows of step 0."""
    return torch.full((batch.samples,), 1.0 / batch.chains.counts[0], dtype=batch.lse.dtype)


if __name__ == "__main__":
    run(Eyrie)
