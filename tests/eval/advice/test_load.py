"""The load in question: temperature, tasks, batch, latency; each figure worked out by hand."""

import pytest

from eval.advice.acceptance_mix import between, lengthened, mixed
from eval.advice.advise import Advice, advise_on_figures, advise_on_report
from eval.advice.costs_at import table_at
from eval.advice.question import Accept, Figures, Question, Stack, Target
from eval.report import EvalReport

WARM = (0.6, 0.36, 0.216, 0.13)
HOT = (0.3, 0.09, 0.027, 0.008)


@pytest.fixture
def measured(made) -> EvalReport:
    """Greedy, and by both rules at 0.5 and 1; a draft forward costs .2."""
    heat = {
        (0.5, "rejection"): WARM,
        (1.0, "rejection"): HOT,
        (0.5, "argmax_draft"): (0.5, 0.25, 0.125, 0.06),
        (1.0, "argmax_draft"): (0.2, 0.04, 0.008, 0.002),
    }
    return made.report(costs=[made.costs(1, 0.0)], heat=heat)


def test_acceptance_at_a_measured_temperature(made, measured):
    """At 0.5 two guesses are best: 1.6 / 1.2 = 1.333, 1.96 / 1.4 = 1.4, 2.176 / 1.6 = 1.36."""
    advice = advise_on_report(measured, Question(temperature=0.5), made.place)
    assert (advice.rule, advice.pick.nodes) == ("rejection", 2)
    assert advice.pick.worked == "1.960 / (1.000 + 0.400) = 1.400"


def test_acceptance_between_two_temperatures(made, measured):
    """At 0.75 survival is half-way: .45, .225, ...; one guess has 1.45 / 1.2, two 1.675 / 1.4."""
    advice = advise_on_report(measured, Question(temperature=0.75), made.place)
    assert advice.pick.nodes == 1 and advice.pick.tau == pytest.approx(1.45)
    assert advice.around[1].predicted == pytest.approx(1.675 / 1.4)
    assert advice.acceptance == "between temperatures 0.5 and 1, rule rejection"
    assert between([0.6, 0.3], [0.2], 0.25) == pytest.approx([0.5])


def test_the_rule_can_be_asked_for(made, measured):
    """The draft's argmax at 0.5: 1.5 / 1.2 = 1.25 against 1.75 / 1.4 = 1.25, the shorter first."""
    question = Question(temperature=0.5, accept=Accept.argmax_draft)
    advice = advise_on_report(measured, question, made.place)
    assert (advice.rule, advice.pick.nodes) == ("argmax_draft", 1)
    assert advice.expected == pytest.approx(1.25)


def test_the_gate_lies_where_the_gain_is_lost(made, measured):
    """For the greedy chain of 4, cost 1.8: 3.362, 2.306 and 1.425 tokens, or 1.868, 1.281 and .792;
    1.05 is (1.281 - 1.05) / (1.281 - .792) of the way from 0.5 to 1."""
    advice = advise_on_report(measured, Question(), made.place)
    gate = advice.gate
    assert gate is not None and gate.shape == "4" and gate.rule == "rejection"
    assert [one.temperature for one in gate.points] == [0.0, 0.5, 1.0]
    assert [one.tau for one in gate.points] == pytest.approx([3.362, 2.306, 1.425])
    share = (2.306 / 1.8 - 1.05) / (2.306 / 1.8 - 1.425 / 1.8)
    assert gate.off_above == pytest.approx(0.5 + share / 2)
    assert f"above temperature {gate.off_above:.2f} to the plain verifier" in gate.advice
    assert f"so are temperatures above {gate.off_above:.2f}" in advice.telemetry[-1].alarm


def test_no_gate_where_it_pays_everywhere_or_was_not_measured(made):
    hot = made.report(costs=[made.costs(1, 0.0, c=0.02)], heat={(1.0, "rejection"): WARM})
    gate = advise_on_report(hot, Question(), made.place).gate
    assert gate is not None and gate.off_above is None
    assert "every temperature measured (0 to 1)" in gate.advice
    cold = made.report(costs=[made.costs(1, 0.0)])
    gate = advise_on_report(cold, Question(), made.place).gate
    assert gate is not None and gate.off_above is None and len(gate.points) == 1
    assert gate.advice.startswith("Not measured: python -m eval.main run.name=demo eval.temp")
    weak = made.report(
        survival=made.weak, costs=[made.costs(1, 0.0)], heat={(1.0, "rejection"): made.weak}
    )
    gate = advise_on_report(weak, Question(), made.place).gate
    assert gate is not None and gate.off_above == 0.0


