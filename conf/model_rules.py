"""Rules of draft.family=model: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator
from typing import Any

from conf.schema import (
    FULL,
    DraftAttentionKind,
    DraftFamily,
    ExportFormat,
    Feed,
    HeadInit,
    LayerInit,
    RunConfig,
    Stage,
    StepWeights,
)

WIDTHS = 64  # a width is a multiple of it: heads are 32 or 64 wide
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def model(cfg: RunConfig) -> Iterator[str]:
    draft = cfg.draft
    if draft.family is not DraftFamily.model:
        if draft.width is not None:
            yield (
                f"draft.width={draft.width}: has no effect with draft.family={draft.family.value}, "
                "a head is as wide as its verifier; set draft.width=null"
            )
        return
    if cfg.ttt.depth != 1:
        yield (
            f"ttt.depth={cfg.ttt.depth}: draft.family=model reads tokens alone, so one step "
            "trains them all; set ttt=one"
        )
    if cfg.engine.zero_stage == 3:
        yield (
            "engine.zero_stage=3: the held-out acceptance of draft.family=model is played on each "
            "rank with whole weights; take engine.zero_stage=2"
        )
    if draft.width is not None and (draft.width < WIDTHS or draft.width % WIDTHS):
        yield f"draft.width={draft.width}: must be a multiple of {WIDTHS}; try draft.width=128"
    if draft.layers < 1:
        yield f"draft.layers={draft.layers}: must be at least 1; try draft.layers=2"
    yield from unheeded(cfg)
    if Stage.export in cfg.stages:
        for kind in cfg.export.formats:
            if kind is not ExportFormat.vllm:
                yield (
                    f"export.formats: {kind.value}: a draft of the family model is written for "
                    "vLLM alone; set export.formats=[vllm]"
                )


def unheeded(cfg: RunConfig) -> Iterator[str]:
    """Knobs of heads, of chains that feed themselves, and, with draft.init, of a new model."""
    draft = cfg.draft
    known: list[tuple[str, Any, Any]] = [
        ("draft.vocab_size", draft.vocab_size, FULL),
        ("draft.head_init", draft.head_init, HeadInit.random),
        ("draft.layer_init", draft.layer_init, LayerInit.random),
        *((f"draft.{name}", getattr(draft, name), False) for name in NORMS),
        ("ttt.weights", cfg.ttt.weights, StepWeights.decay),
        ("ttt.feed", cfg.ttt.feed, Feed.data),
        ("engine.recompute", cfg.engine.recompute, False),
        ("engine.attention", cfg.engine.attention, DraftAttentionKind.auto),
    ]
    for knob, value, only in known:
        if value != only:
            yield (
                f"{knob}={spelled(value)}: has no effect with draft.family=model; set "
                f"{knob}={spelled(only)}"
            )
    for name in ("width", "intermediate_size"):
        if draft.init is not None and getattr(draft, name) is not None:
            yield (
                f"draft.{name}={getattr(draft, name)}: the model in draft.init has its own; set "
                f"draft.{name}=null"
            )


def spelled(value: object) -> str:
    """As a command line has it."""
    return str(getattr(value, "value", value)).lower()
