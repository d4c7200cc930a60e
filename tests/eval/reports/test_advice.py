"""Advice from synthetic reports: optima by hand, refusals, and what must always hold."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.schema import ConfigError, EvalSection
from conf.shapes import parse_shape
from eval import tune
from eval.acceptance import Counters, Interval, RankHits
from eval.advice.acceptance_mix import Mix, Part, lengthened, mixed
from eval.advice.advise import Advice, advise_on_figures, advise_on_report
from eval.advice.costs_at import table_at
from eval.advice.heat import PAYS
from eval.advice.page import render, to_json
from eval.advice.question import Accept, Figures, Question, Stack, Target
from eval.advice.serving import Place
from eval.report import (
    DataOrigin,
    EvalReport,
    EvalSettings,
    Floor,
    GroupFigures,
    Intervals,
    Lossless,
    PromptCounts,
    TemperatureFigures,
    TrainingEstimate,
    jsonable,
)
from eval.speed_report import (
    Baselines,
    CostTable,
    Latency,
    ShapeSpeed,
    SpeedAtBatch,
    TimeSplit,
)
from eval.theory import best_n_of_alpha

ROUNDS = 1000
PLACE = Place("org/verifier", "runs/demo/export/vllm", "demo", None)
STRONG = [0.80, 0.66, 0.56, 0.48, 0.42]
WEAK = [0.30, 0.08, 0.02, 0.005, 0.001]
FREE = {n: 1 + 0.01 * (n - 1) for n in (1, 2, 3, 4, 5, 6, 8, 9, 15)}  # as on a GPU, and bf16
CPU = {1: 1.0, 2: 1.60, 3: 1.64, 4: 1.68, 5: 1.71, 6: 1.75, 9: 1.9, 15: 2.2}  # as in fp32


def counters(survival: list[float]) -> Counters:
    accepted = [round(ROUNDS * s) for s in survival]
    reached = [ROUNDS, *accepted[:-1]]
    tokens = ROUNDS + sum(accepted)
    return Counters(ROUNDS, ROUNDS * len(survival), sum(reached), accepted, reached, tokens)


def costs(batch: int = 1, verify: dict[int, float] = FREE, draft: float = 0.05) -> CostTable:
    wide = {1: draft, 2: draft, 4: draft * 1.1, 8: draft * 1.2}
    return CostTable(batch, 128, 0.02, dict(verify), draft, wide, 0.02)


def timed(name: str, tau: float, speedup: float) -> ShapeSpeed:
    shape = parse_shape(name, "test")
    spread, n = Interval(0.95 * speedup, 1.05 * speedup), shape.depth
    return ShapeSpeed(
        *(name, n, shape.nodes, tau, 1.05, 0.05 * n, 0.05, tau / (1.05 + 0.05 * n), 0.95),
        *(speedup, spread, speedup, spread, 50.0, 45.0),
        Latency(2.0, 3.0),
        TimeSplit(0.2, 0.7, 0.1),
    )


BASE = Baselines(4, 200, 0.02, 50.0, 45.0, 0.5, Latency(2.0, 3.0), "eager")


def at_batch(batch: int, *shapes: ShapeSpeed) -> SpeedAtBatch:
    named = {one.shape: one for one in shapes}
    best = max(shapes, key=lambda one: one.speedup_decode).shape
    return SpeedAtBatch(batch, BASE, named, best, {})


def group(survival: list[float]) -> GroupFigures:
    c, one = counters(survival), Interval(0.0, 1.0)
    return GroupFigures(
        *(4, c.tau, one, c.alpha, one, c.alpha_by_depth, c.survival_by_depth, 0.5, 1.0),
        Lossless(4, 4, [], ""),
        c,
    )


def heat(temperature: float, survival: list[float], rule: str = "rejection") -> TemperatureFigures:
    c = counters(survival)
    return TemperatureFigures(temperature, rule, c.tau, c.alpha, Interval(0.0, 1.0), c.alpha, c)


def make(survival: list[float], tables: list[CostTable], **changes) -> EvalReport:
    c = counters(survival)
    within = Interval(0.9 * c.tau, 1.1 * c.tau)
    lows = [Interval(0.9 * s, s) for s in survival]
    report = EvalReport(
        tau=c.tau,
        alpha=c.alpha,
        alpha_by_depth=c.alpha_by_depth,
        survival_by_depth=c.survival_by_depth,
        alpha_tv=0.5,
        tau_if_independent=1.0,
        ngram_floor=Floor(4, 1.2, counters([0.2, 0.02])),
        c=0.05,
        speedup_decode=1.5,
        speedup_end_to_end=1.4,
        speedup_vs_generate=1.6,
        predicted_speedup=1.6,
        by_n={},
        by_tree={},
        by_batch={},
        costs=tables,
        baselines=BASE,
        lossless=Lossless(20, 20, [], ""),
        counters=c,
        intervals=Intervals(within, within, lows, lows, within, within, within),
        tasks={},
        position_ranges=[],
        absolute_ranges=[],
        beyond_training=None,
        rank_hits=None,
        by_temperature=[],
        training_estimate=TrainingEstimate(None, None, c.tau, 1.0, ""),
        prompts=4,
        by_prompt=[
            PromptCounts(
                *("p", "", "digest", False, c.rounds, c.drafted, c.tested, c.tokens),
                *(c.accepted_by_depth, c.reached_by_depth, 0.0, 0),
            )
        ],
        timings=[],
        settings=EvalSettings(
            *(EvalSection(), "demo", "org/verifier", "runs/demo/best", [2, 3, 5], "greedy"),
            *("float32", "CPU", 1, "sdpa", 4, "4"),
        ),
        data=DataOrigin([], 4, {}, 4, 0, [], 100, 10, 512, None),
        provenance={},
        warnings=[],
    )
    return replace(report, **changes)


def ask(report: EvalReport, **question) -> Advice:
    return advise_on_report(report, Question(**question), PLACE)


RATES = RankHits([1000, 800, 660], [[800, 90, 35, 20], [660, 60, 25, 10], [560, 40, 20, 10]])


def test_the_strong_head_by_hand():
    """tau / (1 + .01 N + .05 N + .02) for N = 1..5: the fifth is best, 3.92 / 1.32."""
    advice = ask(make(STRONG, [costs()]))
    by_hand = [(1 + sum(STRONG[:n])) / (1 + 0.01 * n + 0.05 * n + 0.02) for n in range(1, 6)]
    assert advice.pick.nodes == by_hand.index(max(by_hand)) + 1 == 5
    assert advice.expected == pytest.approx(3.92 / 1.32)
    assert [one.nodes for one in advice.around] == [3, 4, 5]
    assert [one.predicted for one in advice.around] == pytest.approx(by_hand[2:])
    assert advice.verdict == "on" and "3.920 / (1.050 + 0.250 + 0.020) = 2.970" in render(advice)
    assert any("longest chain measured" in note for note in advice.notes)


def test_the_weak_head_is_off_where_verification_is_dear():
    """On a CPU in fp32 two tokens cost 1.6 steps: 1.3 / 1.67 is a loss, for free ones it is not."""
    dear, free = ask(make(WEAK, [costs(verify=CPU)])), ask(make(WEAK, [costs()]))
    assert dear.verdict == "off" and dear.expected < 1 and "--speculative" not in dear.serving.line
    assert free.verdict == "on" and free.pick.nodes == 2
    assert free.expected == pytest.approx(1.38 / 1.14)


def test_costs_as_on_a_cpu_still_pay_for_a_strong_head():
    advice = ask(make(STRONG, [costs(verify=CPU)]))
    assert advice.verdict == "on" and advice.pick.nodes == 5
    assert advice.expected == pytest.approx(3.92 / (1.75 + 0.25 + 0.02))


def test_a_round_that_costs_too_much_is_off():
    advice = ask(make(STRONG, [costs(verify={1: 1.0, 2: 4.0, 6: 5.0})]))
    assert advice.verdict == "off" and advice.expected < PAYS
    assert "no shape reaches 1.05x" in advice.reason and "off" in render(advice).splitlines()[0]


@pytest.mark.parametrize(("alpha", "c", "n"), [(0.8, 0.05, 8), (0.95, 0.02, 31), (0.9, 0.04, 15)])
def test_figures_alone_give_the_theory(alpha: float, c: float, n: int):
    advice = advise_on_figures(Figures(alpha, c, [], {}), Question(), PLACE)
    best = best_n_of_alpha(alpha, c)
    assert advice.pick.nodes == best.n == n
    assert advice.band == [best.low, best.high]
    assert advice.expected == pytest.approx(best.speedup)


def test_the_pick_has_the_highest_prediction_and_dear_tokens_never_lengthen_it():
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        alphas = torch.rand(8, generator=generator).mul(0.9).add(0.05)
        survival = [round(s, 3) for s in alphas.cumprod(0).tolist()]
        step, draft = torch.rand(2, generator=generator).mul(0.2).tolist()
        picked: list[int] = []
        for factor in (0.0, 0.5, 1.0, 2.0, 4.0):
            verify = {n: 1 + factor * step * (n - 1) for n in range(1, 10)}
            table = costs(verify=verify, draft=draft)
            advice = ask(make(survival, [table]))
            taus = [1 + sum(counters(survival).survival_by_depth[:n]) for n in range(1, 9)]
            speeds = [t / table.round_cost(n, [1] * (n - 1)) for n, t in enumerate(taus, 1)]
            assert advice.pick.predicted == pytest.approx(max(speeds))
            assert len(advice.around) == 3 and advice.pick in advice.around
            picked.append(advice.pick.nodes)
        assert picked == sorted(picked, reverse=True)


def test_a_tree_wins_alone_and_the_chain_in_a_batch():
    """At batch 64 a verified token costs a tenth of a step, and a tree has too many."""
    crowded = {n: 1 + 0.1 * (n - 1) for n in FREE}
    tables = [costs(1, dict.fromkeys(FREE, 1.0)), costs(64, crowded)]
    report = make(STRONG[:3], tables, rank_hits=RATES)
    alone, together = ask(report, stack=Stack.eyrie), ask(report, stack=Stack.eyrie, batch=64)
    assert not alone.pick.is_chain and alone.pick.depth > 1
    assert together.pick.is_chain
    assert [one.batch for one in alone.by_batch] == [1, 64]
    assert alone.by_batch[1].tree.predicted < alone.by_batch[1].chain.predicted * 1.06
    on_vllm = ask(report)
    assert on_vllm.pick.is_chain and "vLLM verifies chains alone" in " ".join(on_vllm.why)


def test_a_tree_costs_what_its_levels_feed():
    """2x2x2: the draft runs once, on 2 nodes, and on 4; leaves are never fed."""
    assert list(parse_shape("2x2x2", "test").fed) == [2, 4]
    assert list(parse_shape("[[0],[1],[0,0],[0,0,0]]", "test").fed) == [1, 1]
    table = costs()
    assert table.round_cost(14, [2, 4]) == pytest.approx(0.05 + 0.05 + 0.055 + FREE[15] + 0.02)


def test_a_timed_tree_is_judged_by_its_measurement():
    """By the rates the tree is ahead; timed, it was slower than the chain, and that counts."""
    slow = at_batch(1, timed("3", 3.02, 2.4), timed("2x2x2", 3.4, 1.9))
    quick = at_batch(1, timed("3", 3.02, 2.4), timed("2x2x2", 3.4, 2.9))
    tables = [costs(verify={n: FREE[n] for n in (1, 2, 3, 4, 15)})]
    for speeds, chain in ((slow, True), (quick, False)):
        advice = ask(make(STRONG[:3], tables, by_batch={1: speeds}), stack=Stack.eyrie)
        assert advice.pick.is_chain is chain
        assert advice.expected == pytest.approx(2.4 if chain else 2.9)
    dynamic = at_batch(1, timed("3", 3.02, 2.4), timed("dynamic:nodes=24,depth=5,top_k=4", 4, 3.0))
    advice = ask(make(STRONG[:3], tables, by_batch={1: dynamic}), stack=Stack.sglang)
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4" in advice.serving.line
    assert "--speculative-num-draft-tokens 25" in advice.serving.line


def test_a_measurement_overrules_a_prediction_that_is_off():
    speeds = at_batch(1, *(timed(str(n), 3.0, 2.4 if n == 2 else 2.0) for n in range(1, 6)))
    advice = ask(make(STRONG, [costs()], by_batch={1: speeds}))
    assert advice.pick.nodes == 2 and "beyond the error of a prediction" in advice.why[0]
    close = at_batch(1, *(timed(str(n), 3.0, 2.04 if n == 2 else 2.0) for n in range(1, 6)))
    assert ask(make(STRONG, [costs()], by_batch={1: close})).pick.nodes == 5


def test_timed_chains_lengthen_the_survival():
    assert lengthened([0.8, 0.6], {1: 1.8, 2: 2.4, 3: 2.9, 4: 3.6}) == pytest.approx(
        [0.8, 0.6, 0.5, 0.5]
    )
    assert lengthened([0.8], {3: 2.0}) == [0.8]


def test_costs_between_and_beyond_batches():
    """Halfway between 1 and 3 is the mean of both; beyond, the nearest stands in and it is said."""
    low, high = costs(1, {1: 1.0, 5: 1.2}), costs(3, {1: 1.0, 5: 2.2}, draft=0.15)
    middle = table_at([low, high], 2)
    assert middle.verify[5] == pytest.approx(1.7) and middle.draft_first == pytest.approx(0.10)
    report = make(STRONG[:4], [low, high])
    assert any("on the line" in note for note in ask(report, batch=2).notes)
    beyond = ask(report, batch=8)
    assert beyond.pick.cost == pytest.approx(ask(report, batch=3).pick.cost)
    assert any("eval.batch_sizes=[1,3,8]" in note for note in beyond.notes)


def test_tasks_mix_by_the_time_their_tokens_take():
    """Half the tokens at 3 a round, half at 1.5: 1 / (.5/3 + .5/1.5) = 2 a round, not 2.25."""
    mix = Mix([Part(0.5, [0.9, 0.6, 0.5]), Part(0.5, [0.3, 0.15, 0.05])], "")
    assert mix.tau(3) == pytest.approx(2.0)
    assert 1 + sum(mix.survival()) == pytest.approx(2.0)
    assert mixed({"a": 7, "b": 0}, {"a": [0.5], "b": [0.1]}, "").tau(1) == pytest.approx(1.5)
    report = make(STRONG, [costs()], tasks={"chat": group(WEAK), "code": group(STRONG)})
    chat, code = ask(report, tasks={"chat": 1}), ask(report, tasks={"code": 1})
    assert (chat.pick.nodes, code.pick.nodes) == (2, 5)
    both = ask(report, tasks={"chat": 0.5, "code": 0.5})
    assert chat.expected < both.expected < code.expected
    with pytest.raises(ConfigError, match="has no such task; it has chat, code"):
        ask(report, tasks={"sql": 1})


def test_the_gate_is_the_heads_own():
    """The chain of 2 on three temperatures: it crosses 1.05 where the line between them says."""
    hot = [heat(0.5, [0.5, 0.2]), heat(1.0, [0.1, 0.0])]
    table = costs(verify={1: 1.0, 2: 1.0, 3: 1.04})
    advice = ask(make(STRONG[:2], [table], by_temperature=hot))
    gate, cost = advice.gate, 1.04 + 0.1 + 0.02
    assert [one.speedup for one in gate.points] == pytest.approx(
        [2.46 / cost, 1.7 / cost, 1.1 / cost]
    )
    edge = 0.5 + 0.5 * (1.7 - PAYS * cost) / (1.7 - 1.1)
    assert gate.off_above == pytest.approx(edge) and f"{edge:.2f}" in gate.advice
    warm = ask(make(STRONG[:2], [table], by_temperature=[heat(1.0, [0.7, 0.5])]))
    assert warm.gate.off_above is None and "above 1 nothing is known" in warm.gate.advice
    unmeasured = ask(make(STRONG[:2], [table]))
    assert "eval.temperatures" in unmeasured.gate.advice


def test_an_unmeasured_temperature_asks_for_a_calibration():
    with pytest.raises(ConfigError, match=r"run.name=demo eval.temperatures=\[1\]"):
        ask(make(STRONG, [costs()]), temperature=1.0)
    with pytest.raises(ConfigError, match=r"eval.temperatures=\[1.2\]"):
        ask(make(STRONG, [costs()], by_temperature=[heat(1.0, WEAK)]), temperature=1.2)
    advice = ask(make(STRONG, [costs()], by_temperature=[heat(1.0, WEAK)]), temperature=0.5)
    halfway = 1 + sum(STRONG[:3] + WEAK[:3]) / 2
    assert advice.around[0].nodes == 3 and advice.around[0].tau == pytest.approx(halfway)


def test_the_rule_decides_how_vllm_drafts():
    hot = [heat(1.0, [0.6, 0.4], "argmax_draft"), heat(1.0, [0.7, 0.5], "rejection")]
    report = make(STRONG[:2], [costs()], by_temperature=hot)
    drawn = ask(report, temperature=1.0)
    argmax = ask(report, temperature=1.0, accept=Accept.argmax_draft)
    assert (drawn.rule, argmax.rule) == ("rejection", "argmax_draft")
    assert '"draft_sample_method": "probabilistic"' in drawn.serving.line
    assert "draft_sample_method" not in argmax.serving.line
    old = ask(report, temperature=1.0, version="0.20")
    assert "draft_sample_method" not in old.serving.line
    assert any("--accept argmax_draft" in note for note in old.serving.notes)


def test_what_changes_the_distribution_is_refused():
    report = make(STRONG, [costs()])
    for lossy in (Accept.typical, Accept.lenience):
        with pytest.raises(ConfigError, match="no longer the verifier's own"):
            ask(report, accept=lossy)
    with pytest.raises(ConfigError, match="not one of the exact rules"):
        ask(replace(report, settings=replace(report.settings, accept_rule="typical")))
    fault = SimpleNamespace(prompt="p", position=3, behind=0.5)
    with pytest.raises(ConfigError, match="no tie of rounding"):
        ask(replace(report, lossless=Lossless(20, 19, [fault], "")))
    tie = SimpleNamespace(prompt="p", position=3, behind=1e-6)
    assert ask(replace(report, lossless=Lossless(20, 19, [tie], ""))).verdict == "on"


def test_lines_name_the_stack_and_the_version():
    report = make(STRONG, [costs()])
    words = shlex.split(ask(report).serving.line)
    assert words[:4] == ["vllm", "serve", "org/verifier", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": "runs/demo/export/vllm",
        "num_speculative_tokens": 5,
    }
    line = ask(report, stack=Stack.sglang).serving.line
    assert "--speculative-algorithm EAGLE3 --speculative-draft-model-path runs/demo" in line
    assert "--speculative-num-steps 5 --speculative-eagle-topk 1" in line
    assert "--speculative-num-draft-tokens 6" in line
    old = ask(report, version="0.8.2")
    assert old.verdict == "off" and "came with 0.8.5" in old.reason
    with pytest.raises(ConfigError, match="not a version"):
        ask(report, version="newest")


def test_a_head_that_the_stack_misreads_is_off():
    names = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm")
    flags = dict.fromkeys(names, False)
    report = make(STRONG, [costs()])

    def verdict(stack: Stack, version: str | None = None, **on: bool) -> str:
        place = replace(PLACE, config=SimpleNamespace(**(flags | on)))
        return advise_on_report(report, Question(stack=stack, version=version), place).verdict

    assert verdict(Stack.vllm, fc_norm=True) == "on"
    assert verdict(Stack.vllm, "0.21.0", fc_norm=True) == "off"
    assert verdict(Stack.sglang, norm_before_residual=True) == "off"
    assert verdict(Stack.eyrie, norm_before_residual=True) == "on"


def test_latency_by_hand():
    """.5 s prefill and 100 steps of .02 s: 2.5 s plain; p95 is 1.5 times p50, as timed."""
    report = make(STRONG, [costs()])
    asked = {"answer_length": 101, "prompt_length": 10}
    request = ask(report, target=Target("p95", 2.0), **asked).request
    assert request.plain_p50 == pytest.approx(2.5)
    assert request.p50 == pytest.approx(0.5 + 2.0 / (3.92 / 1.32))
    assert request.p95 == pytest.approx(1.5 * request.p50)
    assert request.met is True
    assert ask(report, target=Target("p95", 1.0), **asked).request.met is False
    with pytest.raises(ConfigError, match="give --answer-length"):
        ask(report, target=Target("p95", 1.0))
    long = ask(report, prompt_length=600, answer_length=10)
    assert any("beyond the longest training sample (512)" in note for note in long.notes)


def test_alarms_come_from_the_report():
    """Fall back where tau is below the round's cost; 3.528 is the interval's lower end."""
    advice = ask(make(STRONG, [costs()]))
    tau = advice.telemetry[0]
    assert "vllm:spec_decode_num_accepted_tokens_total" in tau.hook
    assert "below 1.32, where it is slower" in tau.alarm and "below 3.53" in tau.alarm
    sglang = ask(make(STRONG, [costs()]), stack=Stack.sglang)
    assert "spec_verify_ct" in sglang.telemetry[0].hook


def test_page_and_json_say_the_same():
    report = make(STRONG, [costs(), costs(4)], rank_hits=RATES, by_temperature=[heat(1.0, STRONG)])
    advice = ask(report, answer_length=50, stack=Stack.eyrie)
    found = json.loads(to_json(advice))
    page = render(advice)
    assert found["pick"]["predicted"] == pytest.approx(advice.pick.predicted)
    for text in (found["reason"], found["serving"]["line"], found["request"]["worked"]):
        assert text in page
    for one in [*found["around"], *found["trees"]]:
        assert one["worked"] in page
    for signal in found["telemetry"]:
        assert signal["alarm"] in page


def test_reports_without_step_costs_take_those_of_whole_answers():
    by_n = {n: timed(str(n), 1 + sum(STRONG[:n]), 2.0) for n in range(1, 4)}
    advice = ask(make(STRONG, [], by_n=by_n), temperature=0.0)
    assert advice.longest == 3 and any("no table of single steps" in n for n in advice.notes)
    assert advice.around[2].verify == pytest.approx(1.05)
    assert advice.around[2].draft == pytest.approx(0.15)


def test_families_without_a_report():
    def family(**question) -> str:
        c = question.pop("c", 0.05)
        figures = Figures(0.7, c, [], {})
        return advise_on_figures(figures, Question(**question), PLACE).family.family.name

    assert family() == "EAGLE-3" == family(dialogues=100_000)
    assert family(dialogues=0) == "vanilla draft model"
    assert family(dialogues=0, c=0.0) == "n-gram or prompt lookup"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "runs" / "demo"
    (run / "eval").mkdir(parents=True)
    file = run / "eval" / "report.json"
    file.write_text(json.dumps(jsonable(make(STRONG, [costs()]))))
    out, page = tmp_path / "advice.json", tmp_path / "advice.md"
    assert tune.main([str(run), "--json", str(out), "--output", str(page)]) == 0
    assert page.read_text() in capsys.readouterr().out
    assert json.loads(out.read_text())["pick"]["nodes"] == 5
    assert tune.newest_report(tmp_path) == file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--alpha", "0.7"], "--c"),
        (["--alpha", "1.7", "--c", "0.1"], "must lie in 0 to 1"),
        (["--survival", "0.3,0.5", "--c", "0.1"], "without passing the depths above"),
        (["--alpha", "0.7", "--c", "0.1", "--batch", "8"], "--v 5=1.3"),
        (["--alpha", "0.7", "--c", "0.1", "--v", "1=1.0"], "tokens \\(2 or more\\)"),
        (["--alpha", "0.7", "--c", "0.1", "--tasks", "a=1"], "acceptance of each task"),
        (["--c", "0.1"], "needs --alpha"),
        (["--alpha", "0.7", "--c", "0.1", "--batch", "0"], "1 or more"),
        (["--alpha", "0.7", "--c", "0.1", "--temperature", "-1"], "0 \\(greedy\\) or more"),
        (["--alpha", "0.7", "--c", "0.1", "--stack", "eyrie", "--stack-version", "1"], "leave it"),
        (["runs/x", "--alpha", "0.7", "--c", "0.1"], "which counts"),
    ],
)
def test_bad_questions_end_in_one_sentence(words: list[str], said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        tune.main(words)
    assert "\n" not in str(caught.value)


def test_unreadable_options_exit_with_2(capsys: pytest.CaptureFixture[str]):
    for words in (["--latency-target", "2.5"], ["--tasks", "chat"], ["--v", "5"]):
        with pytest.raises(SystemExit) as caught:
            tune.main(words)
        assert caught.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
