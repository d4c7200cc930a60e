"""What the figures of any report must satisfy: a file that was edited or damaged is told here."""

from collections.abc import Iterator

from eval.acceptance import Counters, total
from eval.report import EvalReport
from eval.speed_report import PLAIN, CostTable


def impossible(report: EvalReport) -> Iterator[str]:
    """Each: a key and what is wrong with it. What was not measured, a null, is allowed."""
    counted = {
        "counters": report.counters,
        **{f"tasks.{name}.counters": task.counters for name, task in report.tasks.items()},
        **{f"by_prompt.{i}": one.counters for i, one in enumerate(report.by_prompt)},
        **{f"by_temperature.{i}": one.counters for i, one in enumerate(report.by_temperature)},
    }
    for key, counters in counted.items():
        if wrong := wrong_counters(counters):
            yield f"{key}: {wrong}"
    whole = total([one.counters for one in report.by_prompt if not one.unseen])
    if whole != report.counters:
        yield "counters: are not the sum of by_prompt"
    for i, table in enumerate(report.costs):
        if wrong := wrong_costs(table):
            yield f"costs.{i}: {wrong}"
    ranks = report.rank_hits
    if ranks is not None and len(ranks.hits) != len(ranks.reached):
        yield "rank_hits: hits and reached have other depths"
    if any(length < 1 or one.n != length for length, one in report.by_n.items()):
        yield "by_n: a key is not its chain's length"
    yield from wrong_timings(report)


def wrong_counters(one: Counters) -> str | None:
    accepted, reached = one.accepted_by_depth, one.reached_by_depth
    if len(accepted) != len(reached):
        return "accepted_by_depth and reached_by_depth have other depths"
    numbers = [one.rounds, one.drafted, one.tested, one.tokens, *accepted]
    if min(numbers) < 0 or sum(reached) != one.tested:
        return "counts are 0 or more, and tested is the sum of reached_by_depth"
    above = [one.rounds, *accepted]
    if any(not a <= r <= up for a, r, up in zip(accepted, reached, above[:-1], strict=True)):
        return "no depth is reached more often than the one above was accepted"
    return None


def wrong_costs(table: CostTable) -> str | None:
    values = [table.plain_step_seconds, *table.verify.values(), *table.draft_next.values()]
    if len(table.verify) < 2 or not table.draft_next:
        return "verify needs two sizes or more, and draft_next one"
    if not all(value > 0 for value in [*values, table.draft_first]) or not table.rest >= 0:
        return "times are above 0"
    return None


def wrong_timings(report: EvalReport) -> Iterator[str]:
    """Every method answers what the plain loop answers."""
    groups = {(one.batch, one.digest) for one in report.timings if one.method == PLAIN}
    for i, one in enumerate(report.timings):
        if (one.batch, one.digest) not in groups:
            yield f"timings.{i}: the plain loop has none for these prompts"
        if one.batch < 1 or not one.decode_seconds >= 0 or not one.prefill_seconds >= 0:
            yield f"timings.{i}: a batch is 1 or more, and seconds are 0 or more"
