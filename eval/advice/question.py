"""What a person asks of eval.tune: the load, the sampling, and the stack that will serve."""

import itertools
import math
from dataclasses import dataclass, field
from enum import Enum

from conf.schema import ConfigError


class Stack(Enum):
    vllm = "vllm"
    sglang = "sglang"
    eyrie = "eyrie"


class Accept(Enum):
    """How a stack decides on a guess when it samples."""

    auto = "auto"  # the better of the measured exact ones that the stack has
    argmax_draft = "argmax_draft"
    rejection = "rejection"
    typical = "typical"  # Medusa's; refused
    lenience = "lenience"  # Leviathan's; refused


EXACT = {"greedy", "argmax_draft", "rejection", "tree_one_hot", "tree_without_replacement"}
LOSSY = {
    Accept.typical: "accepts a guess that the verifier finds likely enough, whatever it would draw",
    Accept.lenience: "divides the verifier's share of a guess's odds by a factor below 1",
}


@dataclass(frozen=True)
class Target:
    """The latency of a request, from its start to its last token, that is to be held."""

    percentile: str  # p50 or p95
    seconds: float


@dataclass(frozen=True)
class Question:
    batch: int = 1  # sequences decoded side by side
    temperature: float | None = None  # None: that of the report
    prompt_length: int | None = None  # tokens
    answer_length: int | None = None  # tokens
    target: Target | None = None
    tasks: dict[str, float] = field(
        default_factory=dict
    )  # shares of the tokens; empty: as measured
    stack: Stack = Stack.vllm
    version: str | None = None  # of the stack; None: the one the facts were read in
    accept: Accept = Accept.auto
    dialogues: int | None = None  # that could be trained on; None: not said


@dataclass(frozen=True)
class Figures:
    """What stands in for a report: a draft's acceptance and costs, from wherever they are."""

    alpha: float | None  # per guess, whatever came before; None with a survival curve
    c: float  # a forward of the draft / a plain step of the verifier
    survival: list[float]  # [depth]; empty: alpha to the power of the depth
    verify: dict[int, float]  # tokens verified together -> v; empty: taken as 1


def refuse_lossy(accept: Accept) -> None:
    """Raise ConfigError for a rule that changes what the verifier would say."""
    if accept in LOSSY:
        raise ConfigError(
            f"--accept={accept.value}: {LOSSY[accept]}, so the text is no longer the verifier's "
            "own; use argmax_draft or rejection, which are exact"
        )


def check_question(question: Question) -> None:
    """Raise ConfigError for a question without an answer."""
    refuse_lossy(question.accept)
    for name in ("batch", "prompt_length", "answer_length"):
        value = getattr(question, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be 1 or more; try 1")
    heat = question.temperature
    if heat is not None and not 0 <= heat < math.inf:
        raise ConfigError(f"--temperature={heat}: must be 0 (greedy) or more; try 0.7")
    if question.dialogues is not None and question.dialogues < 0:
        raise ConfigError(f"--dialogues={question.dialogues}: must be 0 or more; try 0")
    if question.target and question.target.seconds <= 0:
        raise ConfigError(
            f"--latency-target={question.target.percentile}={question.target.seconds:g}: must be "
            "above 0 seconds; try p95=2.5"
        )
    if question.target and question.answer_length is None:
        raise ConfigError(
            "--latency-target: the time of a request depends on its answer; give --answer-length"
        )
    for task, share in question.tasks.items():
        if not 0 < share < math.inf:
            raise ConfigError(f"--tasks={task}={share:g}: a share must be above 0; try {task}=1")


def check_figures(figures: Figures) -> None:
    """Raise ConfigError for figures that no draft can have."""
    if figures.alpha is not None and not 0 <= figures.alpha <= 1:
        raise ConfigError(f"--alpha={figures.alpha:g}: must lie in 0 to 1; try 0.7")
    if not 0 <= figures.c < math.inf:
        raise ConfigError(f"--c={figures.c:g}: must be 0 or more; try 0.05")
    falls = [1.0, *figures.survival]
    if any(not 0 <= b <= a for a, b in itertools.pairwise(falls)):
        raise ConfigError(
            f"--survival={','.join(map(str, figures.survival))}: each must lie in 0 to the one "
            "before, for no round gets deep without passing the depths above; try 0.7,0.5,0.35"
        )
    for n, cost in figures.verify.items():
        if n < 2 or not 0 < cost < math.inf:
            raise ConfigError(
                f"--v={n}={cost:g}: must be tokens (2 or more) = cost in plain steps (above 0); "
                "try 5=1.06"
            )
