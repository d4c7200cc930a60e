"""Acceptance by position: of the generated tokens, of the whole text, beyond the trained length."""

from collections.abc import Iterable, Sequence

from eval.acceptance import Counters
from eval.decode import Round
from eval.measure import PromptRuns, placed
from eval.report import BeyondTraining, RangeFigures

FIRST_RANGE = 16  # positions; every later range is as long as all before it
Placed = tuple[int, Round]  # the position of a round's first draft, and the round


def by_generated(runs: Sequence[PromptRuns], n_draft: int) -> list[RangeFigures]:
    """0-15, 16-31, 32-63, 64-127, ... of the answer, as far as answers went."""
    return ranges(generated_places(runs), n_draft, border=None)


def by_absolute(runs: Sequence[PromptRuns], n_draft: int, trained: int) -> list[RangeFigures]:
    """The same with the prompt's tokens counted; no range crosses the trained length."""
    return ranges(absolute_places(runs), n_draft, border=trained)


def beyond_training(
    runs: Sequence[PromptRuns], n_draft: int, trained: int
) -> BeyondTraining | None:
    """Rounds that draft at positions no training sample reached; None when there is none."""
    places = absolute_places(runs)
    beyond = count_places(places, n_draft, trained, None)
    if not beyond.rounds:
        return None
    return BeyondTraining(trained, count_places(places, n_draft, 0, trained), beyond)


def generated_places(runs: Sequence[PromptRuns]) -> list[Placed]:
    """Prefill's token has position 0 of the answer; each turn begins anew."""
    return [pair for one in runs for a in one.answers for pair in placed(a.speculative.rounds)]


def absolute_places(runs: Sequence[PromptRuns]) -> list[Placed]:
    return [
        (len(answer.prompt_ids) + at, played)
        for one in runs
        for answer in one.answers
        for at, played in placed(answer.speculative.rounds)
    ]


def ranges(places: Sequence[Placed], n_draft: int, border: int | None) -> list[RangeFigures]:
    """Doubling ranges in which a round begins; ``border`` begins a range of its own."""
    last = max((at for at, _ in places), default=-1)
    found: list[RangeFigures] = []
    first = 0
    for end in range_ends(last, border):
        counters = count_places(places, n_draft, first, end)
        if counters.rounds:
            name = f"{first}-{end - 1}"
            found.append(RangeFigures(name, counters.tau, counters.alpha, counters))
        first = end
    return found


def range_ends(last: int, border: int | None) -> list[int]:
    """Ends (exclusive) of ranges that hold the positions 0..last."""
    ends = [FIRST_RANGE]
    while ends[-1] <= last:
        ends.append(2 * ends[-1])
    if border is not None and 0 < border < ends[-1]:
        ends = sorted({*ends, border})
    return ends


def count_places(places: Iterable[Placed], n_draft: int, first: int, end: int | None) -> Counters:
    """The rounds whose first draft stands in [first, end); their tokens before any cut."""
    inside = [one for at, one in places if at >= first and (end is None or at < end)]
    emitted = sum(one.accepted + 1 for one in inside)
    return Counters.of(inside, emitted, n_draft)
