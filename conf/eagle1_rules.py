"""Rules of draft.family=eagle1: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator

from conf.schema import (
    FULL,
    DraftFamily,
    HeadInit,
    LayerInit,
    LossKind,
    RunConfig,
)
from conf.unheeded import NORMS, unheeded

UNHEEDED = [
    ("draft.vocab_size", FULL),
    ("draft.head_init", HeadInit.frozen),
    ("draft.init", None),
    ("draft.layers", 1),
    ("draft.layer_init", LayerInit.random),
    *((f"draft.{name}", False) for name in NORMS),
    ("loss.kind", LossKind.kl),  # its default: the family has a loss of its own
    ("engine.recompute", False),
]


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
    yield from unheeded(cfg, UNHEEDED)
