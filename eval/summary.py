"""How the runs become the report: pooling, grouping by task, intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conf.schema import EvalRule, EvalSection
from data.eval_prompts import UNSEEN
from eval.acceptance import (
    AcceptanceReport,
    Counters,
    Interval,
    RankHits,
    add_by_depth,
    percentile_interval,
    report_acceptance,
    total,
)
from eval.foretold import foretell
from eval.measure import ExactRuns, PromptRuns, count, count_answers, count_floor, count_ranks
from eval.pages.cautions import list_warnings
from eval.positions import beyond_training, by_absolute, by_generated
from eval.report import (
    DataOrigin,
    Differing,
    EvalReport,
    EvalSettings,
    Floor,
    GroupFigures,
    Intervals,
    Lossless,
    PromptCounts,
    TemperatureFigures,
)
from eval.speed_report import LIBRARY, SpeedAtBatch, SpeedFigures
from eval.temperatures import TemperatureRuns
from eval.theory import expected_tokens
from models.phrases import PhraseTable

SEED = 0  # of the bootstrap


@dataclass(frozen=True)
class Measured:
    """All that was run for one report."""

    exact: ExactRuns
    speed: SpeedFigures
    table: PhraseTable
    at_temperatures: list[TemperatureRuns] = field(default_factory=list)


def build_report(
    measured: Measured, settings: EvalSettings, data: DataOrigin, provenance: dict[str, Any]
) -> EvalReport:
    """Raises ConfigError when no prompt belongs to the top level."""
    exact, top, section = measured.exact, measured.exact.top, settings.eval
    by_prompt = [count(one, section.n_draft) for one in top]
    accepted = report_acceptance(by_prompt, section.bootstrap, SEED)
    first = first_batch(measured.speed)
    best = first.shapes[str(settings.best_n)]
    report = EvalReport(
        tau=accepted.tau,
        alpha=accepted.alpha,
        alpha_by_depth=accepted.alpha_by_depth,
        survival_by_depth=accepted.survival_by_depth,
        alpha_tv=mean_overlap(top),
        tau_if_independent=expected_tokens(accepted.alpha, section.n_draft),
        ngram_floor=floor_of(top, measured.table, section),
        c=best.c,
        speedup_decode=best.speedup_decode,
        speedup_end_to_end=best.speedup_end_to_end,
        speedup_vs_generate=first.library[LIBRARY].speedup,
        predicted_speedup=best.predicted_speedup,
        by_n={one.n: one for one in first.shapes.values() if one.is_chain},
        by_tree={name: one for name, one in first.shapes.items() if not one.is_chain},
        by_batch=measured.speed.by_batch,
        costs=measured.speed.costs,
        baselines=first.baselines,
        lossless=compare(top, section),
        counters=accepted.counters,
        intervals=gather_intervals(accepted, by_prompt, first, settings),
        tasks=by_task(exact, measured.table, section),
        position_ranges=by_generated(top, section.n_draft),
        absolute_ranges=by_absolute(top, section.n_draft, data.longest_training_sample),
        beyond_training=beyond_training(top, section.n_draft, data.longest_training_sample),
        rank_hits=known_ranks(top, section.n_draft),
        by_temperature=[at_temperature(one, section) for one in measured.at_temperatures],
        training_estimate=foretell(accepted, section.n_draft, data),
        prompts=len(top),
        by_prompt=[prompt_counts(one, section.n_draft) for one in exact.runs],
        timings=measured.speed.timings,
        settings=settings,
        data=data,
        provenance=provenance,
        warnings=[],
    )
    return replace(report, warnings=list_warnings(report, exact))


def first_batch(speed: SpeedFigures) -> SpeedAtBatch:
    """The smallest batch timed, whose speeds stand at the report's top level."""
    return speed.by_batch[min(speed.by_batch)]


def best_chain(speed: SpeedFigures) -> int:
    """The length of the fastest chain at the smallest batch size."""
    chains = [one for one in first_batch(speed).shapes.values() if one.is_chain]
    return max(chains, key=lambda one: one.speedup_decode).n


def by_task(exact: ExactRuns, table: PhraseTable, section: EvalSection) -> dict[str, GroupFigures]:
    groups: dict[str, list[PromptRuns]] = {}
    for one in exact.top:
        groups.setdefault(one.prompt.task, []).append(one)
    tasks = {name: group(runs, table, section) for name, runs in sorted(groups.items())}
    if exact.unseen:
        tasks[UNSEEN] = group(exact.unseen, table, section)
    return tasks


