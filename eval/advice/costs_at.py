"""Costs of single steps at a batch size: measured, or on the line between two measured sizes."""

from collections.abc import Sequence

from eval.speed_report import CostTable, ShapeSpeed, interpolate


def table_at(costs: Sequence[CostTable], batch: int) -> CostTable:
    """The table of ``batch``, or one between its neighbours; ``batch`` lies within the measured.

    Only sizes within both neighbours' ranges are kept, so nothing is extrapolated.
    """
    known = {one.batch: one for one in costs}
    if batch in known:
        return known[batch]
    low = known[max(size for size in known if size < batch)]
    high = known[min(size for size in known if size > batch)]
    share = (batch - low.batch) / (high.batch - low.batch)

    def along(first: float, second: float) -> float:
        return first + share * (second - first)

    def merged(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
        top = min(max(first), max(second)) if first and second else 0
        sizes = sorted(size for size in {*first, *second} if size <= top)
        return {n: along(interpolate(first, n), interpolate(second, n)) for n in sizes}

    return CostTable(
        batch=batch,
        context=low.context,
        plain_step_seconds=along(low.plain_step_seconds, high.plain_step_seconds),
        verify=merged(low.verify, high.verify),
        draft_first=along(low.draft_first, high.draft_first),
        draft_next=merged(low.draft_next, high.draft_next),
        rest=along(low.rest, high.rest),
    )


def table_of_speeds(batch: int, chains: Sequence[ShapeSpeed]) -> CostTable:
    """What whole answers tell of single steps: v by length, and d as a line over the length.

    ``rest`` is not known and taken as 0, so predictions from it are a little high.
    """
    ordered = sorted(chains, key=lambda one: one.n)
    first, last = ordered[0], ordered[-1]
    step = (last.d - first.d) / (last.n - first.n) if last.n > first.n else first.c
    step = max(0.0, step)  # noise: no guess is drafted in less than no time
    return CostTable(
        batch=batch,
        context=0,
        plain_step_seconds=float("nan"),
        verify={1: 1.0} | {one.nodes + 1: one.v for one in ordered},
        draft_first=max(0.0, first.d - (first.n - 1) * step),
        draft_next={1: step},
        rest=0.0,
    )
