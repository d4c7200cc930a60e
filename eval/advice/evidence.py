"""What advice rests on: acceptance and costs for the load asked about, of a report or given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from conf.schema import ConfigError
from eval.advice.acceptance_mix import Mix, lengthened, mixed, one_part
from eval.advice.candidates import Timed
from eval.advice.costs_at import table_at, table_of_speeds
from eval.advice.heat import Heat, Reading, pick_rule, readings_of
from eval.advice.question import EXACT, Figures, Question
from eval.report import EvalReport
from eval.speed_report import CostTable, ShapeSpeed
from eval.theory import MAX_N

TIE = 1e-3  # logits; in fp32 rounding moves them by less, and a larger gap is a fault of the loop
GREEDY = "greedy"
CHEAPER = 0.05  # by so much a step over several tokens may seem cheaper than a plain one: noise


@dataclass(frozen=True)
class Evidence:
    """All figures are for the batch size, task mix and temperature in question."""

    mix: Mix
    temperature: float
    rule: str  # of acceptance, at that temperature
    rates: list[list[float]] | None  # hit rates [depth][rank]; None: not known at this temperature
    table: CostTable
    timed: Timed
    longest: int  # chain whose acceptance and verification were measured
    notes: list[str] = field(default_factory=list)  # what was assumed, or not measured
    heat: Heat = field(default_factory=lambda: Heat([]))  # acceptance by temperature
    report: EvalReport | None = None


def evidence_of_figures(figures: Figures, question: Question) -> Evidence:
    """From alpha or a survival curve, c, and what is known of v. Raises ConfigError."""
    refuse_unknown(figures, question)
    notes = ["These figures are taken as given; nothing here measured them."]
    if not figures.verify:
        notes.append(
            "Verifying several tokens is taken to cost as much as one: --v says otherwise."
        )
    longest = max(figures.verify, default=MAX_N + 1) - 1
    if figures.survival:
        longest = min(longest, len(figures.survival))
        mix = one_part(figures.survival, "the survival curve given")
    else:
        assert figures.alpha is not None
        curve = [figures.alpha**k for k in range(1, longest + 1)]
        mix = one_part(curve, f"alpha = {figures.alpha:g} for every guess")
        notes.append("One alpha for every depth flatters long chains: acceptance mostly falls.")
    temperature = question.temperature or 0.0
    table = CostTable(
        batch=question.batch,
        context=0,
        plain_step_seconds=float("nan"),
        verify={1: 1.0} | figures.verify,
        draft_first=figures.c,
        draft_next={1: figures.c},
        rest=0.0,
    )
    rule = GREEDY if temperature == 0 else "as given"
    return Evidence(mix, temperature, rule, None, table, Timed({}), longest, notes)


def refuse_unknown(figures: Figures, question: Question) -> None:
    """Raise ConfigError for a question that these figures have no answer to."""
    if question.tasks:
        raise ConfigError(
            "--tasks: shares need the acceptance of each task, and one alpha has none; give a "
            "report of prompts with a task name each"
        )
    if not figures.survival and figures.alpha is None:
        raise ConfigError(ask_for_report("--alpha"))
    if not figures.verify and question.batch > 1:
        raise ConfigError(
            f"--batch={question.batch}: beside other sequences a verified token has a cost of its "
            "own; give it as --v 5=1.3, or give a report with eval.batch_sizes="
            f"[1,{question.batch}]"
        )


def evidence_of_report(report: EvalReport, question: Question) -> Evidence:
    """For the load in question. Raises ConfigError where the report does not cover it, with the
    command that measures what is missing."""
    refuse_lossy_report(report)
    if not report.counters.rounds:
        raise ConfigError(ask_for_report("alpha (the report counts no round)"))
    own = report.settings.eval.temperature
    temperature = own if question.temperature is None else question.temperature
    speeds = speeds_at(report, question.batch)
    curve = lengthened(report.survival_by_depth, chain_taus(speeds or report.by_n))
    heat = readings_of(report, curve)
    reading = pick_rule(report, heat, temperature, question.accept)
    mix = mix_of(report, reading, question, temperature)
    known = speeds if temperature == own and reading.rule == report.settings.accept_rule else {}
    depth = min(mix.depth, len(curve))
    load = mix.tau(depth) / one_part(curve, "").tau(depth)
    table, notes = table_for(report, question.batch)
    longest = min(mix.depth, max(table.verify) - 1)
    if longest < 1:
        raise ConfigError(ask_for_report("the cost of verifying two tokens"))
    return Evidence(
        mix=mix,
        temperature=temperature,
        rule=reading.rule,
        rates=rank_rates(report) if temperature == 0 else None,
        table=table,
        timed=Timed(known, load),
        longest=longest,
        notes=[*notes, *position_notes(report, question)],
        heat=heat,
        report=report,
    )


def ask_for_report(missing: str) -> str:
    return (
        f"{missing}: not known, and no advice can be had without it; measure it with "
        "python -m eval.main run.name=NAME and give runs/NAME/eval/report.json"
    )


def refuse_lossy_report(report: EvalReport) -> None:
    rule = report.settings.accept_rule
    if rule not in EXACT:
        raise ConfigError(
            f"settings.accept_rule={rule}: not one of the exact rules, so the report is of text "
            f"that is not the verifier's own; measure with one of {', '.join(sorted(EXACT))}"
        )
    for one in report.lossless.differing:
        if not one.behind <= TIE:  # NaN: one of the loops had ended
            raise ConfigError(
                f"lossless: prompt {one.prompt} parts from plain decoding at token {one.position} "
                f"by {one.behind:.3g} in the logits, which is no tie of rounding; find the fault "
                "with python -m eval.lossless before anything is served"
            )


def speeds_at(report: EvalReport, batch: int) -> dict[str, ShapeSpeed]:
    """Shapes timed at ``batch``, by name; none where it was not timed."""
    if report.by_batch:
        return report.by_batch[batch].shapes if batch in report.by_batch else {}
    return {str(n): one for n, one in report.by_n.items()} | report.by_tree if batch == 1 else {}


def chain_taus(shapes: Mapping[str, ShapeSpeed] | Mapping[int, ShapeSpeed]) -> dict[int, float]:
    return {one.n: one.tau for one in shapes.values() if one.is_chain}


def mix_of(report: EvalReport, reading: Reading, question: Question, temperature: float) -> Mix:
    """Survival at the temperature; with tasks, theirs, which the report has at its own alone."""
    own = report.settings.eval.temperature
    if not question.tasks:
        return one_part(reading.survival, reading.source)
    unknown = [task for task in question.tasks if task not in report.tasks]
    if unknown:
        raise ConfigError(
            f"--tasks={unknown[0]}: the report has no such task; it has "
            f"{', '.join(sorted(report.tasks)) or 'none'}"
        )
    if temperature != own or reading.rule != report.settings.accept_rule:
        raise ConfigError(
            f"--tasks at --temperature={temperature:g}: tasks were measured at {own:g} by the rule "
            f"{report.settings.accept_rule} alone; measure them with python -m eval.main "
            f"run.name={report.settings.run} eval.temperature={temperature:g}"
        )
    curves = {task: report.tasks[task].survival_by_depth for task in question.tasks}
    empty = [task for task, curve in curves.items() if not report.tasks[task].counters.rounds]
    if empty:
        raise ConfigError(f"--tasks={empty[0]}: the report counts no round of it; leave it out")
    named = ", ".join(f"{task} {share:g}" for task, share in question.tasks.items())
    return mixed(question.tasks, curves, f"survival of the tasks, by shares of the tokens: {named}")


def rank_rates(report: EvalReport) -> list[list[float]] | None:
    """[depth][rank], to the depth that rounds reached; None where it was not recorded."""
    if report.rank_hits is None:
        return None
    reached = [rate for rate in report.rank_hits.rates if not math.isnan(rate[0])]
    return reached or None


def table_for(report: EvalReport, batch: int) -> tuple[CostTable, list[str]]:
    """Costs at ``batch``, and what has to be said of them."""
    costs = report.costs
    notes: list[str] = []
    if not costs:
        timed = {b: at.shapes for b, at in report.by_batch.items()} or {
            1: {str(n): one for n, one in report.by_n.items()}
        }
        costs = [table_of_speeds(b, chains_of(shapes)) for b, shapes in timed.items()]
        notes.append("The report has no table of single steps: costs are those of whole answers.")
    sizes = sorted(one.batch for one in costs)
    nearest = min(max(batch, sizes[0]), sizes[-1])
    if nearest != batch:
        notes.append(
            f"Batch {batch} was not measured (only {', '.join(map(str, sizes))}): the costs of "
            f"batch {nearest} stand in, and beyond the largest they flatter the draft. Measure "
            f"with python -m eval.main run.name={report.settings.run} "
            f"eval.batch_sizes=[{','.join(map(str, sorted({*sizes, batch})))}]."
        )
    elif batch not in sizes:
        notes.append(f"Costs at batch {batch} lie on the line between the measured sizes {sizes}.")
    table = replace(table_at(costs, nearest), batch=batch)
    return table, [*notes, *doubtful(table)]


def doubtful(table: CostTable) -> list[str]:
    """Several tokens cannot be verified faster than one: where they are, the machine was busy."""
    n, least = min(table.verify.items(), key=lambda pair: pair[1])
    if least >= 1 - CHEAPER:
        return []
    return [
        f"Costs are not to be trusted: verifying {n} tokens took {least:.2f} of a plain step, as "
        "happens where a machine has other work. Measure again on an idle one."
    ]


def chains_of(shapes: Mapping[str, ShapeSpeed]) -> list[ShapeSpeed]:
    return [one for one in shapes.values() if one.is_chain]


def position_notes(report: EvalReport, question: Question) -> list[str]:
    """Answers longer than what the head was trained on, or than what was measured."""
    found: list[str] = []
    length = (question.prompt_length or 0) + (question.answer_length or 0)
    trained = report.data.longest_training_sample
    if length > trained:
        found.append(
            f"Requests of {length} tokens go beyond the longest training sample ({trained}): "
            "acceptance falls there; see the position ranges of the report."
        )
    limit = report.settings.eval.max_new_tokens
    if (question.answer_length or 0) > limit:
        found.append(
            f"Answers of {question.answer_length} tokens are longer than the measured ones (at "
            f"most {limit}); measure with eval.max_new_tokens={question.answer_length}."
        )
    return found
