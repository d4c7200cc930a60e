"""The budget: how many passes over the training samples cost the FLOPs of optim.flops."""

from dataclasses import dataclass, replace

from conf.runtime import cache_dir, say
from conf.schema import ConfigError, HeadInit, LossKind, OptimSection, RunConfig
from data.amount import counts_of_training
from data.records import Samples
from models.drafts import AnyConfig
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.facts import load_facts
from models.flops import (
    Counts,
    Sizes,
    eagle1_flops,
    eagle3_flops,
    medusa_flops,
    model_flops,
    ngram_flops,
)
from models.medusa import MedusaConfig
from models.phrases import PhraseConfig
from models.small_model import ModelConfig


@dataclass(frozen=True)
class Budget:
    flops: float | None  # optim.flops; None: optim.epochs says how long
    a_pass: int = 0  # FLOPs of one pass over the training samples, attention included

    def within(self, optim: OptimSection) -> OptimSection:
        """``optim`` with the passes that the budget pays for; optim.max_steps still ends them."""
        return optim if self.flops is None else replace(optim, epochs=self.flops / self.a_pass)

    def figures(self, step: int, steps_per_epoch: int) -> dict[str, float]:
        """What ``step`` steps cost, as if all cost the same; empty without a budget."""
        return {} if self.flops is None else {"flops": self.a_pass * step / steps_per_epoch}

    def announce(self, steps: int, steps_per_epoch: int) -> None:
        if self.flops is not None:
            spent = self.a_pass * steps / steps_per_epoch
            say(
                f"{self.a_pass:.4g} FLOPs a pass over the training samples: optim.flops="
                f"{self.flops:.4g} are {self.flops / self.a_pass:.3g} passes, the {steps} steps "
                f"spend {spent:.4g}"
            )


def budget_of(cfg: RunConfig, samples: Samples, config: AnyConfig) -> Budget:
    """Every rank counts for itself, when optim.flops is given: masks are read, no states.

    Raises ConfigError when a pass costs nothing.
    """
    if cfg.optim.flops is None:
        return Budget(None)
    a_pass = flops_of_pass(cfg, config, counts_of_training(samples, cfg.ttt))
    if not a_pass:
        raise ConfigError(
            f"optim.flops={cfg.optim.flops:g}: a pass over these samples costs nothing; give "
            "optim.epochs in its place"
        )
    return Budget(cfg.optim.flops, a_pass)


def flops_of_pass(cfg: RunConfig, config: AnyConfig, counts: Counts) -> int:
    """Of one pass over samples with ``counts``, by family."""
    match config:
        case DraftConfig():
            return eagle3_flops(eagle3_sizes(cfg, config), counts).total
        case Eagle1Config():
            return eagle1_flops(eagle1_sizes(config), counts).total
        case MedusaConfig():
            return medusa_flops(medusa_sizes(cfg, config), counts).total
        case ModelConfig():
            return model_flops(model_sizes(cfg, config), counts).total
        case PhraseConfig():
            return ngram_flops().total


def eagle3_sizes(cfg: RunConfig, config: DraftConfig) -> Sizes:
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        scored=config.draft_vocab_size,
        layers=config.layers,
        aux=len(config.aux_layers),
        states_normed=config.fc_norm or config.norm_before_fc,
        head_trained=cfg.draft.head_init is not HeadInit.frozen,
        teacher=cfg.loss.kind is not LossKind.ce,
    )


def eagle1_sizes(config: Eagle1Config) -> Sizes:
    """Its head is the verifier's, frozen, and its loss always reads the verifier's logits."""
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        scored=config.vocab_size,
        head_trained=False,
    )


def medusa_sizes(cfg: RunConfig, config: MedusaConfig) -> Sizes:
    return Sizes(
        hidden=config.hidden_size,
        heads=0,
        kv_heads=0,
        head_dim=0,
        mlp=0,
        scored=config.draft_vocab_size,
        layers=config.layers,
        head_trained=not config.shared_rows,
        teacher=cfg.loss.kind is not LossKind.ce,
    )


def model_sizes(cfg: RunConfig, config: ModelConfig) -> Sizes:
    """As a dense Llama of its sizes, whatever its kind; the teacher reads the verifier's width."""
    text = config.library.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return Sizes(
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        mlp=text.intermediate_size,
        scored=config.draft_vocab_size,
        layers=text.num_hidden_layers,
        verifier=load_facts(cfg.verifier, cache_dir(cfg)).hidden_size,
        teacher=cfg.loss.kind is not LossKind.ce,
    )
