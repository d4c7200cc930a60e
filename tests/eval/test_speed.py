"""Speed arithmetic on hand-made timings, the order in which methods run, and what repeats keep."""

from dataclasses import replace

import pytest

from conf.choices import EvalRule
from conf.schema import ConfigError
from conf.shapes import chain, parse_shape
from eval import costs
from eval.decode import DecodeSettings
from eval.round_plan import rule_of
from eval.speed import SpeedPlan, grouped, interleave, measure_speed, methods, middle, sizes_of
from eval.speed_figures import summarise, with_rest
from eval.speed_report import LIBRARY, PLAIN, CostTable, SpeedAtBatch, Timing
from eval.timed import Question, Run, digest_of
from models.sampling import Sampling
from models.verifier import Verifier

TREE = parse_shape("[[0],[1],[0,0]]", "eval.trees")
SHAPES = [chain(1), chain(2)]


def run(tokens: int, prefill: float, decode: float, *rounds: float, batch: int = 1) -> Run:
    """``rounds``: seconds drafting, seconds verifying, rounds, accepted guesses."""
    names = [f"p{tokens}.{row}" for row in range(batch)]
    draft, verify, played, accepted = rounds or (0.0, 0.0, 0, 0)
    timing = Timing(
        batch, PLAIN, names, "", tokens, batch, prefill, decode, draft, verify, int(played),
        int(accepted),
    )  # fmt: skip
    return Run(timing, [prefill + decode] * batch)


def runs() -> dict[str, list[Run]]:
    """Plain: 10 tokens/s. N=1: rounds of 0.11 + 0.02 s. N=2: rounds of 0.12 + 0.05 s."""
    return {
        PLAIN: [run(11, 0.5, 1.0), run(21, 0.5, 2.0)],
        "1": [run(11, 0.6, 0.78, 0.12, 0.66, 6, 5), run(21, 0.6, 1.56, 0.24, 1.32, 12, 9)],
        "2": [run(11, 0.6, 0.95, 0.25, 0.60, 5, 6), run(21, 0.6, 1.90, 0.50, 1.20, 10, 10)],
        LIBRARY: [run(11, 0.0, 2.2), run(21, 0.0, 4.2)],
    }


def figures(found: dict[str, list[Run]], resamples: int = 50) -> SpeedAtBatch:
    return summarise(found, SHAPES, resamples, 0, "eager")[0]


def test_figures_follow_their_definitions():
    at = figures(runs(), 500)
    base = at.baselines
    assert (at.batch, base.prompts, base.tokens, base.step) == (1, 2, 32, "eager")
    assert base.plain_step_seconds == pytest.approx(0.1)  # 30 tokens after the first, 3 s
    assert base.plain_tokens_per_second_decode == pytest.approx(10)
    assert base.plain_tokens_per_second_end_to_end == pytest.approx(32 / 4)
    assert base.prefill_seconds == pytest.approx(0.5)
    assert (base.latency.p50, base.latency.p95) == pytest.approx((2.0, 2.45))

    one = at.shapes["1"]
    assert one.tau == pytest.approx(1 + 14 / 18)
    assert (one.v, one.d, one.c) == pytest.approx((1.1, 0.2, 0.2))
    assert one.predicted_speedup == pytest.approx((1 + 14 / 18) / 1.3)
    assert one.tokens_per_second_decode == pytest.approx(30 / 2.34)
    assert one.speedup_decode == pytest.approx(30 / 2.34 / 10)
    assert one.speedup_end_to_end == pytest.approx((32 / 3.54) / (32 / 4))
    assert one.measured_over_predicted == pytest.approx(30 / 2.34 / 10 / ((1 + 14 / 18) / 1.3))
    assert (one.split.draft, one.split.verify) == pytest.approx((0.36 / 2.34, 1.98 / 2.34))

    two = at.shapes["2"]
    assert (two.tau, two.v, two.d, two.c) == pytest.approx((1 + 16 / 15, 1.2, 0.5, 0.25))
    assert two.speedup_decode == pytest.approx(30 / 2.85 / 10)
    assert two.split.rest == pytest.approx(0.3 / 2.85)

    assert at.best == "1"
    versus = at.library[LIBRARY]
    assert versus.tokens_per_second == pytest.approx(32 / 6.4)
    assert versus.speedup == pytest.approx((32 / 3.54) / (32 / 6.4))
    # Every prompt has the same rates after prefill, so no resample can differ.
    assert one.speedup_decode_interval.low == pytest.approx(one.speedup_decode)
    assert one.speedup_decode_interval.high == pytest.approx(one.speedup_decode)
    interval = one.speedup_end_to_end_interval
    assert interval.low < one.speedup_end_to_end < interval.high


