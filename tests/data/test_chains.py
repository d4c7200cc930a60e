"""Which rows are unrolled, how far and for what: by hand, and against the definition in a loop."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from conf.schema import Supervise
from data.chains import Chains, supervised_rows

Guess = tuple[int, int, int, int]  # document, row in it, step, position in it that is predicted
RULES = list(Supervise)


# ---- the definition: plain loops over one document ---------------------------------------------


def answers_of(mask: list[int]) -> list[tuple[int, int]]:
    """[a, b) of each stretch of ones."""
    padded = [0, *mask, 0]
    edges = [t for t in range(len(mask) + 1) if padded[t] != padded[t + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def is_supervised(mask: list[int], t: int, k: int, rule: Supervise) -> bool:
    """Does row t carry loss at step k? Its guess is x[t+2+k]."""
    for a, b in answers_of(mask):
        if a < t + 2 + k < b and (rule is Supervise.any or t + 1 >= a):
            return True
    return False


def guesses_of(masks: list[list[int]], depth: int, rule: Supervise) -> set[Guess]:
    return {
        (number, t, k, t + 1 + k)
        for number, mask in enumerate(masks)
        for t in range(len(mask))
        for k in range(depth)
        if is_supervised(mask, t, k, rule)
    }


def rows_needed(masks: list[list[int]], depth: int, rule: Supervise) -> list[list[int]]:
    """Packed rows by step that are supervised then or later, as long as there are any."""
    guesses = guesses_of(masks, depth, rule)
    begins = begins_of(masks)
    rows = [
        sorted({begins[number] + t for number, t, step, _ in guesses if step >= k})
        for k in range(depth)
    ]
    return [step for step in rows if step]


# ---- the structure, read back ------------------------------------------------------------------


def begins_of(masks: list[list[int]]) -> list[int]:
    return torch.tensor([0, *map(len, masks)]).cumsum(0).tolist()


def chains_of(masks: list[list[int]], depth: int, rule: Supervise) -> Chains:
    flat = torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool)
    return Chains.of(flat, torch.tensor(begins_of(masks)), depth, rule)


def read_back(chains: Chains, masks: list[list[int]]) -> list[Guess]:
    """All guesses as the loss takes them: by the slots that each step's emitting rows fill."""
    begins, found = begins_of(masks), []
    for k, step in enumerate(chains.steps):
        emitting = step.rows if step.emits is None else step.rows[step.emits]
        for row, slot in zip(emitting.tolist(), step.slots.tolist(), strict=True):
            number = int(chains.documents[slot])
            target = int(chains.targets[chains.targets_of[slot]])
            assert int(chains.depths[slot]) == k
            found.append((number, row - begins[number], k, target - begins[number]))
    return found


def check(masks: list[list[int]], depth: int, rule: Supervise) -> None:
    chains = chains_of(masks, depth, rule)
    expected = guesses_of(masks, depth, rule)
    found = read_back(chains, masks)
    assert len(found) == len(set(found)) and set(found) == expected
    assert chains.counts == [sum(guess[2] == k for guess in expected) for k in range(depth)]
    check_targets(chains, sum(chains.counts))
    needed = rows_needed(masks, depth, rule)
    assert [step.rows.tolist() for step in chains.steps[: len(needed)]] == needed
    check_idle(chains, len(needed))
    check_steps(chains, masks)
    firsts = [sum(guess[0] == n and guess[2] == 0 for guess in expected) for n in range(len(masks))]
    assert chains.roots.tolist() == firsts


def check_targets(chains: Chains, guesses: int) -> None:
    """Slots are all taken once, and the guesses of one target lie side by side."""
    slots = torch.cat([step.slots for step in chains.steps])
    assert slots.sort().values.tolist() == list(range(guesses))
    assert len(chains.targets.unique()) == len(chains.targets) == len(chains.ends) - 1
    assert chains.ends[0] == 0 and chains.ends[-1] == guesses
    for place, (begin, end) in enumerate(zip(chains.ends[:-1], chains.ends[1:], strict=True)):
        assert end > begin and (chains.targets_of[begin:end] == place).all()


