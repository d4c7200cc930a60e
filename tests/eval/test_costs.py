"""The table of single steps: which are timed, in what order, and that they leave no trace."""

from itertools import count

import pytest

from conf.shapes import chain, parse_shape
from eval import costs
from eval.costs import StepBench, against, sizes, text_of, time_steps
from eval.decode import DecodeSettings
from eval.speed import SpeedPlan, measure_speed
from eval.speed_report import CostTable
from eval.timed import Question
from models.steps import Steps
from models.verifier import Verifier

TREE = parse_shape("2x2x2", "eval.trees")
DYNAMIC = parse_shape("dynamic:nodes=9,depth=3,top_k=3", "eval.trees")


def test_levels_that_the_draft_is_fed():
    assert chain(1).fed == [] and chain(4).fed == [1, 1, 1]
    assert TREE.fed == [2, 4] and DYNAMIC.fed == [3, 3]
    assert parse_shape("[[0],[1],[2],[0,0],[1,0],[0,0,0]]", "eval.trees").fed == [2, 1]


def test_sizes_are_those_in_use_and_the_usual_ones():
    assert sizes((2, 3, 4, 8, 64), [5, 3], 8) == [2, 3, 4, 5, 8]
    assert sizes((2, 3, 4), [100], 0) == [2, 100] and sizes((), [7, 3], 99) == [3, 7]


def test_steps_take_turns_and_the_first_sweep_warms_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(costs, "SECONDS", 37.0)
    order: list[str] = []
    clock = count(1)

    def step(name: str):
        def work() -> float:
            order.append(name)
            return float(next(clock))

        return work

    found = time_steps({"a": step("a"), "b": step("b")}, "costs")
    assert order == ["a", "b"] * 13  # a warm-up of 1 + 2 seconds, then 37 // 3 sweeps
    assert found["a"] == [float(n) for n in range(3, 26, 2)]
    assert against([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0  # each by its own sweep


def test_a_text_is_as_long_as_asked():
    groups = [[Question("", [1, 2]), Question("", [7])], [Question("", [3]), Question("", [8])]]
    assert text_of(groups, 5) == [[1, 2, 3, 1, 2], [7, 8, 7, 8, 7]]


def test_steps_leave_both_sides_as_they_were(verifier: Verifier, make_draft):
    texts = [[5, 6, 7, 8, 9, 10], [4, 3, 2, 1, 4, 3]]
    bench = StepBench(Steps(verifier), make_draft(), texts, 2, DecodeSettings(8, []))
    root, ends = bench.target.root.clone(), list(bench.draft.caches[0].ends)
    assert ends == [4, 4]
    for step in (bench.plain, bench.verifying(5), bench.first, bench.feeding(1), bench.feeding(4)):
        assert step() > 0 and step() > 0
        bench.rewind()
        assert bench.target.cache.lengths.tolist() == [6, 6]
        assert bool((bench.target.root == root).all()) and bench.draft.caches[0].ends == ends


def test_the_table_agrees_with_the_loop(verifier: Verifier, make_draft, monkeypatch):
    """Within a generous factor: the machine is shared, and steps of this verifier are tiny."""
    monkeypatch.setattr(costs, "SECONDS", 0.5)
    settings = DecodeSettings(16, [])
    asked = [Question(str(i), [5 + i, 6, 7, 8]) for i in range(4)]
    shapes = [chain(1), chain(3), TREE, DYNAMIC]
    found = measure_speed(
        verifier, make_draft(), asked, settings, SpeedPlan(shapes, [1, 4], repeats=1, resamples=5)
    )
    for table, at in zip(found.costs, found.by_batch.values(), strict=True):
        assert table.batch == at.batch and table.context == 12
        assert table.verify[1] == 1.0 and {2, 4, 10, 15} <= set(table.verify)
        assert {1, 2, 3, 4} <= set(table.draft_next) and table.rest >= 0
        assert table.plain_step_seconds < 4 * at.baselines.plain_step_seconds
        for shape in shapes:
            speed = at.shapes[shape.name]
            looped = (speed.v + speed.d) / (1 - speed.split.rest)
            assert looped / 4 < table.round_cost(shape.nodes, shape.fed) < looped * 4


def test_a_round_costs_what_its_levels_feed():
    """2x2x2: the draft runs once, then on 2 nodes and on 4; leaves are never fed."""
    assert list(parse_shape("2x2x2", "test").fed) == [2, 4]
    assert list(parse_shape("[[0],[1],[0,0],[0,0,0]]", "test").fed) == [1, 1]
    table = CostTable(1, 256, 0.02, {1: 1.0, 15: 1.6}, 0.05, {1: 0.05, 2: 0.055, 4: 0.07}, 0.02)
    assert table.round_cost(14, [2, 4]) == pytest.approx(0.05 + 0.055 + 0.07 + 1.6 + 0.02)
