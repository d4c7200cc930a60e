"""The advice: what to serve, how, and when to stop, as one record with its arithmetic."""

import math
from dataclasses import dataclass, field, replace

from eval.advice.candidates import Candidate, Chains, weigh_chains, weigh_trees
from eval.advice.choice import Choice, choose, served
from eval.advice.evidence import GREEDY, Evidence, evidence_of_figures, evidence_of_report
from eval.advice.families import FamilyAdvice, choose_family, family_of_report
from eval.advice.heat import PAYS, Gate, gate_of
from eval.advice.question import Figures, Question, check_figures, check_question
from eval.advice.request_time import RequestTime, request_time
from eval.advice.serving import (
    FORBIDDEN,
    Place,
    Serving,
    for_draws,
    plain_line,
    plan_of,
    serve,
    version_of,
    why_not,
)
from eval.advice.telemetry import Signal, signals
from eval.report import EvalReport
from eval.theory import continued

SHOWN_TREES = 3


@dataclass(frozen=True)
class AtBatch:
    """What would be picked at another batch size."""

    batch: int
    chain: Candidate
    tree: Candidate | None  # the best that the stack serves


@dataclass(frozen=True)
class Advice:
    verdict: str  # on, off
    reason: str  # a sentence
    question: Question
    temperature: float
    rule: str  # of acceptance
    acceptance: str  # where it is from
    family: FamilyAdvice
    pick: Candidate
    expected: float  # decode speed-up
    overhead: float | None  # of the loop, by which untimed predictions are cut; None: not timed
    why: list[str]
    around: list[Candidate]  # three chain lengths
    band: list[int]  # first and last chain length within 1 % of the best
    longest: int  # chain measured
    trees: list[Candidate]  # that the stack serves, the best few
    by_batch: list[AtBatch]
    gate: Gate | None
    request: RequestTime | None
    serving: Serving
    notes: list[str]
    rollback: list[str] = field(default_factory=list)  # empty, as the next two, where it is off
    forbidden: list[str] = field(default_factory=list)
    telemetry: list[Signal] = field(default_factory=list)


@dataclass(frozen=True)
class Weighed:
    """Shapes at one batch size."""

    evidence: Evidence
    chains: Chains
    trees: list[Candidate]

    @classmethod
    def of(cls, evidence: Evidence) -> "Weighed":
        parts = (evidence.mix, evidence.table, evidence.timed)
        chains = weigh_chains(*parts, evidence.longest)
        return cls(evidence, chains, weigh_trees(evidence.rates, *parts))


def advise_on_report(report: EvalReport, question: Question, place: Place) -> Advice:
    """From a report. Raises ConfigError for what must not be served, or is not measured."""
    check_question(question)
    weighed = Weighed.of(evidence_of_report(report, question))
    family = family_of_report(against_floor(report, weighed), place.config)
    sizes = sorted({one.batch for one in report.costs} | {question.batch})
    others = [
        at_batch(Weighed.of(evidence_of_report(report, replace(question, batch=size))), question)
        for size in sizes
    ]
    return conclude(question, place, weighed, family, others)


def advise_on_figures(figures: Figures, question: Question, place: Place) -> Advice:
    """From alpha and c alone."""
    check_question(question)
    check_figures(figures)
    weighed = Weighed.of(evidence_of_figures(figures, question))
    return conclude(question, place, weighed, choose_family(figures, question), [])


def at_batch(weighed: Weighed, question: Question) -> AtBatch:
    tree = next((one for one in weighed.trees if served(one, question.stack)), None)
    return AtBatch(weighed.evidence.table.batch, weighed.chains.best, tree)


def conclude(
    question: Question,
    place: Place,
    weighed: Weighed,
    family: FamilyAdvice,
    others: list[AtBatch],
) -> Advice:
    """Pick, judge, and put together what serving it takes."""
    evidence, chains = weighed.evidence, weighed.chains
    choice = choose(chains, weighed.trees, question.stack)
    unfit = why_not(question.stack, version_of(question), place, family.family)
    on = unfit is None and choice.expected >= PAYS
    drafted = choice.pick if on else None
    off = Advice(
        verdict="off",
        reason=unfit or reason_of(choice),
        question=question,
        temperature=evidence.temperature,
        rule=evidence.rule,
        acceptance=evidence.mix.source,
        family=family,
        pick=choice.pick,
        expected=choice.expected,
        overhead=choice.overhead,
        why=choice.why,
        around=chains.around,
        band=chains.band,
        longest=evidence.longest,
        trees=[one for one in weighed.trees if served(one, question.stack)][:SHOWN_TREES],
        by_batch=others,
        gate=gate_for(weighed, choice.pick, place),
        request=request_time(question, evidence, drafted, choice.expected),
        serving=plain_line(question, place),
        notes=[*evidence.notes, *unproven(choice.pick), *edge_note(weighed, place)],
    )
    return turned_on(off, evidence, place) if on else off


