"""Which shape eval.tune picks: optima worked out by hand, and what must hold for any figures."""

import random
from itertools import pairwise

import pytest

from eval.advice.advise import advise_on_figures, advise_on_report
from eval.advice.question import Figures, Question, Stack
from eval.speed_report import CostTable

EYRIE = Question(stack=Stack.eyrie)


def test_a_strong_head(made):
    """E(4) = 1 + .8 + .64 + .512 + .41 = 3.362 over 1 + 4 x .2; N=3 has 2.952 / 1.6, N=5 3.69 / 2:
    1.845, 1.868, 1.845, and the next ones fall."""
    advice = advise_on_report(made.report(costs=[made.costs(1, 0.0)]), Question(), made.place)
    assert (advice.verdict, advice.pick.nodes, advice.band) == ("on", 4, [4, 4])
    assert [one.nodes for one in advice.around] == [3, 4, 5]
    assert advice.pick.worked == "3.362 / (1.000 + 0.800) = 1.868"
    assert [f"{one.predicted:.3f}" for one in advice.around] == ["1.845", "1.868", "1.845"]
    assert advice.expected == pytest.approx(3.362 / 1.8)
    assert advice.overhead is None and advice.longest == 8


def test_the_formula_of_alpha(made):
    """The known optimum of alpha .8, c .05: 8 at 3.09, 7 to 9 within 1 %."""
    advice = advise_on_figures(Figures(0.8, 0.05, [], {}), Question(), made.place)
    assert (advice.pick.nodes, advice.band) == (8, [7, 9])
    assert advice.expected == pytest.approx(3.09, abs=0.005)


def test_a_weak_head_is_off(made):
    """The best is one guess, 1.1 / 1.2 = .917: slower than plain decoding."""
    report = made.report(survival=made.weak, costs=[made.costs(1, 0.0)])
    advice = advise_on_report(report, Question(), made.place)
    assert (advice.verdict, advice.pick.nodes) == ("off", 1)
    assert advice.expected == pytest.approx(1.1 / 1.2)
    assert advice.serving.line == "vllm serve some/verifier"
    assert advice.telemetry == [] and advice.rollback == [] and advice.forbidden == []
    assert "a round costs 1.20 plain steps for 1.10 tokens" in advice.reason


def test_costs_of_a_cpu_in_float32(made):
    """Verifying two tokens costs 1.6, each one more .05: 1.8 / 1.7, 2.44 / 1.85, 2.952 / 2.0,
    3.362 / 2.15, 3.69 / 2.3, 3.952 / 2.45, 4.162 / 2.6, and the best 3.952 / 2.45 = 1.613."""
    verify = {1: 1.0} | {n: 1.6 + 0.05 * (n - 2) for n in range(2, 10)}
    table = CostTable(1, 256, 0.02, verify, 0.1, {1: 0.1}, 0.0)
    advice = advise_on_report(made.report(costs=[table]), Question(), made.place)
    assert advice.pick.nodes == 6
    assert advice.pick.worked == "3.952 / (1.850 + 0.600) = 1.613"
    assert advice.band == [5, 7]


def test_verifying_dearer_than_decoding_is_off(made):
    """n tokens cost n steps: even guesses that mostly stand gain nothing."""
    advice = advise_on_report(made.report(costs=[made.costs(1, 1.0)]), Question(), made.place)
    assert advice.verdict == "off" and advice.expected < 1


def test_the_tree_at_batch_1_and_the_chain_at_batch_64(made):
    """At batch 1 siblings are free; at 64 each guess costs .2 of a step, and 3 in a chain are best:
    2.44 / 1.5 = 1.627, 2.952 / 1.75 = 1.687, 3.362 / 2 = 1.681."""
    ranks = (0.8, 0.09, 0.035, 0.02)
    tables = [made.costs(1, 0.0, longest=48), made.costs(64, 0.2, c=0.05, longest=48)]
    report = made.report(costs=tables, ranks=ranks)
    alone = advise_on_report(report, EYRIE, made.place)
    assert not alone.pick.is_chain and alone.pick.measured is None
    full = advise_on_report(report, Question(batch=64, stack=Stack.eyrie), made.place)
    assert full.pick.is_chain and full.pick.worked == "2.952 / (1.600 + 0.150) = 1.687"
    sizes = {one.batch: one for one in full.by_batch}
    assert sizes[1].tree.predicted > sizes[1].chain.predicted
    assert sizes[64].tree.predicted < sizes[64].chain.predicted


def test_a_verified_token_that_costs_more_never_lengthens_the_chain(made):
    lengths: list[int] = []
    for verify in [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8]:
        report = made.report(costs=[made.costs(1, verify, c=0.02)])
        lengths.append(advise_on_report(report, Question(), made.place).pick.nodes)
    assert all(after <= before for before, after in pairwise(lengths))
    assert lengths[0] > 4 > lengths[-1]


