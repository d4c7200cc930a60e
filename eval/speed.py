"""How fast: plain decoding, every shape of guesses, and the library, timed in turn.

Every group of prompts is run by every method before the next group, and the order rotates from
group to group, so that a machine that slows down slows all methods alike. A method's time on a
group is the median of its repeats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from transformers.modeling_utils import PreTrainedModel

from conf.choices import EvalRule, StepKind
from conf.runtime import progress, say
from conf.shapes import MAX_NODES, Shape
from eval.costs import measure_costs
from eval.decode import DecodeSettings, decode
from eval.generation import Decoded
from eval.library import library_answers
from eval.round_plan import rule_of
from eval.speed_figures import summarise, with_rest
from eval.speed_report import ASSISTED, LIBRARY, PLAIN, SpeedFigures, Timing
from eval.timed import Question, Run, digest_of
from models.drafts import Draft
from models.steps import Steps
from models.verifier import Verifier

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class SpeedPlan:
    """What is timed, and how often."""

    shapes: Sequence[Shape]  # chains and trees, each once
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 1
    resamples: int = 2000  # behind an interval
    choice: EvalRule = EvalRule.auto
    step: StepKind = StepKind.eager  # how the verifier's steps run
    assistant: PreTrainedModel | None = field(default=None, repr=False)


Method = Callable[[list[Question]], Run]


def measure_speed(
    verifier: Verifier,
    draft: Draft,
    questions: Sequence[Question],
    settings: DecodeSettings,
    plan: SpeedPlan,
) -> SpeedFigures:
    """Time every method on every group of ``questions``, at every batch size.

    Raises ConfigError when no answer goes beyond its first token, which is prefill's.
    """
    found = SpeedFigures({}, [], [])
    steps = Steps(verifier, plan.step)
    settings = replace(settings, steps=steps)
    short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    for size in sizes_of(plan, len(questions)):
        groups = grouped(questions, size)
        prepare(steps, groups, settings.max_new_tokens, plan.shapes)
        for method in methods(verifier, draft, short, plan, size).values():
            method(groups[0])
        runs = interleave(methods(verifier, draft, settings, plan, size), groups, plan.repeats)
        at, kept = summarise(runs, plan.shapes, plan.resamples, settings.seed, steps.kind.value)
        table = measure_costs(steps, draft, groups, at, settings, plan.shapes)
        found.by_batch[size] = at
        found.costs.append(with_rest(table, at, plan.shapes))
        found.timings.extend(kept)
    return found


def prepare(
    steps: Steps, groups: Sequence[list[Question]], new_tokens: int, shapes: Sequence[Shape]
) -> None:
    """Settle how steps run and make their graphs, for texts as long as these can get.

    The room is that of the single steps timed afterwards, which verify more guesses than rounds do.
    """
    longest = max(len(one.ids) for group in groups for one in group) + new_tokens
    widths = sorted({1, *(shape.nodes + 1 for shape in shapes)})
    steps.prepare(len(groups[0]), longest + MAX_NODES + 1, widths)


def sizes_of(plan: SpeedPlan, prompts: int) -> list[int]:
    """Batch sizes, ascending; none larger than there are prompts."""
    for size in sorted(set(plan.batch_sizes)):
        if size > prompts:
            say(f"speed: {prompts} prompts are timed, so batch {size} is timed as {prompts}")
    return sorted({min(size, prompts) for size in plan.batch_sizes})


def grouped(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Full groups in the order of the prompts; a last smaller one is left out, and that is said."""
    count = len(questions) // size
    if left := len(questions) - count * size:
        say(f"speed: batch {size} leaves out the last {left} of {len(questions)} prompts")
    return [list(questions[i * size : (i + 1) * size]) for i in range(count)]


def methods(
    verifier: Verifier,
    draft: Draft,
    settings: DecodeSettings,
    plan: SpeedPlan,
    size: int,
) -> dict[str, Method]:
    """Name -> a function from a group to its run; shapes have their own names."""

    def own(head: Draft | None, given: DecodeSettings, name: str) -> Method:
        return lambda group: run_of(
            name, group, decode(verifier, head, [one.ids for one in group], given)
        )

    def shaped(shape: Shape) -> Method:
        rule = rule_of(plan.choice, shape, settings.sampling)
        given = replace(settings, shape=shape, rule=rule, measure_overlap=False)
        return own(draft, given, shape.name)

    def library(assistant: PreTrainedModel | None, name: str) -> Method:
        return lambda group: library_answers(verifier, assistant, group, settings, name)

    found = {PLAIN: own(None, settings, PLAIN)}
    found |= {shape.name: shaped(shape) for shape in plan.shapes}
    found[LIBRARY] = library(None, LIBRARY)
    if plan.assistant is not None and size == 1:  # the library takes no more
        found[ASSISTED] = library(plan.assistant, ASSISTED)
    return found


def interleave(
    methods: dict[str, Method], groups: Sequence[list[Question]], repeats: int
) -> dict[str, list[Run]]:
    """Each group through all methods, each time beginning one method later; the medians."""
    names = list(methods)
    visits = [i for _ in range(repeats) for i in range(len(groups))]
    turns = [
        (names[(start + k) % len(names)], i)
        for start, i in enumerate(visits)
        for k in range(len(names))
    ]
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in groups] for name in names}
    for name, i in progress(turns, len(turns), f"speed, batch {len(groups[0])}", "run"):
        runs[name][i].append(methods[name](groups[i]))
    return {name: [middle(again) for again in of] for name, of in runs.items()}


def middle(runs: Sequence[Run]) -> Run:
    """The run with the median time after prefill; prefill and latencies by their own medians.

    One run, so that its parts belong together; of an even number the quicker of the two.
    """
    chosen = sorted(runs, key=lambda one: one.timing.decode_seconds)[(len(runs) - 1) // 2]
    prefill = median(one.timing.prefill_seconds for one in runs)
    requests = [median(times) for times in zip(*(one.requests for one in runs), strict=True)]
    return Run(replace(chosen.timing, prefill_seconds=prefill), requests)


def run_of(method: str, group: Sequence[Question], decoded: Decoded) -> Run:
    """One of our own loop's."""
    generations, times = decoded.generations, decoded.times
    rounds = [one for generation in generations for one in generation.rounds]
    timing = Timing(
        batch=len(group),
        method=method,
        prompts=[one.id for one in group],
        digest=digest_of(group),
        tokens=sum(len(one.tokens) for one in generations),
        first_tokens=len(generations),
        prefill_seconds=times.prefill,
        decode_seconds=times.decode,
        draft_seconds=times.draft,
        verify_seconds=times.verify,
        rounds=len(rounds),
        accepted=sum(one.accepted for one in rounds),
    )
    return Run(timing, [one.seconds for one in generations])