def turned_on(off: Advice, evidence: Evidence, place: Place) -> Advice:
    """With the line that drafts, and what a drafting server is to be watched for."""
    question, stack = off.question, off.question.stack
    sampled = off.gate.rule if off.gate and evidence.rule == GREEDY else ""
    return replace(
        off,
        verdict="on",
        serving=serve(question, place, off.family.family, off.pick, evidence.rule),
        rollback=plan_of(stack),
        forbidden=FORBIDDEN[stack],
        telemetry=signals(question, off.pick, evidence, off.gate, off.request),
        notes=[*for_draws(stack, sampled), *off.notes],
    )


def gate_for(weighed: Weighed, pick: Candidate, place: Place) -> Gate | None:
    """Of the picked chain, or of the best one where a tree is picked; None without a report."""
    evidence = weighed.evidence
    if evidence.report is None:
        return None
    one = pick if pick.is_chain else weighed.chains.best
    return gate_of(evidence.heat, evidence.rule, one.nodes, one.cost, place.run)


def reason_of(choice: Choice) -> str:
    how = "timed" if choice.pick.measured is not None else "predicted"
    pick = choice.pick
    name = f"A chain of {pick.nodes}" if pick.is_chain else f"The tree {pick.shape}"
    said = f"{name} is {how} at {choice.expected:.3f}x in decoding"
    if choice.expected >= PAYS:
        return f"{said}, {choice.pick.tau:.2f} tokens a round."
    return (
        f"{said}, and no shape reaches {PAYS}x: a round costs {choice.pick.cost:.2f} plain steps "
        f"for {choice.pick.tau:.2f} tokens, so the verifier alone is as fast and simpler."
    )


def unproven(pick: Candidate) -> list[str]:
    """When too little was timed to tell that the pick pays at all."""
    low = pick.interval.low if pick.interval else math.inf
    if pick.measured is None or pick.measured < PAYS or low >= PAYS:
        return []
    return [
        f"Too little was timed: the 95 % interval of {pick.measured:.3f}x begins at {low:.3f}x, "
        f"below {PAYS}x. Time more prompts with eval.speed_prompts."
    ]


def edge_note(weighed: Weighed, place: Place) -> list[str]:
    """When the best chain is the longest measured one: how to find out, and how far it might go.

    The outlook is no advice: it keeps the last acceptance for all depths beyond, which flatters.
    """
    evidence, best = weighed.evidence, weighed.chains.best
    if not weighed.chains.at_edge:
        return []
    n = best.nodes + 1
    survival = continued(evidence.mix.survival(), n)
    outlook = 1 + sum(survival)
    said = (
        f"N={best.nodes} is the longest chain measured, and a longer one may be better: with the "
        f"last acceptance held, N={n} would yield {outlook:.2f} tokens, which is no measurement."
    )
    if evidence.report is None:
        return [said]
    again = sorted({*evidence.report.settings.eval.n_sweep, n, n + 2})
    return [
        f"{said} Measure it with python -m eval.main run.name={place.run} eval.n_draft={n + 2} "
        f"eval.n_sweep=[{','.join(map(str, again))}]."
    ]


def against_floor(report: EvalReport, weighed: Weighed) -> str:
    """The head against a table of the training answers that costs nothing to ask."""
    survival = report.ngram_floor.counters.survival_by_depth
    own = report.settings.eval.temperature
    if weighed.evidence.temperature != own:
        return f"The n-gram floor was measured at temperature {own:g} alone and is not compared."
    best, table = weighed.chains.best, weighed.evidence.table
    n = min(best.nodes, len(survival))
    if not report.ngram_floor.counters.rounds or not n:
        return "No n-gram floor was measured to compare it with."
    tau = 1 + sum(survival[:n])
    free = tau / (table.round_cost(n, []) - table.draft_first)
    verdict = "the head is ahead" if best.predicted > free else "look-up may be the better draft"
    return (
        f"An n-gram table of the training answers, which costs no draft time, would reach "
        f"{tau:.2f} tokens a round and {free:.3f}x at N={n}, the head {best.predicted:.3f}x: "
        f"{verdict}."
    )