def test_a_batch_that_shrinks_is_predicted_right():
    """Two sequences of 20 and 10 tokens after prefill; a step is 0.1 s, whoever is in it.

    Rounds cost two steps and give two tokens, so whatever the company the speed stays the same.
    """
    found = {
        PLAIN: [run(32, 0.5, 2.0, batch=2)],
        "1": [run(32, 0.5, 2.0, 0.6, 1.4, 15, 15, batch=2)],  # 10 rounds, 5 with both
        "2": [run(32, 0.5, 4.0, 1.2, 2.8, 15, 15, batch=2)],
        LIBRARY: [run(32, 0.0, 4.0, batch=2)],
    }
    at = figures(found)
    assert at.baselines.plain_step_seconds == pytest.approx(2 * 2.0 / 30)
    one = at.shapes["1"]
    assert (one.tau, one.v + one.d) == (2.0, pytest.approx(2.0))
    assert one.predicted_speedup == pytest.approx(one.speedup_decode) == pytest.approx(1.0)
    assert at.shapes["2"].measured_over_predicted == pytest.approx(1.0)
    low = one.speedup_decode_interval.low
    assert low != low, "one group says nothing of the choice of prompts"


def test_an_answer_of_one_token_is_not_timed():
    data = runs()
    for of in data.values():
        of.append(run(1, 0.5, 0.0))
    assert summarise(data, SHAPES, 10, 0, "eager") == summarise(runs(), SHAPES, 10, 0, "eager")
    only = {name: [run(1, 0.5, 0.0)] for name in data}
    with pytest.raises(ConfigError, match=r"all 1 answers end.*eval\.prompts"):
        figures(only)


def test_no_draft_accepted_and_all_accepted_stay_finite():
    data = runs()
    data["1"] = [run(11, 0.6, 1.3, 0.2, 1.1, 10, 0)] * 2
    data["2"] = [run(11, 0.6, 0.68, 0.2, 0.48, 4, 8)] * 2
    at = figures(data)
    assert (at.shapes["1"].tau, at.shapes["2"].tau) == (1.0, 3.0)
    assert at.best == "2"


def test_the_rest_of_a_round_closes_the_table():
    """In the loop N=1 takes 1.3 steps a round and N=2 takes 1.9; single steps 1.25 and 1.75."""
    at = figures(runs())
    table = CostTable(1, 8, 0.1, {1: 1.0, 2: 1.05, 3: 1.15}, 0.2, {1: 0.4}, 0.0)
    closed = with_rest(table, at, SHAPES)
    assert closed.rest == pytest.approx((0.05 + 0.15) / 2)
    assert closed.round_cost(1, chain(1).fed) == pytest.approx(1.35)
    dear = replace(table, draft_first=9.0)
    assert with_rest(dear, at, SHAPES).rest == 0


def test_every_group_is_run_by_every_method_and_the_order_rotates():
    order: list[tuple[str, str]] = []

    def method(name: str):
        def answer(group: list[Question]) -> Run:
            order.append((name, group[0].id))
            return run(3, 0.0, float(len(order)))

        return answer

    names = ["plain", "1", "generate"]
    groups = [[Question(str(i), [1])] for i in range(2)]
    found = interleave({name: method(name) for name in names}, groups, repeats=2)
    assert [name for name, _ in order] == [
        *("plain", "1", "generate"),
        *("1", "generate", "plain"),
        *("generate", "plain", "1"),
        *("plain", "1", "generate"),
    ]
    assert [group for _, group in order] == [i for i in "0101" for _ in names]
    assert all(len(found[name]) == 2 for name in names)


