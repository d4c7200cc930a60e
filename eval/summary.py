"""How the runs become the report: pooling, grouping by task and position, intervals, warnings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema import EvalSection
from eval.acceptance import (
    AcceptanceReport,
    Counters,
    Interval,
    NgramTable,
    add_by_depth,
    percentile_interval,
    report_acceptance,
    total,
)
from eval.measure import ExactRuns, PromptRuns, count, count_floor, count_range
from eval.report import (
    UNSEEN,
    DataOrigin,
    Differing,
    EvalReport,
    EvalSettings,
    Floor,
    GroupFigures,
    Intervals,
    Lossless,
    RangeFigures,
)
from eval.speed import SpeedReport

FIRST_RANGE = 16  # generated positions; every later range is as long as all before it
SEED = 0  # of the bootstrap


def build_report(
    exact: ExactRuns,
    speed: SpeedReport,
    table: NgramTable,
    settings: EvalSettings,
    data: DataOrigin,
    provenance: dict[str, Any],
) -> EvalReport:
    """Raises ConfigError when no prompt belongs to the top level."""
    top, section = exact.top, settings.eval
    by_prompt = [count(one, section.n_draft) for one in top]
    accepted = report_acceptance(by_prompt, section.bootstrap, SEED)
    floor = floor_of(top, table, section)
    best = speed.best
    return EvalReport(
        tau=accepted.tau,
        alpha=accepted.alpha,
        alpha_by_depth=accepted.alpha_by_depth,
        survival_by_depth=accepted.survival_by_depth,
        alpha_tv=mean([value for one in top for value in one.overlap]),
        tau_if_independent=independent_tau(accepted.alpha, section.n_draft),
        ngram_floor=floor,
        c=best.c,
        speedup_decode=best.speedup_decode,
        speedup_end_to_end=best.speedup_end_to_end,
        speedup_vs_generate=speed.speedup_vs_generate,
        predicted_speedup=best.predicted_speedup,
        by_n=speed.by_n,
        baselines=speed.baselines,
        lossless=compare(top, section.temperature),
        counters=accepted.counters,
        intervals=gather_intervals(accepted, by_prompt, speed, section.bootstrap),
        tasks=by_task(exact, table, section),
        position_ranges=by_range(top, section),
        prompts=len(top),
        settings=settings,
        data=data,
        provenance=provenance,
        warnings=list_warnings(exact, data, floor.tau, accepted.tau),
    )


def by_task(exact: ExactRuns, table: NgramTable, section: EvalSection) -> dict[str, GroupFigures]:
    groups: dict[str, list[PromptRuns]] = {}
    for one in exact.top:
        groups.setdefault(one.prompt.task, []).append(one)
    tasks = {name: group(runs, table, section) for name, runs in sorted(groups.items())}
    if exact.unseen:
        tasks[UNSEEN] = group(exact.unseen, table, section)
    return tasks


def group(runs: Sequence[PromptRuns], table: NgramTable, section: EvalSection) -> GroupFigures:
    accepted = report_acceptance([count(r, section.n_draft) for r in runs], section.bootstrap, SEED)
    return GroupFigures(
        prompts=len(runs),
        tau=accepted.tau,
        tau_interval=accepted.tau_interval,
        alpha=accepted.alpha,
        alpha_interval=accepted.alpha_interval,
        alpha_by_depth=accepted.alpha_by_depth,
        survival_by_depth=accepted.survival_by_depth,
        alpha_tv=mean([value for one in runs for value in one.overlap]),
        ngram_floor_tau=floor_of(runs, table, section).tau,
        lossless=compare(runs, section.temperature),
        counters=accepted.counters,
    )


def floor_of(runs: Sequence[PromptRuns], table: NgramTable, section: EvalSection) -> Floor:
    counters = total([count_floor(one, table, section.n_draft) for one in runs])
    return Floor(table.order, counters.tau, counters)


def compare(runs: Sequence[PromptRuns], temperature: float) -> Lossless:
    """Count identical answers. Sampled ones agree in distribution, not token by token."""
    if temperature > 0:
        return Lossless(0, 0, [], "sampled answers: distribution test, see eval.lossless")
    differing = [
        Differing(one.prompt.id, answer.difference.position, answer.difference.gap)
        for one in runs
        for answer in one.answers
        if answer.difference is not None
    ]
    identical = sum(one.identical for one in runs)
    note = "token by token against plain greedy decoding, float32"
    return Lossless(len(runs), identical, differing, note)


def by_range(runs: Sequence[PromptRuns], section: EvalSection) -> list[RangeFigures]:
    """0-15, 16-31, 32-63, 64-127, ... as far as answers went."""
    ranges: list[RangeFigures] = []
    first, end = 0, FIRST_RANGE
    while first < section.max_new_tokens:
        counters = total([count_range(one, section.n_draft, first, end) for one in runs])
        if counters.rounds:
            name = f"{first}-{end - 1}"
            ranges.append(RangeFigures(name, counters.tau, counters.alpha, counters))
        first, end = end, 2 * end
    return ranges


def gather_intervals(
    accepted: AcceptanceReport, by_prompt: list[Counters], speed: SpeedReport, resamples: int
) -> Intervals:
    return Intervals(
        tau=accepted.tau_interval,
        alpha=accepted.alpha_interval,
        alpha_by_depth=accepted.alpha_by_depth_intervals,
        survival_by_depth=survival_intervals(by_prompt, resamples),
        speedup_decode=speed.best.speedup_decode_interval,
        speedup_end_to_end=speed.best.speedup_end_to_end_interval,
        speedup_vs_generate=speed.speedup_vs_generate_interval,
    )


def survival_intervals(by_prompt: list[Counters], resamples: int) -> list[Interval]:
    depth = max(len(c.accepted_by_depth) for c in by_prompt)
    accepted = np.array([add_by_depth(c.accepted_by_depth, [0] * depth) for c in by_prompt])
    rounds = np.array([c.rounds for c in by_prompt])
    draws = np.random.default_rng(SEED).integers(len(by_prompt), size=(resamples, len(by_prompt)))
    drawn = rounds[draws].sum(1)
    return [percentile_interval(accepted[:, k][draws].sum(1), drawn) for k in range(depth)]


def independent_tau(alpha: float, n: int) -> float:
    """Expected tokens a round if every guess stood with probability alpha, whatever came before."""
    return n + 1.0 if alpha == 1 else (1 - alpha ** (n + 1)) / (1 - alpha)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def list_warnings(exact: ExactRuns, data: DataOrigin, floor: float, tau: float) -> list[str]:
    """What a reader must know before using the figures."""
    found = [f"user turns not answered: {n} ({why})" for why, n in exact.skipped.items()]
    found += [f"prompt lines skipped: {n} ({why})" for why, n in data.prompts_skipped.items()]
    trained = data.longest_training_sample
    longer = sum(answer.length > trained for one in exact.runs for answer in one.answers)
    if longer:
        found.append(
            f"{longer} answers reach beyond {trained} tokens, the longest training sample; heads "
            "are often accepted less there (see the position ranges)"
        )
    if data.trained_prompts:
        found.append(
            f"{data.trained_prompts} measured prompts are training prompts, too: the figures are "
            "better than on new ones; give eval.prompts that were never trained on"
        )
    if tau <= floor:
        found.append(
            f"the head's τ ({tau:.3f}) does not clear the n-gram floor ({floor:.3f}): it has "
            "learnt no more than the training answers' phrases"
        )
    return found


def read_held_out_tau(draft_folder: Path) -> float | None:
    """The head's τ on the held-out answers, if training left it beside the weights."""
    path = draft_folder / "acceptance.json"
    tau = json.loads(path.read_text())["tau"] if path.is_file() else None
    return None if tau is None else float(tau)  # null: no held-out answer had a round
