"""Trains speculators' EAGLE-3 head on a feed at its model's own level, in its own environment.

Its own are: the model and its initial values (the verifier's embedding and head rows, frozen), the
shift, packing and masks of samples, the loss, the clipping at 1 and both of its optimizers with
their weight decay; switches default to what its command line has. Its attention is "sdpa", its loss
the eager one, and the layer sees the whole sample: its window of 2048 is longer than any here.
Given here: AdamW's betas and the rates.

The model wants last states before the verifier's final norm, and a feed holds those after it. So
that norm is replaced by the identity: the targets are then the head's product with the feed's
states, exactly.

    PYTHON tests/bench/acceptance_speculators.py --feed FILE --out DIR --cpu-seconds 600
"""

import argparse
import tempfile
from pathlib import Path

import torch
from acceptance_feed import Feed, FeedSample
from acceptance_training import BETAS, PROBED, Losses, llama_settings, options, train
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 2048  # of its attention by default


def build_model(feed: Feed, args: argparse.Namespace) -> Eagle3DraftModel:
    """Through its own door, which reads embedding and head from a saved verifier."""
    facts, settings = feed.facts, llama_settings(feed.facts)
    small = {**settings, "intermediate_size": 8}  # layers that are never run
    verifier = LlamaForCausalLM(LlamaConfig(num_hidden_layers=facts.num_layers, **small))
    ends = {"model.embed_tokens.weight": feed.ends.embedding, "lm_head.weight": feed.ends.head}
    verifier.load_state_dict(ends, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        verifier.save_pretrained(folder)
        model = Eagle3DraftModel.from_training_args(
            LlamaConfig(num_hidden_layers=1, **settings),
            t2d=feed.ends.t2d,
            d2t=feed.ends.d2t,
            draft_vocab_size=facts.draft_vocab_size,
            norm_before_residual=args.norm_before_residual,
            norm_before_fc=args.norm_before_fc,
            fc_norm=args.fc_norm,
            norm_output=args.norm_output,
            ttt_steps=args.depth,
            verifier_name_or_path=folder,
            target_layer_ids=facts.aux_layers,
            draft_attn_impl="sdpa",
        )
    model.config.speculators_config.verifier.name_or_path = facts.verifier
    model.verifier_norm = nn.Identity()
    return model


class Speculators:
    packages = ("speculators", "transformers")
    clip = 1.0

    def __init__(self, feed: Feed, args: argparse.Namespace):
        longest = max(end - begin for begin, end in zip(feed.starts, feed.starts[1:], strict=False))
        if longest > WINDOW:
            raise SystemExit(f"a sample of {longest} tokens: its attention would see {WINDOW}")
        self.facts = feed.facts
        self.trained = build_model(feed, args)
        self.options = self.loss_options(args.depth, args.step_decay)
        config = TrainerConfig(
            lr=args.lr,
            num_epochs=1,
            save_path=str(args.out),
            optimizer=args.optimizer,
            muon_lr=args.lr,
        )
        self.optimizers = build_optimizers(self.trained, config)
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.AdamW):
                for group in optimizer.param_groups:
                    group["betas"] = BETAS

    def loss_options(self, depth: int, decay: float) -> dict:
        return Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation="eager",
            ttt_steps=depth,
            ttt_step_loss_decay=decay,
        )[0]

    def batch(self, samples: list[FeedSample], dtype: torch.dtype) -> dict:
        """One row, without padding, by its own functions."""
        features = [
            {
                "hidden_states": sample.aux,
                "input_ids": sample.input_ids,
                "verifier_last_hidden_states": sample.last,
                "loss_mask": sample.loss_mask,
                "lengths": torch.tensor([len(sample.input_ids)]),
                "position_ids": torch.arange(len(sample.input_ids)),
            }
            for sample in samples
        ]
        length = sum(len(sample.input_ids) - 1 for sample in samples)  # the shift drops one row
        count, width = len(self.facts.aux_layers), self.facts.hidden_size
        collate = CollateFn(length, width, count, dtype, shift_batch)
        batch = collate(features)
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    def losses(self, samples: list[FeedSample]) -> Losses:
        batch = self.batch(samples, torch.bfloat16)
        _, loss, metrics = self.trained(**batch, **self.options)
        depth = self.options["ttt_steps"]
        return Losses(loss, [metrics[f"loss_{k}_sum"] for k in range(depth)])

    def probe(self, sample: FeedSample) -> dict[str, Tensor]:
        """Also ``targets`` [T', Vd], of its loss at step 0: row t holds those of x[t+2]."""
        seen: dict[str, list[Tensor]] = {"logits": [], "targets": []}
        heads = {"logits": self.trained.lm_head, "targets": self.trained.verifier_lm_head}
        hooks = [
            head.register_forward_hook(lambda *given, name=name: seen[name].append(given[2]))
            for name, head in heads.items()
        ]
        batch = self.batch([sample], torch.float32)
        self.trained(**batch, **self.loss_options(PROBED, 1.0))
        for hook in hooks:
            hook.remove()
        return {"logits": torch.cat(seen["logits"]), "targets": seen["targets"][0][0]}

    def save(self, folder: Path) -> None:
        self.trained.save_pretrained(folder)


def main() -> None:
    parser = options("speculators' EAGLE-3 head on a feed", depth=3)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--step-decay", type=float, default=1.0, help="weight of step k: this^k")
    parser.add_argument("--norm-before-residual", action=switch, default=True)
    parser.add_argument("--norm-before-fc", action=switch, default=True)
    parser.add_argument("--norm-output", action=switch, default=True)
    parser.add_argument("--fc-norm", action=switch, default=False)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    feed = Feed(args.feed)
    train(Speculators(feed, args), feed, args)


if __name__ == "__main__":
    main()