def test_of_repeats_the_median_counts():
    times = [(0.3, 5.0), (0.1, 4.0), (0.2, 9.0)]
    chosen = middle([run(9, prefill, decode, decode / 2, 1.0, 4, 4) for prefill, decode in times])
    assert chosen.timing.decode_seconds == 5.0 and chosen.timing.draft_seconds == 2.5
    assert chosen.timing.prefill_seconds == 0.2
    assert chosen.requests == [5.3]
    assert middle([run(9, 0.1, 4.0), run(9, 0.1, 6.0)]).timing.decode_seconds == 4.0


def test_full_groups_are_timed_and_the_others_said(capsys: pytest.CaptureFixture[str]):
    asked = [Question(str(i), [i]) for i in range(7)]
    assert [[one.id for one in group] for group in grouped(asked, 3)] == [list("012"), list("345")]
    assert "batch 3 leaves out the last 1 of 7 prompts" in capsys.readouterr().out
    assert len(grouped(asked, 1)) == 7 and capsys.readouterr().out == ""
    assert sizes_of(SpeedPlan(SHAPES, [16, 4, 8, 4]), 7) == [4, 7]
    said = capsys.readouterr().out
    assert "batch 8 is timed as 7" in said and "batch 16 is timed as 7" in said


def test_a_digest_tells_prompts_apart():
    texts = ([[1, 2], [3]], [[1], [2, 3]], [[12], [3]])
    assert len({digest_of([Question("", ids) for ids in text]) for text in texts}) == 3


def test_measured_on_a_tiny_verifier(verifier: Verifier, make_draft, monkeypatch):
    monkeypatch.setattr(costs, "SECONDS", 0.1)
    settings = DecodeSettings(max_new_tokens=12, eos_ids=[])
    asked = [Question("a", [5, 6, 7]), Question("b", [9, 8]), Question("b#2", [4] * 9)]
    plan = SpeedPlan([chain(1), chain(3), TREE], [1, 2], repeats=2, resamples=20)
    found = measure_speed(verifier, make_draft(), asked, settings, plan)
    assert list(found.by_batch) == [1, 2]
    assert [at.baselines.tokens for at in found.by_batch.values()] == [36, 24]
    for at in found.by_batch.values():
        assert list(at.shapes) == ["1", "3", TREE.name] and at.best in at.shapes
        assert list(at.library) == [LIBRARY]
        for one in at.shapes.values():
            assert 1 <= one.tau <= one.n + 1
            assert min(one.v, one.d, one.c, one.speedup_decode, one.speedup_end_to_end) > 0
            assert one.predicted_speedup == pytest.approx(one.tau / (one.v + one.d))
            assert 0 < one.split.rest < 1
            assert 0 < one.latency.p50 <= one.latency.p95
    assert {(one.batch, one.method) for one in found.timings} == {
        (batch, name) for batch in (1, 2) for name in (PLAIN, "1", "3", TREE.name, LIBRARY)
    }
    assert [one.prompts for one in found.timings if one.method == "1"] == [
        *(["a"], ["b"], ["b#2"]),
        ["a", "b"],
    ]


def test_every_shape_is_judged_by_its_own_rule(verifier: Verifier, make_draft):
    """Sampled: chains by rejection, trees without replacement, dynamic trees by their tokens."""
    sampling = Sampling(1.0, top_k=50)
    rule = rule_of(EvalRule.auto, chain(2), sampling)
    settings = DecodeSettings(max_new_tokens=5, eos_ids=[], sampling=sampling, rule=rule)
    shapes = [chain(2), TREE, parse_shape("dynamic:nodes=4,depth=2,top_k=2", "eval.trees")]
    timed = methods(verifier, make_draft(), settings, SpeedPlan(shapes), 2)
    group = [Question("a", [5, 6, 7]), Question("b", [9, 8])]
    for answer in timed.values():
        assert answer(group).timing.tokens == 10
    with pytest.raises(ConfigError, match=r"eval\.rule=rejection.*dynamic"):
        methods(verifier, make_draft(), settings, SpeedPlan(shapes, choice=EvalRule.rejection), 2)
