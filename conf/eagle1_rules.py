"""Rules of draft.family=eagle1: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator

from conf.schema import (
    FULL,
    DraftFamily,
    Feed,
    HeadInit,
    LayerInit,
    LossKind,
    RunConfig,
    StepWeights,
)

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def eagle1(cfg: RunConfig) -> Iterator[str]:
    if cfg.draft.family is not DraftFamily.eagle1:
        return
    given = cfg.verifier.aux_layers
    if given is None or len(given) != 1:
        shown = "null" if given is None else list(given)
        yield (
            f"verifier.aux_layers={shown}: draft.family=eagle1 reads the stream after the last "
            "layer alone; set verifier.aux_layers=[-1], as draft=eagle1 does"
        )
    if cfg.ttt.depth != 1:
        yield (
            f"ttt.depth={cfg.ttt.depth}: draft.family=eagle1 is trained one step deep; set ttt=one"
        )
    if cfg.engine.zero_stage == 3:
        yield (
            "engine.zero_stage=3: scatters the weights, which draft.family=eagle1 needs whole on "
            "each rank to measure acceptance; set engine.zero_stage=2"
        )
    draft = cfg.draft
    for knob, value, only in (
        ("draft.vocab_size", draft.vocab_size, FULL),
        ("draft.head_init", draft.head_init, HeadInit.frozen),
        ("draft.init", draft.init, None),
        ("draft.layers", draft.layers, 1),
        ("draft.layer_init", draft.layer_init, LayerInit.random),
        *((f"draft.{name}", getattr(draft, name), False) for name in NORMS),
        ("ttt.weights", cfg.ttt.weights, StepWeights.decay),
        ("ttt.feed", cfg.ttt.feed, Feed.data),
        ("loss.kind", cfg.loss.kind, LossKind.kl),  # its default: the family has a loss of its own
        ("engine.recompute", cfg.engine.recompute, False),
    ):
        if value != only:
            yield (
                f"{knob}={words(value)}: has no effect with draft.family=eagle1; set "
                f"{knob}={words(only)}"
            )


def words(value: object) -> str:
    """As a command line has it."""
    plain = getattr(value, "value", value)
    return "null" if plain is None else str(plain).lower() if plain in (True, False) else str(plain)
