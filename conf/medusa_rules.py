"""Rules of draft.family=medusa: what it needs of other sections, and knobs it would not heed."""

from collections.abc import Iterator

from conf.schema import (
    ConfigError,
    DraftFamily,
    ExportFormat,
    Feed,
    LayerInit,
    RunConfig,
    Stage,
    StepWeights,
    Supervise,
)
from conf.shapes import parse_shape

OF_A_LAYER = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def medusa(cfg: RunConfig) -> Iterator[str]:
    if cfg.draft.family is not DraftFamily.medusa:
        return
    yield from unheeded(cfg)
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


def unheeded(cfg: RunConfig) -> Iterator[str]:
    """Knobs of a decoder layer, of a chain that feeds itself, and of attention."""
    known = [(f"draft.{name}", getattr(cfg.draft, name), False) for name in OF_A_LAYER]
    known += [(f"draft.{name}", getattr(cfg.draft, name), None) for name in
              ("intermediate_size", "max_positions")]  # fmt: skip
    known += [
        ("draft.layer_init", cfg.draft.layer_init, LayerInit.random),
        ("ttt.feed", cfg.ttt.feed, Feed.data),
        ("ttt.weights", cfg.ttt.weights, StepWeights.decay),
        ("engine.recompute", cfg.engine.recompute, False),
    ]
    for knob, value, only in known:
        if value != only:
            yield (
                f"{knob}={spelled(value)}: has no effect with draft.family=medusa; set "
                f"{knob}={spelled(only)}"
            )


def spelled(value: object) -> str:
    """As a command line has it."""
    if value is None:
        return "null"
    return str(getattr(value, "value", value)).lower()


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
