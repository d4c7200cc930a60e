"""Rules of draft.family=medusa: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator

from conf.schema import (
    ConfigError,
    DraftFamily,
    ExportFormat,
    LayerInit,
    RunConfig,
    Stage,
    Supervise,
)
from conf.shapes import parse_shape
from conf.unheeded import NORMS, unheeded

UNHEEDED = [  # of a decoder layer and of attention
    *((f"draft.{name}", False) for name in NORMS),
    ("draft.intermediate_size", None),
    ("draft.max_positions", None),
    ("draft.layer_init", LayerInit.random),
    ("engine.recompute", False),
]


def medusa(cfg: RunConfig) -> Iterator[str]:
    if cfg.draft.family is not DraftFamily.medusa:
        return
    yield from unheeded(cfg, UNHEEDED)
    if cfg.draft.init is not None:
        yield (
            f"draft.init={cfg.draft.init}: Medusa heads start from the verifier's rows; set "
            "draft.init=null"
        )
    if cfg.ttt.supervise is Supervise.any:
        yield (
            "ttt.supervise=any: Medusa heads read the verifier's last state, which is kept inside "
            "of answers alone; take ttt.supervise=span"
        )
    if cfg.draft.layers < 1:
        yield f"draft.layers={cfg.draft.layers}: residual blocks a head, 1 or more; try 1"
    if Stage.export in cfg.stages:
        for kind in cfg.export.formats:
            if kind is not ExportFormat.vllm:
                yield (
                    f"export.formats: {kind.value}: Medusa heads are written for vLLM alone; set "
                    "export.formats=[vllm]"
                )
    if cfg.eval.head is None:
        yield from too_deep(cfg)


def too_deep(cfg: RunConfig) -> Iterator[str]:
    """A chain or tree has a level for each head at most."""
    section, heads = cfg.eval, cfg.ttt.depth
    depths = [("valid_depth", str(section.valid_depth), section.valid_depth)]
    if Stage.eval in cfg.stages:
        depths.append(("n_draft", str(section.n_draft), section.n_draft))
        longest = max(section.n_sweep, default=0)
        depths.append(("n_sweep", str(list(section.n_sweep)), longest))
        for text in section.trees:
            try:
                depths.append(("trees", text, parse_shape(text, "eval.trees").depth))
            except ConfigError:
                continue  # which the rules of the evaluation name
    for knob, shown, depth in depths:
        if depth > heads:
            yield (
                f"eval.{knob}={shown}: {depth} levels, and ttt.depth={heads} Medusa heads guess "
                f"one each; take at most {heads}, or ttt.depth={depth}"
            )