def check_idle(chains: Chains, needed: int) -> None:
    """Steps that no chain reaches cost one row at most and emit nothing; some step is there."""
    assert chains.steps
    for step in chains.steps[needed:]:
        assert len(step.rows) == 1 and len(step.slots) == 0
        assert step.emits is not None and len(step.emits) == 0


def check_steps(chains: Chains, masks: list[list[int]]) -> None:
    """Each step's rows are among those of the step before, and fed from the right places."""
    begins, last = begins_of(masks), sum(map(len, masks)) - 1
    before, fed = chains.steps[0].rows, set()
    for k, step in enumerate(chains.steps):
        assert torch.equal(before if step.kept is None else before[step.kept], step.rows)
        places = (step.rows + k).clamp_max(last)  # an idle row may reach beyond the pack
        assert torch.equal(chains.near[step.tokens], places)
        fed |= set(places.tolist())
        owners = [max(i for i, b in enumerate(begins) if b <= row) for row in step.rows.tolist()]
        starts = torch.tensor([begins[owner] for owner in owners])
        assert torch.equal(step.positions, step.rows - starts + k)
        asked = []
        for run in step.runs.runs:
            assert step.rows[run.start : run.end].tolist() == list(
                range(run.first, run.first + run.end - run.start)
            )
            assert {int(starts[i]) for i in range(run.start, run.end)} == {run.document}
            asked += range(run.start, run.end)
        assert asked == list(range(len(step.rows)))
        before = step.rows
    assert set(chains.near.tolist()) == fed and len(chains.near) == len(fed)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", range(1, 11))
def test_every_guess_is_that_of_the_definition(depth: int, rule: Supervise):
    generator = torch.Generator().manual_seed(depth)
    for share in (0.2, 0.5, 0.8, 0.95):
        lengths = torch.randint(1, 26, (4,), generator=generator).tolist()
        masks = [(torch.rand(n, generator=generator) < share).int().tolist() for n in lengths]
        check(masks, depth, rule)


