"""Which figures two reports share, as formulas over the raw counters and times they hold."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from eval.acceptance import add_by_depth
from eval.differences import Compared, Formula, Prompts, Resampling, Sums, compare_prompts
from eval.report import EvalReport, PromptCounts
from eval.speed_report import PLAIN, ShapeSpeed, Timing

# Columns of a prompt's counters; accepted at depth 1, 2, ... and reached at depth 1, 2, ... follow.
ROUNDS, TESTED, ACCEPTED, OVERLAP, OVERLAPS, BY_DEPTH = range(6)
# Columns of a prompt's times: the shape's, then the plain loop's.
TOKENS, FIRST, PREFILL, DECODE, DRAFT, VERIFY, PLAYED = range(7)
WIDTH = 7  # columns of one method


def compare_acceptance(a: EvalReport, b: EvalReport, how: Resampling) -> list[Compared]:
    """Top level, then each task both have, then the patterns never seen."""
    depth = min(len(a.alpha_by_depth), len(b.alpha_by_depth))
    tops = [[one for one in report.by_prompt if not one.unseen] for report in (a, b)]
    found = compare_counts([*main_formulas(""), *depth_formulas(depth)], tops, depth, how)
    tasks = {one.task for one in tops[0]} & {one.task for one in tops[1]}
    for task in sorted(tasks) if len(tasks) > 1 else []:
        both = [[one for one in top if one.task == task] for top in tops]
        found += compare_counts(main_formulas(f"{task}: ")[:2], both, depth, how)
    unseen = [[one for one in report.by_prompt if one.unseen] for report in (a, b)]
    return found + compare_counts(main_formulas("unseen patterns: ")[:2], unseen, depth, how)


def compare_counts(
    formulas: Sequence[Formula],
    both: list[list[PromptCounts]],
    depth: int,
    how: Resampling,
) -> list[Compared]:
    a, b = (prompts_of(counts, depth) for counts in both)
    return compare_prompts(formulas, a, b, how)


def prompts_of(counts: Sequence[PromptCounts], depth: int) -> Prompts:
    rows = [
        [
            one.rounds,
            one.tested,
            sum(one.accepted_by_depth),
            one.overlap_sum,
            one.overlap_count,
            *add_by_depth(one.accepted_by_depth, [0] * depth)[:depth],
            *add_by_depth(one.reached_by_depth, [0] * depth)[:depth],
        ]
        for one in counts
    ]
    return Prompts([(one.id, one.digest) for one in counts], np.array(rows, np.float64))


def quotient(part: int, whole: int) -> Callable[[Sums], NDArray[np.float64]]:
    return lambda sums: np.divide(sums[..., part], sums[..., whole])


def main_formulas(group: str) -> list[Formula]:
    return [
        Formula(f"{group}τ", lambda sums: 1 + np.divide(sums[..., ACCEPTED], sums[..., ROUNDS])),
        Formula(f"{group}α", quotient(ACCEPTED, TESTED)),
        Formula(f"{group}α_tv", quotient(OVERLAP, OVERLAPS)),
    ]


def depth_formulas(depth: int) -> list[Formula]:
    conditional = [
        Formula(f"α_{k + 1}", quotient(BY_DEPTH + k, BY_DEPTH + depth + k)) for k in range(depth)
    ]
    survival = [Formula(f"survival_{k + 1}", quotient(BY_DEPTH + k, ROUNDS)) for k in range(depth)]
    return conditional + survival


def compare_speed(a: EvalReport, b: EvalReport, how: Resampling) -> list[Compared]:
    """Every shape both were timed with at a batch size, and the best of each at its size."""
    found: list[Compared] = []
    for batch in sorted(a.by_batch.keys() & b.by_batch.keys()):
        at_a, at_b = a.by_batch[batch], b.by_batch[batch]
        where = f"batch {batch}, "
        if at_a.best != at_b.best:
            names = f"{where}best of each ({at_a.best}; {at_b.best}): "
            formulas = speed_formulas(names)
            found += compare_times(formulas, (a, b), batch, (at_a.best, at_b.best), how)
        for name, shape in at_a.shapes.items():
            if name in at_b.shapes:
                formulas = speed_formulas(f"{where}{shape.label}: ") + cost_formulas(where, shape)
                found += compare_times(formulas, (a, b), batch, (name, name), how)
    return found


def compare_times(
    formulas: Sequence[Formula],
    reports: tuple[EvalReport, EvalReport],
    batch: int,
    methods: tuple[str, str],
    how: Resampling,
) -> list[Compared]:
    a, b = (
        times_of(report.timings, batch, method)
        for report, method in zip(reports, methods, strict=True)
    )
    return compare_prompts(formulas, a, b, how)


def times_of(timings: Sequence[Timing], batch: int, method: str) -> Prompts:
    """One method and the plain loop on each batch of prompts [P, 2 * WIDTH]."""
    here = [one for one in timings if one.batch == batch]
    plain = {key_of(one): one for one in here if one.method == PLAIN}
    pairs = [(one, plain[key_of(one)]) for one in here if one.method == method]
    rows = [[*columns(one), *columns(without)] for one, without in pairs]
    return Prompts([key_of(one) for one, _ in pairs], np.array(rows, np.float64))


def key_of(one: Timing) -> tuple[str, str]:
    return "\n".join(one.prompts), one.digest


def columns(one: Timing) -> list[float]:
    seconds = [one.prefill_seconds, one.decode_seconds, one.draft_seconds, one.verify_seconds]
    return [one.tokens, one.first_tokens, *seconds, one.rounds]


def decode_rate(sums: Sums, method: int = 0) -> NDArray[np.float64]:
    """Tokens a second after prefill; ``method`` 1 is the plain loop's."""
    at = WIDTH * method
    return np.divide(sums[..., at + TOKENS] - sums[..., at + FIRST], sums[..., at + DECODE])


def whole_rate(sums: Sums, method: int = 0) -> NDArray[np.float64]:
    at = WIDTH * method
    return np.divide(sums[..., at + TOKENS], sums[..., at + PREFILL] + sums[..., at + DECODE])


def speed_formulas(group: str) -> list[Formula]:
    return [
        Formula(
            f"{group}speed-up, decode", lambda s: decode_rate(s) / decode_rate(s, 1), speed=True
        ),
        Formula(
            f"{group}speed-up, end to end", lambda s: whole_rate(s) / whole_rate(s, 1), speed=True
        ),
        Formula(f"{group}tokens/s, decode", decode_rate, speed=True),
    ]


def cost_formulas(where: str, shape: ShapeSpeed) -> list[Formula]:
    """Of a round, in plain steps: the draft's time and the verifier's."""

    def steps(column: int) -> Callable[[Sums], NDArray[np.float64]]:
        return lambda s: np.divide(s[..., column], s[..., PLAYED]) * decode_rate(s, 1)

    group = f"{where}{shape.label}: "
    return [Formula(f"{group}d", steps(DRAFT)), Formula(f"{group}v", steps(VERIFY))]