def test_tasks_mix_by_the_time_that_their_tokens_take(made):
    """Half the tokens at 2 a round, half at 4: 1 / (.5/2 + .5/4) = 2.667, not 3."""
    curves = {"chat": [0.5, 0.5], "code": [1.0, 1.0, 1.0], "json": [1.0, 1.0]}
    mix = mixed({"chat": 1, "code": 1}, {"chat": [1.0], "code": [1.0]}, "")
    assert mix.tau(1) == 2.0
    mix = mixed({"chat": 3, "code": 3}, curves | {"chat": [0.5, 0.5, 0.0]}, "")
    assert mix.depth == 3 and mix.tau(3) == pytest.approx(1 / (0.5 / 2 + 0.5 / 4))
    # of all rounds two thirds are chat's: 1/2 against 1/4 of a round a token
    assert mix.survival() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert mixed({"chat": 1, "code": 1}, curves, "").depth == 2


def test_the_mix_of_a_report(made):
    tasks = {"chat": (0.5, 0.2), "code": (0.9, 0.8)}
    report = made.report(costs=[made.costs(1, 0.0)], tasks=tasks)
    asked = Question(tasks={"chat": 0.5, "code": 0.5})
    advice = advise_on_report(report, asked, made.place)
    by_hand = {
        n: 1 / sum(0.5 / (1 + sum(tasks[t][:n])) for t in tasks) / (1 + 0.2 * n) for n in (1, 2)
    }
    assert advice.expected == pytest.approx(max(by_hand.values()))
    assert advice.longest == 2
    code = advise_on_report(report, Question(tasks={"code": 1.0}), made.place)
    assert code.pick.tau == pytest.approx(2.7) and code.expected > advice.expected


def test_timed_chains_reach_deeper_than_the_counters(made):
    """tau of 3 and 4 guesses are 2.6 and 2.9: the fourth stands in .3 of the rounds."""
    assert lengthened([0.7, 0.5, 0.4], {3: 2.6, 4: 2.9, 6: 3.3}) == pytest.approx(
        [0.7, 0.5, 0.4, 0.3]
    )
    assert lengthened([0.7, 0.5], {2: 2.2, 3: 3.2})[-1] == 0.5  # noise is capped
    assert lengthened([0.7, 0.5], {3: 3.2}) == [0.7, 0.5]


def test_costs_between_two_batch_sizes(made):
    """Batch 8 lies a third of the way from 4 to 16."""
    low, high = made.costs(4, 0.1, c=0.1, longest=6), made.costs(16, 0.4, c=0.4, longest=8)
    middle = table_at([low, high], 8)
    assert middle.verify[3] == pytest.approx(1 + 2 * 0.2) and max(middle.verify) == 7
    assert middle.draft_first == pytest.approx(0.2)
    assert table_at([low, high], 16) is high


def test_a_batch_beyond_the_measured_is_said(made):
    report = made.report(costs=[made.costs(1, 0.0), made.costs(4, 0.1)])
    advice = advise_on_report(report, Question(batch=32), made.place)
    note = next(one for one in advice.notes if "Batch 32 was not measured (only 1, 4)" in one)
    assert "eval.batch_sizes=[1,4,32]" in note
    assert [one.batch for one in advice.by_batch] == [1, 4, 32]
    assert advice.pick.verify == pytest.approx(1 + 0.1 * advice.pick.nodes)
    inside = advise_on_report(report, Question(batch=2), made.place)
    assert any("line between the measured sizes [1, 4]" in one for one in inside.notes)


def asked(report: EvalReport, place, **question) -> Advice:
    return advise_on_report(report, Question(answer_length=101, **question), place)


def test_the_latency_of_a_request(made):
    """.1 s prefill and 100 steps of 20 ms, over 1.8: 1.211 s; plain 2.1 s."""
    report = made.report(costs=[made.costs(1, 0.0)], timed={1: [made.timed("4", 4, 4, 3.362, 1.8)]})
    request = asked(report, made.place, target=Target("p95", 2.0)).request
    assert request is not None
    assert request.plain_p50 == pytest.approx(2.1)
    assert request.plain_p95 == pytest.approx(2.1 * 1.2)  # 2.4 / 2.0 of the plain requests
    assert request.p50 == pytest.approx(0.1 + 2 / 1.8)
    assert request.p95 == pytest.approx(1.5 * request.p50)  # 1.5 / 1.0 of the timed shape's
    assert request.speedup_end_to_end == pytest.approx(2.1 / (0.1 + 2 / 1.8))
    assert request.met is True
    tight = asked(report, made.place, target=Target("p95", 1.5)).request
    assert tight is not None and tight.met is False
    assert advise_on_report(report, Question(), made.place).request is None


