"""Trains SpecForge's EAGLE-3 head on a feed, as its offline trainer does, in its own environment.

Its own are: the model and its initial values (a random draft head, the verifier's embedding,
frozen), the normalisation and padding of samples, the teacher from the stored last states, the
supervised rows, the loss with weights .8^k and its mean over all B*T rows, and the clipping at .5.
Its Triton loss, which needs a GPU, is replaced by its own reference for it, its attention on a CPU
is "sdpa", and torch.compile is off. Given here: the optimizer's betas, the rates, and fp32 weights
under autocast in bf16 instead of bf16 weights with fp32 masters.

    PYTHON tests/bench/acceptance_specforge.py --feed FILE --out DIR --depth 3 --cpu-seconds 600
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # must be set before torch loads

import argparse
from pathlib import Path

import specforge.algorithms.eagle3.model as eagle3
import torch
from acceptance_feed import Feed, FeedSample
from acceptance_training import BETAS, PROBED, Losses, llama_settings, options, train
from specforge.algorithms.eagle3.data import build_offline_collator, normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.export.checkpoint_io import apply_legacy_rope_scaling
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor, nn
from transformers import LlamaConfig


class ReferenceLoss:
    """Stands where the module expects its Triton kernel."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        return _compute_loss(logits, target, position_mask)


class VerifierHead(TargetHead):
    """Theirs, in bf16 like theirs, its weight given: the original reads a verifier's files."""

    def __init__(self, weight: Tensor):
        nn.Module.__init__(self)
        self.fc = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.fc.weight.data = weight
        self.freeze_weights()


class SpecForge:
    packages = ("specforge", "transformers")
    clip = 0.5

    def __init__(self, feed: Feed, args: argparse.Namespace):
        eagle3.LogSoftmaxLoss = ReferenceLoss
        config = LlamaConfig(num_hidden_layers=1, **llama_settings(feed.facts))
        config.draft_vocab_size = feed.facts.draft_vocab_size
        config.fc_norm = args.fc_norm
        outputs = [n - 1 for n in feed.facts.aux_layers]  # it counts layer outputs
        config.eagle_config = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": outputs,
        }
        self.trained = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
        self.trained.embed_tokens.weight.data.copy_(feed.ends.embedding)
        self.trained.freeze_embedding()
        self.trained.t2d.copy_(feed.ends.t2d)
        self.trained.d2t.copy_(feed.ends.d2t)
        self.model = self.unrolled(args.depth)
        self.strategy = Eagle3TrainStrategy(
            self.model,
            target_head=VerifierHead(feed.ends.head),
            compact_teacher=args.compact_teacher,
        )
        self.collate = build_offline_collator()
        parameters = [p for p in self.trained.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW(parameters, args.lr, BETAS, weight_decay=0.0)]

    def unrolled(self, depth: int) -> nn.Module:
        return eagle3.OnlineEagle3Model(self.trained, length=depth, attention_backend="sdpa")

    def batch(self, samples: list[FeedSample]) -> TrainBatch:
        features = []
        for sample in samples:
            raw = {
                "input_ids": sample.input_ids,
                "loss_mask": sample.loss_mask.long(),
                "aux_hidden_state": sample.aux[None],
                "hidden_state": sample.last[None],
            }
            features.append(normalize_offline_sample(raw, max_len=len(sample.input_ids)))
        names = [str(number) for number in range(len(samples))]
        return TrainBatch(names, "eagle3", self.collate(features), {"target_repr": "hidden_state"})

    def losses(self, samples: list[FeedSample]) -> Losses:
        output = self.strategy.forward_loss(self.batch(samples))
        return Losses(output.loss, output.metrics["plosses"])

    def probe(self, sample: FeedSample) -> dict[str, Tensor]:
        logits: list[Tensor] = []
        hook = self.trained.lm_head.register_forward_hook(lambda *given: logits.append(given[2]))
        batch = self.batch([sample])
        for name in ("hidden_state", "target"):
            batch.tensors[name] = batch.tensors[name].float()
        head = VerifierHead(self.strategy.target_head.fc.weight.float())
        Eagle3TrainStrategy(self.unrolled(PROBED), target_head=head).forward_loss(batch)
        hook.remove()
        return {"logits": torch.cat(logits)}

    def save(self, folder: Path) -> None:
        """As its export to SGLang does: without the embedding, which an engine takes from the
        verifier."""
        state = self.trained.state_dict()
        served = {name: tensor for name, tensor in state.items() if "embed" not in name}
        self.trained.save_pretrained(folder, state_dict=served)
        apply_legacy_rope_scaling(str(folder))


def main() -> None:
    parser = options("SpecForge's EAGLE-3 head on a feed", depth=7)
    parser.add_argument("--fc-norm", action="store_true", help="a norm of each aux state")
    parser.add_argument("--compact-teacher", action="store_true", help="its option of that name")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    feed = Feed(args.feed)
    train(SpecForge(feed, args), feed, args)


if __name__ == "__main__":
    main()
