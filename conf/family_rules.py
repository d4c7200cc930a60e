"""Rules on the family of a draft: what only some families can, and knobs they would not heed."""

from collections.abc import Iterator

from conf.schema import FULL, DraftFamily, DraftSection, ExportFormat, Phrases, RunConfig, Stage
from conf.unheeded import unheeded

OF_PHRASES = ("phrases", "order")
MOST_ORDER = 16
UNSET = DraftSection(vocab_size=FULL)


def families(cfg: RunConfig) -> Iterator[str]:
    family = cfg.draft.family
    if cfg.engine.zero_stage == 3 and family not in (DraftFamily.eagle3, DraftFamily.ngram):
        yield (
            f"engine.zero_stage=3: gathers the weights of EAGLE-3 heads alone, and this is "
            f"draft.family={family.value}; set engine.zero_stage=2"
        )
    if family is DraftFamily.ngram:
        yield from ngram(cfg)
        return
    yield from unheeded(cfg, [(f"draft.{name}", getattr(UNSET, name)) for name in OF_PHRASES])


def ngram(cfg: RunConfig) -> Iterator[str]:
    """It has no weights: no knob of a head or a layer means anything to it."""
    others = [name for name in vars(UNSET) if name not in ("family", *OF_PHRASES)]
    yield from unheeded(cfg, [(f"draft.{name}", getattr(UNSET, name)) for name in others])
    least = 1 if cfg.draft.phrases is Phrases.table else 2
    if not least <= cfg.draft.order <= MOST_ORDER:
        yield (
            f"draft.order={cfg.draft.order}: must be in {least}..{MOST_ORDER} with "
            f"draft.phrases={cfg.draft.phrases.value}; try draft.order=4"
        )
    if Stage.export not in cfg.stages:
        return
    for kind in cfg.export.formats:
        if kind is not ExportFormat.vllm:
            yield (
                f"export.formats: {kind.value}: draft.family=ngram is described for vLLM alone; "
                "set export.formats=[vllm]"
            )
    if cfg.draft.phrases is not Phrases.context:
        yield (
            f"draft.phrases={cfg.draft.phrases.value}: vLLM looks phrases up in the context alone "
            "and reads no table; set draft.phrases=context, or leave export out of stages"
        )
