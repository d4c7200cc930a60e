"""speculators' EAGLE-3 step at its model's own level; runs in an environment of its own.

The four samples go through its collate function into one packed row, as in its trainer; the loss is
its eager kl_div, the attention the library's "sdpa" with its dense mask. Its draft head is
frozen by design, so it computes no gradient of the head's weights, unlike the others; its teacher
is the draft vocabulary's slice of the head, at all rows.
"""

import sys
import tempfile
from collections.abc import Callable

import torch
from contender import Outcome, run
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from workload import EPS, ROPE_THETA, Case, Shape, Workload

AUX_LAYERS = [1, 2, 3]  # their number matters alone: the states are given


def llama_config(shape: Shape, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(2048, 2 * shape.tokens),
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def build_model(work: Workload) -> Eagle3DraftModel:
    """Through its own door, which reads embedding and head from a saved verifier."""
    verifier = LlamaForCausalLM(llama_config(work.shape, layers=max(AUX_LAYERS)))
    verifier.load_state_dict(
        {"model.embed_tokens.weight": work.embedding, "lm_head.weight": work.head}, strict=False
    )
    with tempfile.TemporaryDirectory() as folder:
        verifier.save_pretrained(folder)
        model = Eagle3DraftModel.from_training_args(
            llama_config(work.shape, layers=1),
            t2d=work.t2d,
            d2t=work.d2t,
            draft_vocab_size=work.shape.draft_vocab,
            norm_before_residual=False,
            norm_before_fc=False,
            norm_output=False,
            ttt_steps=7,
            verifier_name_or_path=folder,
            target_layer_ids=AUX_LAYERS,
            draft_attn_impl="sdpa",
        )
    missing, unexpected = model.load_state_dict(renamed(work.draft), strict=False)
    left = [name for name in missing if name.startswith(("fc.", "layers.", "norm."))]
    if left or unexpected:
        raise ValueError(f"weights that do not fit: missing {left}, unexpected {unexpected}")
    return model


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}


class Speculators:
    packages = ("speculators", "transformers")

    def __init__(self, work: Workload, compiled: bool):
        self.work = work
        self.trained = build_model(work)
        self.call = torch.compile(self.trained) if compiled else self.trained

    def batch(self, share: int) -> dict:
        """Four samples in one row, shifted by one and packed by its own functions."""
        work, shape = self.work, self.work.shape
        mask = work.loss_mask(share)
        samples = [
            {
                "hidden_states": work.aux[i],
                "input_ids": work.input_ids[i],
                "verifier_last_hidden_states": work.before_norm[i],
                "loss_mask": mask[i],
                "lengths": torch.tensor([shape.tokens]),
                "position_ids": torch.arange(shape.tokens),
            }
            for i in range(shape.batch)
        ]
        length = shape.batch * shape.tokens
        collate = CollateFn(length, shape.hidden, shape.aux, torch.float32, shift_batch)
        batch = collate(samples)
        return {key: value for key, value in batch.items() if isinstance(value, Tensor)}

    def prepare(self, case: Case) -> Callable[[], Outcome]:
        if case.dtype != "float32":
            raise ValueError(f"dtype={case.dtype}: the comparison is made in float32")
        batch = self.batch(case.share)
        options = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation="eager",
            ttt_steps=case.depth,
            ttt_step_loss_decay=0.8,
        )[0]

        def forward() -> Outcome:
            _, loss, metrics = self.call(**batch, **options)
            rows = [metrics[f"full_acc_{k}_total"] for k in range(case.depth)]
            return Outcome(loss, rows)

        return forward


if __name__ == "__main__":
    sys.exit(run(Speculators))