def group(runs: Sequence[PromptRuns], table: PhraseTable, section: EvalSection) -> GroupFigures:
    accepted = report_acceptance([count(r, section.n_draft) for r in runs], section.bootstrap, SEED)
    return GroupFigures(
        prompts=len(runs),
        tau=accepted.tau,
        tau_interval=accepted.tau_interval,
        alpha=accepted.alpha,
        alpha_interval=accepted.alpha_interval,
        alpha_by_depth=accepted.alpha_by_depth,
        survival_by_depth=accepted.survival_by_depth,
        alpha_tv=mean_overlap(runs),
        ngram_floor_tau=floor_of(runs, table, section).tau,
        lossless=compare(runs, section),
        counters=accepted.counters,
    )


def floor_of(runs: Sequence[PromptRuns], table: PhraseTable, section: EvalSection) -> Floor:
    counters = total([count_floor(one, table, section.n_draft) for one in runs])
    return Floor(table.config.order, counters.tau, counters)


def compare(runs: Sequence[PromptRuns], section: EvalSection) -> Lossless:
    """Count identical answers. Sampled ones agree in distribution, not token by token."""
    if section.temperature > 0 and section.rule is EvalRule.typical:
        return Lossless(0, 0, [], "eval.rule=typical is LOSSY: not the verifier's answers")
    if section.temperature > 0:
        return Lossless(0, 0, [], "sampled answers: distribution test, see eval.lossless")
    differing = [
        Differing(one.prompt.id, answer.difference.position, answer.difference.behind)
        for one in runs
        for answer in one.answers
        if answer.difference is not None
    ]
    identical = sum(one.identical for one in runs)
    note = "token by token against plain greedy decoding, float32"
    return Lossless(len(runs), identical, differing, note)


def gather_intervals(
    accepted: AcceptanceReport,
    by_prompt: list[Counters],
    speed: SpeedAtBatch,
    settings: EvalSettings,
) -> Intervals:
    best = speed.shapes[str(settings.best_n)]
    return Intervals(
        tau=accepted.tau_interval,
        alpha=accepted.alpha_interval,
        alpha_by_depth=accepted.alpha_by_depth_intervals,
        survival_by_depth=survival_intervals(by_prompt, settings.eval.bootstrap),
        speedup_decode=best.speedup_decode_interval,
        speedup_end_to_end=best.speedup_end_to_end_interval,
        speedup_vs_generate=speed.library[LIBRARY].speedup_interval,
    )


def survival_intervals(by_prompt: list[Counters], resamples: int) -> list[Interval]:
    depth = max(len(c.accepted_by_depth) for c in by_prompt)
    accepted = np.array([add_by_depth(c.accepted_by_depth, [0] * depth) for c in by_prompt])
    rounds = np.array([c.rounds for c in by_prompt])
    draws = np.random.default_rng(SEED).integers(len(by_prompt), size=(resamples, len(by_prompt)))
    drawn = rounds[draws].sum(1)
    return [percentile_interval(accepted[:, k][draws].sum(1), drawn) for k in range(depth)]


def mean_overlap(runs: Sequence[PromptRuns]) -> float:
    return mean([value for one in runs for value in one.overlap])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def at_temperature(one: TemperatureRuns, section: EvalSection) -> TemperatureFigures:
    by_prompt = [count_answers(answers, section.n_draft) for answers in one.conversations]
    accepted = report_acceptance(by_prompt, section.bootstrap, SEED)
    overlap = [value for answers in one.conversations for a in answers for value in a.overlap]
    return TemperatureFigures(
        temperature=one.temperature,
        rule=one.rule.value,
        tau=accepted.tau,
        alpha=accepted.alpha,
        alpha_interval=accepted.alpha_interval,
        alpha_tv=mean(overlap),
        counters=accepted.counters,
    )


def known_ranks(runs: Sequence[PromptRuns], n_draft: int) -> RankHits | None:
    """None where none was recorded."""
    found = count_ranks(runs, n_draft)
    return found if any(found.reached) else None


def prompt_counts(runs: PromptRuns, n_draft: int) -> PromptCounts:
    counters, overlap = count(runs, n_draft), runs.overlap
    return PromptCounts(
        id=runs.prompt.id,
        task=runs.prompt.task,
        digest=runs.prompt.digest,
        unseen=runs.prompt.seen is False,
        rounds=counters.rounds,
        drafted=counters.drafted,
        tested=counters.tested,
        tokens=counters.tokens,
        accepted_by_depth=counters.accepted_by_depth,
        reached_by_depth=counters.reached_by_depth,
        overlap_sum=sum(overlap),
        overlap_count=len(overlap),
    )
