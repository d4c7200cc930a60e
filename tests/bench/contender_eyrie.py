"""Eyrie's own step: ``train.ttt.TrainingTimeTest`` on the batch that its loader would give it.

In bfloat16 the weights stay in fp32 and autocast makes the products in bf16.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
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
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from train.loss import Distillation
from train.ttt import TrainingTimeTest, supervised_rows


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
        self.draft = self.trained = Eagle3Draft(draft_config(work.shape))
        vocabulary = {"d2t": work.d2t, "t2d": work.t2d}
        weights = work.draft | vocabulary | {"embed_tokens.weight": work.embedding}
        self.draft.load_state_dict(weights)
        self.teacher = Distillation(LossKind.kl, work.head[work.members], LlamaConfig())
        self.argmax, self.lse = self.summary()
        self.modules: dict[int, torch.nn.Module] = {}  # by depth

    def summary(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the cache holds beside the states: argmax and log-sum-exp [B, T] of the verifier."""
        rows = [F.linear(last, self.work.head) for last in self.work.last]
        return (
            torch.stack([row.argmax(-1) for row in rows]),
            torch.stack([row.logsumexp(-1) for row in rows]),
        )

    def module(self, depth: int) -> torch.nn.Module:
        if depth not in self.modules:
            module = TrainingTimeTest(self.draft, self.teacher, TTTSection(depth=depth))
            self.modules[depth] = torch.compile(module) if self.compiled else module
        return self.modules[depth]

    def batch(self, share: int) -> TTTBatch:
        work = self.work
        return TTTBatch(
            input_ids=work.input_ids,
            loss_mask=work.loss_mask(share),
            lengths=torch.full((work.shape.batch,), work.shape.tokens),
            aux=work.aux,
            last=work.last,
            argmax=self.argmax,
            lse=self.lse,
        )

    def row_weights(self, share: int) -> torch.Tensor:
        """[B]: the loss is a mean over the rows of step 0."""
        rows = supervised_rows(self.work.loss_mask(share), 1, TTTSection().supervise)
        return torch.full((self.work.shape.batch,), 1.0 / int(rows.sum()))

    def prepare(self, case: Case) -> Callable[[], Outcome]:
        batch, module = self.batch(case.share), self.module(case.depth)
        weights = self.row_weights(case.share)
        narrow = case.dtype == "bfloat16"
        precision = torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext()

        def forward() -> Outcome:
            with precision:
                output = module(batch, weights)
            return Outcome(output.loss, list(output.counts))

        return forward

    def gradient_error(self, case: Case) -> float:
        clear(self.draft)
        take_step(self.prepare(case))
        gradients = {n: p.grad for n, p in self.draft.named_parameters() if p.grad is not None}
        exact = TrainingTimeTest(
            deepcopy(self.draft).double(),
            Distillation(LossKind.kl, self.teacher.head.double(), LlamaConfig()),
            TTTSection(depth=case.depth),
        )
        clear(exact)
        batch, weights = self.batch(case.share), self.row_weights(case.share)
        states = {"aux": batch.aux.double(), "last": batch.last.double(), "lse": batch.lse.double()}
        exact(replace(batch, **states), weights.double()).loss.backward()
        reference = {n: p.grad for n, p in exact.draft.named_parameters() if p.grad is not None}
        wrong = [gradients[name].double() - reference[name] for name in reference]
        norm = torch.nn.utils.get_total_norm
        return float(norm(wrong) / norm(list(reference.values())))


if __name__ == "__main__":
    run(Eyrie)
