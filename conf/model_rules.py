"""Rules of draft.family=model: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator

from conf.schema import (
    FULL,
    DraftAttentionKind,
    DraftFamily,
    ExportFormat,
    HeadInit,
    LayerInit,
    RunConfig,
    Stage,
)
from conf.unheeded import NORMS, unheeded

WIDTHS = 64  # a width is a multiple of it: heads are 32 or 64 wide
UNHEEDED = [  # of heads and of their unroll
    ("draft.vocab_size", FULL),
    ("draft.head_init", HeadInit.random),
    ("draft.layer_init", LayerInit.random),
    *((f"draft.{name}", False) for name in NORMS),
    ("engine.recompute", False),
    ("engine.attention", DraftAttentionKind.auto),
]


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
    if draft.width is not None and (draft.width < WIDTHS or draft.width % WIDTHS):
        yield f"draft.width={draft.width}: must be a multiple of {WIDTHS}; try draft.width=128"
    if draft.layers < 1:
        yield f"draft.layers={draft.layers}: must be at least 1; try draft.layers=2"
    yield from unheeded(cfg, UNHEEDED)
    yield from of_init(cfg)
    if Stage.export in cfg.stages:
        for kind in cfg.export.formats:
            if kind is not ExportFormat.vllm:
                yield (
                    f"export.formats: {kind.value}: a draft of the family model is written for "
                    "vLLM alone; set export.formats=[vllm]"
                )


def of_init(cfg: RunConfig) -> Iterator[str]:
    """A model that is there has its own sizes."""
    draft = cfg.draft
    for name in ("width", "intermediate_size"):
        if draft.init is not None and getattr(draft, name) is not None:
            yield (
                f"draft.{name}={getattr(draft, name)}: the model in draft.init has its own; set "
                f"draft.{name}=null"
            )
