"""SpecForge's EAGLE-3 step as its own offline trainer takes it; runs in an environment of its own.

``Eagle3TrainStrategy.forward_loss`` is called on a batch such as its loader yields: in every step
it computes the full-vocabulary logits of all rows from the stored last states, and the loss of all
rows at all steps. Its attention on a CPU is "sdpa" (products by hand, a dense mask); its Triton
loss is replaced by its own reference for it. Without --compile its torch.compile decorators are
off.
"""

import os
import sys

if "--compile" not in sys.argv:  # must be set before torch loads
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from collections.abc import Callable

import specforge.algorithms.eagle3.model as eagle3
import torch
from contender import Outcome, run
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor, nn
from transformers import LlamaConfig
from workload import EPS, ROPE_THETA, Case, Shape, Workload


class ReferenceLoss:
    """Stands where the module expects its Triton kernel, which needs a GPU."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        return _compute_loss(logits, target, position_mask)


class VerifierHead(TargetHead):
    """Theirs, its weight given: the original reads a verifier's files and casts it to bf16."""

    def __init__(self, weight: Tensor):
        nn.Module.__init__(self)
        self.fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.fc.weight.data = weight
        self.freeze_weights()


def draft_config(shape: Shape) -> LlamaConfig:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(2048, 2 * shape.tokens),
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    config.draft_vocab_size = shape.draft_vocab
    return config


class SpecForge:
    packages = ("specforge", "transformers")

    def __init__(self, work: Workload, compiled: bool):
        eagle3.LogSoftmaxLoss = ReferenceLoss
        self.work = work
        self.compiled = compiled
        self.draft = LlamaForCausalLMEagle3(draft_config(work.shape), attention_backend="sdpa")
        vocabulary = {"t2d": work.t2d, "d2t": work.d2t}
        weights = work.draft | vocabulary | {"embed_tokens.weight": work.embedding}
        self.draft.load_state_dict(weights)
        self.draft.freeze_embedding()
        self.head = VerifierHead(work.head)
        self.trained = self.draft
        self.models: dict[int, nn.Module] = {}  # by depth

    def model(self, depth: int) -> nn.Module:
        if depth not in self.models:
            model = eagle3.OnlineEagle3Model(self.draft, length=depth, attention_backend="sdpa")
            self.models[depth] = torch.compile(model) if self.compiled else model
        return self.models[depth]

    def prepare(self, case: Case) -> Callable[[], Outcome]:
        if case.dtype != "float32":
            raise ValueError(f"dtype={case.dtype}: the comparison is made in float32")
        work = self.work
        mask = work.loss_mask(case.share).long()
        tensors = {
            "input_ids": work.input_ids,
            "attention_mask": torch.ones_like(mask),
            "loss_mask": mask,
            "hidden_state": work.aux,
            "target": work.last,
        }
        names = [str(number) for number in range(work.shape.batch)]
        batch = TrainBatch(names, "eagle3", tensors, {"target_repr": "hidden_state"})
        strategy = Eagle3TrainStrategy(self.model(case.depth), target_head=self.head)

        def forward() -> Outcome:
            output = strategy.forward_loss(batch)
            return Outcome(output.loss, output.metrics["acc_denoms"])

        return forward


if __name__ == "__main__":
    run(SpecForge)