def test_without_drafts_the_target_is_held_by_the_plain_loop_or_not(made):
    report = made.report(survival=made.weak, costs=[made.costs(1, 0.0)])
    for seconds, held in ((2.2, True), (2.0, False)):
        advice = asked(report, made.place, target=Target("p50", seconds))
        assert advice.verdict == "off" and advice.request is not None
        assert advice.request.p50 == pytest.approx(2.1) and advice.request.met is held
        assert advice.request.speedup_end_to_end == 1.0


def test_requests_longer_than_the_training_are_said(made):
    report = made.report(costs=[made.costs(1, 0.0)])
    question = Question(prompt_length=500, answer_length=100)
    notes = advise_on_report(report, question, made.place).notes
    assert any(
        "Requests of 600 tokens go beyond the longest training sample (512)" in one for one in notes
    )
    assert any("eval.max_new_tokens=100" in one for one in notes)
    short = Question(prompt_length=100, answer_length=60)
    assert advise_on_report(report, short, made.place).notes == []


def test_the_alarms_of_the_first_week(made):
    """Below the cost of a round, 1.8, plain decoding is faster; 3.362 x .95 leaves the interval."""
    report = made.report(costs=[made.costs(1, 0.0)])
    tau, depth = (
        one.alarm for one in advise_on_report(report, Question(), made.place).telemetry[:2]
    )
    assert "expected 3.36; fall back to plain decoding below 1.80" in tau
    assert "below 1.89 (less than 1.05x)" in tau
    whole = 1 + sum(report.survival_by_depth)
    assert f"below {3.362 * 0.95:.2f} it has left" in tau and whole > 3.362
    assert "expected 0.80 0.64 0.51 0.41 at positions 1 to 4; below 0.72 0.58 0.46 0.37" in depth


def test_bounds_follow_the_temperature(made, measured):
    """At 0.5 the bounds are 9/10 of what is expected there, not of the greedy rates."""
    advice = advise_on_report(measured, Question(temperature=0.5), made.place)
    assert "expected 0.60 0.36 at positions 1 to 2; below 0.54 0.32" in advice.telemetry[1].alarm
    assert "measured at temperature 0 alone" in advice.family.why[1]


def test_rounds_until_tau_can_be_judged(made):
    """alpha .5 in one guess: variance .25, tau 1.5, cost 1.2: (1.96 / .15)^2 x .25 = 42.7."""
    figures = Figures(0.5, 0.2, [], {2: 1.0})
    advice = advise_on_figures(figures, Question(), made.place)
    assert advice.pick.nodes == 1 and "judge by 43 rounds" in advice.telemetry[0].alarm


def test_a_table_of_the_training_answers_may_be_the_better_draft(made):
    """Its 3 tokens at no cost of drafting are 3.0x; the head's best is 1.868."""
    report = made.report(costs=[made.costs(1, 0.0)], floor=(0.9, 0.6, 0.3, 0.2))
    why = advise_on_report(report, Question(), made.place).family.why[1]
    assert "3.00 tokens a round and 3.000x at N=4, the head 1.868x: look-up may be" in why
    weak = made.report(costs=[made.costs(1, 0.0)], floor=(0.3, 0.1))
    why = advise_on_report(weak, Question(), made.place).family.why[1]
    assert "1.40 tokens a round and 1.400x at N=2" in why and "the head is ahead" in why


@pytest.mark.parametrize(
    ("figures", "question", "family"),
    [
        (Figures(0.7, 0.05, [], {}), Question(), "EAGLE-3"),
        (Figures(0.7, 0.05, [], {}), Question(dialogues=0), "vanilla draft model"),
        (Figures(0.7, 0.0, [], {}), Question(dialogues=0), "n-gram or prompt lookup"),
        (Figures(0.7, 0.05, [], {}), Question(dialogues=9000), "EAGLE-3"),
    ],
)
def test_the_family(made, figures, question, family):
    advice = advise_on_figures(figures, question, made.place)
    assert advice.family.family.name == family and len(advice.family.others) == 5
    few = any("9000 dialogues are fewer" in one for one in advice.family.why)
    assert few == (question.dialogues == 9000)


def test_every_stack_has_its_hooks(made):
    report = made.report(costs=[made.costs(1, 0.0)])
    hooks = {
        stack: [
            one.hook
            for one in advise_on_report(report, Question(stack=stack), made.place).telemetry
        ]
        for stack in Stack
    }
    assert "vllm:spec_decode_num_drafts_total" in hooks[Stack.vllm][0]
    assert "spec_verify_ct" in hooks[Stack.sglang][0]
    assert all(len(found) == 5 for found in hooks.values())