@pytest.mark.parametrize("seed", range(20))
def test_no_measured_length_is_predicted_better(made, seed: int):
    """Any falling survival, any costs: the pick is the best of all lengths, by plain arithmetic."""
    dice = random.Random(seed)
    survival, share = [], 1.0
    for _ in range(dice.randint(2, 9)):
        share = round(share * dice.uniform(0.3, 1.0), 3)
        survival.append(share)
    verify = {1: 1.0}
    for n in range(2, len(survival) + 2):
        verify[n] = verify[n - 1] + dice.uniform(0.0, 0.3)
    first, later, rest = dice.uniform(0, 0.2), dice.uniform(0, 0.2), dice.uniform(0, 0.1)
    table = CostTable(1, 256, 0.02, verify, first, {1: later}, rest)
    report = made.report(survival=survival, costs=[table])
    advice = advise_on_report(report, Question(), made.place)
    gains = [
        (1 + sum(report.survival_by_depth[:n])) / (verify[n + 1] + first + (n - 1) * later + rest)
        for n in range(1, len(survival) + 1)
    ]
    assert advice.pick.predicted == pytest.approx(max(gains))
    assert gains[advice.pick.nodes - 1] == pytest.approx(max(gains))
    low, high = advice.band
    assert all(gains[n - 1] >= 0.99 * max(gains) for n in range(low, high + 1))
    assert advice.verdict == ("on" if max(gains) >= 1.05 else "off")


def test_what_was_timed_overrules_a_prediction(made):
    """N=4 is predicted at 1.868 and timed at 1.5, N=2 predicted at 1.743 and timed at 1.7."""
    speeds = [made.timed("2", 2, 2, 2.44, 1.7), made.timed("4", 4, 4, 3.362, 1.5)]
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: speeds})
    advice = advise_on_report(report, Question(), made.place)
    assert (advice.pick.nodes, advice.expected) == (2, 1.7)
    assert "beyond the error of a prediction" in advice.why[0]
    assert advice.overhead == pytest.approx((1.7 / (2.44 / 1.4) + 1.5 / (3.362 / 1.8)) / 2)
    near = [made.timed("2", 2, 2, 2.44, 1.7), made.timed("4", 4, 4, 3.362, 1.65)]
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: near})
    assert advise_on_report(report, Question(), made.place).pick.nodes == 4  # within 5 %


def test_a_timed_tree_is_picked_where_it_is_served(made):
    speeds = [made.timed("4", 4, 4, 3.362, 1.8), made.timed("2x2x2", 3, 14, 3.4, 1.95)]
    dynamic = made.timed("dynamic:nodes=8,depth=3,top_k=2", 3, 8, 3.4, 1.9)
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: [*speeds, dynamic]})
    picks = {
        stack: advise_on_report(report, Question(stack=stack), made.place).pick.shape
        for stack in Stack
    }
    assert picks == {Stack.vllm: "4", Stack.sglang: dynamic.shape, Stack.eyrie: "2x2x2"}


def test_an_untimed_tree_must_promise_more_than_the_error(made):
    """Ranks beyond the first are all but empty: the tree gains less than a prediction errs."""
    report = made.report(costs=[made.costs(1, 0.0, longest=48)], ranks=(0.8, 0.002, 0.001))
    advice = advise_on_report(report, EYRIE, made.place)
    assert advice.pick.is_chain and "does not pay" in advice.why[1]
    assert advice.trees and advice.trees[0].measured is None


def test_at_the_longest_measured_chain_more_is_asked_for(made):
    report = made.report(survival=(0.95, 0.9), costs=[made.costs(1, 0.0, c=0.02)])
    advice = advise_on_report(report, Question(), made.place)
    assert advice.pick.nodes == 2
    said = [note for note in advice.notes if "longest chain measured" in note]
    # the last rate, .9 / .95, held: 1 + .95 + .9 + .853
    assert len(said) == 1 and "N=3 would yield 3.70 tokens, which is no measurement" in said[0]
    assert "eval.n_draft=5 eval.n_sweep=[1,2,3,4,5]" in said[0]


def test_noisy_timings_are_said(made):
    table = CostTable(1, 256, 0.02, {1: 1.0, 3: 0.7, 9: 1.2}, 0.1, {1: 0.1}, 0.0)
    speeds = [made.timed("4", 4, 4, 3.362, 1.1)]
    advice = advise_on_report(made.report(costs=[table], timed={1: speeds}), Question(), made.place)
    assert any("verifying 3 tokens took 0.70 of a plain step" in note for note in advice.notes)
    clean = made.report(costs=[made.costs(1, 0.0)], timed={1: speeds})
    notes = advise_on_report(clean, Question(), made.place).notes
    assert not any("not to be trusted" in note for note in notes)
    assert any("begins at 1.000x" in note for note in notes)


def test_no_table_of_steps_but_timed_chains(made):
    """Costs of whole answers stand in: v = 1.1 and d = .2 a level, so N=4 has 3.362 / 1.9."""
    speeds = [made.timed(str(n), n, n, 1 + sum(made.strong[:n]), 1.5) for n in (1, 2, 4)]
    advice = advise_on_report(made.report(timed={1: speeds}), Question(), made.place)
    four = next(one for one in advice.around if one.nodes == 4)
    assert four.predicted == pytest.approx(3.362 / 1.9)
    assert advice.notes[0].startswith("The report has no table of single steps")