EDGES = {
    "nothing": [[0] * 6],
    "nothing in any of them": [[0] * 3, [0], [0, 0]],
    "one row": [[1]],
    "one token": [[0, 1, 0, 0]],
    "two tokens, one label": [[0, 1, 1, 0, 0, 0]],
    "all of it": [[1] * 8],
    "from the first row": [[1, 1, 1, 1, 0, 0]],
    "after one row": [[0, 1, 1, 1]],
    "to the last row": [[0, 0, 0, 1, 1, 1]],
    "answers that touch over a border": [[0, 1, 1, 1], [1, 1, 1, 1, 0], [1], [1, 1, 1]],
    "nothing between": [[1, 1, 1, 0, 1, 1, 1], [0] * 5, [0, 1, 1, 1, 1]],
    "gaps of one": [[1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1]],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masks", EDGES.values(), ids=EDGES.keys())
def test_the_edges(masks: list[list[int]], rule: Supervise):
    for depth in (1, 2, 7):
        check(masks, depth, rule)


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_tell_nothing_are_not_run(rule: Supervise):
    """Each row of each step is supervised then or later: cost follows the supervised rows."""
    mask = [0] * 500 + [1] * 20 + [0] * 500
    chains = chains_of([mask], 4, rule)
    supervised, run = sum(chains.counts), sum(len(step.rows) for step in chains.steps)
    assert run <= supervised + 3 * 4 < 0.1 * len(mask)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_supervised_row_one_idle_row_runs(rule: Supervise):
    """So that every weight takes part; it emits nothing."""
    chains = chains_of([[0] * 4, [0] * 3], 5, rule)
    check_idle(chains, 0)
    assert all(step.rows.tolist() == [0] for step in chains.steps) and chains.counts == [0] * 5
    assert len(chains.targets) == 0 and chains.ends == [0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_the_tail_of_a_document_carries_no_loss(depth: int, rule: Supervise):
    """At step k the last k+2 rows have no label, in each document of a pack."""
    masks = [[1] * 9, [1] * 12, [1] * 3]
    for number, t, k, _ in read_back(chains_of(masks, depth, rule), masks):
        assert t + 2 + k < len(masks[number])


def test_an_answer_of_three_tokens():
    """Two labels: two steps inside the answer, however deep the unroll."""
    mask = [0, 0, 0, 0, 0, 1, 1, 1]
    span = chains_of([mask], 7, Supervise.span)
    assert [step.rows.tolist() for step in span.steps[:2]] == [[4, 5], [4]]
    check_idle(span, 2)
    assert span.counts == [2, 1, 0, 0, 0, 0, 0]
    # ``any`` also starts before the answer, as far back as there are rows
    whole = chains_of([mask], 7, Supervise.any)
    assert whole.counts == [2, 2, 2, 2, 2, 1, 0]
    short = chains_of([[0, 1, 1, 1]], 7, Supervise.any)
    assert short.counts == [2, 1, 0, 0, 0, 0, 0]
    check_idle(short, 2)


def test_chains_from_the_first_row_of_a_document():
    """An answer that begins a text has no row before it; one that begins at x[1] has row 0."""
    masks = [[0, 0], [1, 1, 1, 1], [0, 1, 1, 1]]
    span = chains_of(masks, 2, Supervise.span)
    assert [step.rows.tolist() for step in span.steps] == [[2, 3, 6, 7], [2, 6]]
    assert [step.positions.tolist() for step in span.steps] == [[0, 1, 0, 1], [1, 1]]


def test_rows_from_which_a_loop_can_ask():
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    chains = Chains.of_answers(mask, torch.tensor([0, 5, 8, 10]))
    (step,) = chains.steps
    # rows t whose x[t+1] is of an answer in the same document: x[0] of a text is asked by no row
    assert step.rows.tolist() == [1, 2, 5, 8] and step.positions.tolist() == [1, 2, 0, 0]
    assert sum(chains.counts) == 0 and chains.roots.tolist() == [0, 0, 0]


def test_a_move_reaches_every_tensor():
    chains = chains_of([[0, 1, 1, 0, 1, 1, 1, 1]], 3, Supervise.any)
    there = chains.moved(lambda tensor: tensor.to("meta"))
    for before, after in [(chains, there), *zip(chains.steps, there.steps, strict=True)]:
        for part in fields(before):
            value, copied = getattr(before, part.name), getattr(after, part.name)
            if isinstance(value, Tensor):
                assert copied.device.type == "meta" and copied.shape == value.shape
            elif part.name in ("runs", "whole"):
                assert copied.runs == value.runs
                assert copied.sequences.keys.device.type == "meta"
            elif part.name != "steps":
                assert copied == value


# ---- the rows alone ------------------------------------------------------------------------------


def rows(mask: list[int], depth: int, rule: Supervise) -> list[list[int]]:
    flags = torch.tensor(mask, dtype=torch.bool)
    found = supervised_rows(flags, torch.tensor([0, len(mask)]), depth, rule)
    return [step.nonzero().flatten().tolist() for step in found]


def test_five_prompt_tokens_and_three_answer_tokens():
    # answer [5, 8): labels x[6], x[7]; step 0 at rows 4, 5; step 1 at row 4; nothing deeper
    mask = [0, 0, 0, 0, 0, 1, 1, 1]
    assert rows(mask, 4, Supervise.span) == [[4, 5], [4], [], []]


def test_any_counts_chains_that_start_before_the_answer():
    mask = [0, 0, 0, 0, 0, 1, 1, 1]
    assert rows(mask, 3, Supervise.any) == [[4, 5], [3, 4], [2, 3]]


def test_two_answers_never_share_a_chain():
    mask = [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert rows(mask, 3, Supervise.span) == [[0, 1, 5, 6], [0, 5], []]


def test_short_answers_give_fewer_steps_and_no_answer_none():
    assert rows([0, 1, 1, 0, 0, 0], 7, Supervise.span) == [[0], [], [], [], [], [], []]
    assert rows([0, 1, 0, 0], 2, Supervise.span) == [[], []]
    assert rows([0, 0, 0, 0], 2, Supervise.any) == [[], []]
