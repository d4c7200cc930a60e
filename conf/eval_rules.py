"""What the knobs of the evaluation must satisfy, alone and together."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from conf.schema import (
    ConfigError,
    Device,
    EvalRule,
    RunConfig,
    Stage,
    StepKind,
)
from conf.shapes import MAX_NODES, DynamicShape, parse_shape

MOST_RESAMPLES = 1_000_000
COLDEST, HOTTEST = 1e-6, 1e6  # beyond: argmax or chance, and then no float32 numbers at all
TEMPERATURES = f"0, or from {COLDEST:g} to {HOTTEST:g}"


def is_temperature(value: float) -> bool:
    return value == 0 or COLDEST <= value <= HOTTEST


def evaluation(cfg: RunConfig) -> Iterator[str]:
    yield from lengths(cfg)
    yield from filters(cfg)
    yield from shapes_and_rule(cfg)
    if "" in cfg.eval.stop:
        yield "eval.stop: has an empty string, which would end every answer; remove it"
    if cfg.eval.step is StepKind.graphed and cfg.run.device is Device.cpu:
        yield (
            "eval.step=graphed: CUDA graphs need run.device=cuda; take eval.step=auto or "
            "eval.step=eager"
        )


def lengths(cfg: RunConfig) -> Iterator[str]:
    section = cfg.eval
    for knob, values, remedy in (
        ("n_sweep", section.n_sweep, "chain lengths"),
        ("batch_sizes", section.batch_sizes, "numbers of sequences"),
    ):
        if not values or min(values) < 1 or len(set(values)) < len(values):
            default = "[1,2,3,4,5]" if knob == "n_sweep" else "[1]"
            yield f"eval.{knob}={list(values)}: {remedy} from 1, none twice; try {default}"
    for knob, length in (
        ("n_draft", section.n_draft),
        ("n_sweep", max(section.n_sweep, default=0)),
        ("valid_depth", section.valid_depth),
    ):
        if length > MAX_NODES:
            yield f"eval.{knob}={length}: a chain has at most {MAX_NODES} guesses; try 5"


def filters(cfg: RunConfig) -> Iterator[str]:
    """At temperature 0 they are allowed and change nothing: eval.temperatures may be warmer."""
    section = cfg.eval
    if section.top_k < 0:
        yield f"eval.top_k={section.top_k}: must be at least 0; 0 keeps all tokens"
    if not 0 < section.top_p <= 1:
        yield f"eval.top_p={section.top_p}: must be above 0 and at most 1; 1 keeps all tokens"
    if not 0 <= section.min_p <= 1:
        yield f"eval.min_p={section.min_p}: must be at least 0 and at most 1; 0 keeps all tokens"
    warm = section.temperatures
    if not all(map(is_temperature, warm)) or len(set(warm)) < len(warm):
        yield (f"eval.temperatures={list(warm)}: each {TEMPERATURES}, none twice; try [0,0.5,1]")
    if section.bootstrap > MOST_RESAMPLES:
        yield (
            f"eval.bootstrap={section.bootstrap}: at most {MOST_RESAMPLES}, the memory they take "
            "grows with them; try eval.bootstrap=2000"
        )


def shapes_and_rule(cfg: RunConfig) -> Iterator[str]:
    """Trees can be read, and eval.rule says something about what is measured."""
    section = cfg.eval
    shapes = []
    for text in section.trees:
        try:
            shapes.append(parse_shape(text, "eval.trees"))
        except ConfigError as error:
            yield str(error)
    if len({shape.name for shape in shapes}) < len(section.trees):
        yield f"eval.trees={list(section.trees)}: lists a shape twice; leave one of them"
    if section.rule is EvalRule.auto:
        return
    if max([section.temperature, *section.temperatures]) == 0:
        yield (
            f"eval.rule={section.rule.value}: at temperature 0 every rule is greedy; take "
            "eval.rule=auto, or set eval.temperature or eval.temperatures above 0"
        )
    dynamic = [shape.name for shape in shapes if isinstance(shape, DynamicShape)]
    if section.rule is EvalRule.rejection and section.temperature > 0 and dynamic:
        yield (
            f"eval.rule=rejection: needs guesses drawn from the draft, and eval.trees has "
            f"{dynamic[0]}, which chooses them by confidence; take eval.rule=auto or a tree as "
            "2x2x2"
        )


def evaluation_inputs(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """The folder of the small model must be there when the evaluation runs."""
    small = cfg.eval.assistant
    if small is None or Stage.eval not in running:
        return
    if not (Path(small).expanduser() / "config.json").is_file():
        yield (
            f"eval.assistant={small}: no folder with a config.json; give that of a small model "
            "with the verifier's tokenizer, or null"
        )
