"""The budget: how many passes over the training samples cost the FLOPs of optim.flops."""

from dataclasses import dataclass, replace

from conf.runtime import say
from conf.schema import ConfigError, HeadInit, LossKind, OptimSection, RunConfig
from data.amount import counts_of_training
from data.records import Samples
from models.eagle3 import DraftConfig
from models.flops import Counts, Sizes, eagle3_flops


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


def budget_of(cfg: RunConfig, samples: Samples, config: DraftConfig) -> Budget:
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


def flops_of_pass(cfg: RunConfig, config: DraftConfig, counts: Counts) -> int:
    return eagle3_flops(eagle3_sizes(cfg, config), counts).total


def eagle3_sizes(cfg: RunConfig, config: DraftConfig) -> Sizes:
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate_size,
        scored=config.draft_vocab_size,
        aux=len(config.aux_layers),
        states_normed=config.fc_norm or config.norm_before_fc,
        head_trained=cfg.draft.head_init is not HeadInit.frozen,
        teacher=cfg.loss.kind is not LossKind.ce,
    )
