"""The advice: optima worked out by hand, what is refused, and what the page says."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from conf.schema import ConfigError
from eval import tune
from eval.advice import Advice, advise_on_figures, advise_on_report
from eval.advice_page import render
from eval.advice_page import to_json as advice_json
from eval.question import Accept, Figures, Question, Stack, Target
from eval.report import to_json
from eval.serving import Place

PLACE = Place("some/verifier", "runs/demo/export/vllm", "demo", None)
HALVES = [0.8, 0.6, 0.45, 0.3]  # rounds that accept 1, 2, 3, 4 guesses


def of_figures(survival: list[float], c: float, v: dict[int, float], **asked) -> Advice:
    return advise_on_figures(Figures(None, c, survival, v), Question(**asked), PLACE)


def test_the_best_chain_by_hand():
    """tau 1.8 2.4 2.85 3.15 over v + N c = 1.1 + .1 N."""
    v = {2: 1.1, 3: 1.1, 4: 1.1, 5: 1.1}
    found = of_figures(HALVES, 0.1, v)
    worked = [1.8 / 1.2, 2.4 / 1.3, 2.85 / 1.4, 3.15 / 1.5]
    assert found.verdict == "on" and found.pick.nodes == 4
    assert [one.nodes for one in found.around] == [2, 3, 4]
    assert found.pick.predicted == pytest.approx(worked[3])
    assert "3.150 / (1.100 + 0.400) = 2.100" in found.pick.worked
    assert any("longest chain measured" in note for note in found.notes)  # no step beyond it
    dear = of_figures(HALVES, 0.35, v)
    assert dear.pick.nodes == 2  # 1.24, 1.33, 1.33 (1.326), 1.26
    assert [one.nodes for one in dear.around] == [1, 2, 3] and dear.band == [2, 3]


@pytest.mark.parametrize("step", [0.0, 0.02, 0.1, 0.3])
def test_dearer_tokens_never_lengthen_the_chain(step: float):
    def pick(extra: float) -> int:
        return of_figures(HALVES, 0.05, {n: 1 + extra * n for n in range(2, 6)}).pick.nodes

    assert pick(step + 0.1) <= pick(step)


def test_off_when_no_shape_pays():
    """Verifying as on this CPU in float32: 1.6 and more for a few tokens."""
    found = of_figures([0.4, 0.15], 0.05, {2: 1.6, 3: 1.65})
    assert found.verdict == "off" and "the verifier alone is as fast" in found.reason
    assert found.serving.line == "vllm serve some/verifier"


def test_a_report_is_judged_by_its_own_figures(made: SimpleNamespace):
    report = made.report()
    found = advise_on_report(report, Question(), PLACE)
    taus = {n: 1 + sum(report.survival_by_depth[:n]) for n in (1, 2)}
    cost = report.costs[0]
    for one in found.around:
        wanted = taus[one.nodes] / cost.round_cost(one.nodes, [1] * (one.nodes - 1))
        assert one.predicted == pytest.approx(wanted)
        assert one.measured == report.by_n[one.nodes].speedup_decode
    best = max(report.by_n.values(), key=lambda one: one.speedup_decode).speedup_decode
    assert found.pick.is_chain and found.expected >= 0.95 * best  # vLLM verifies chains alone
    tree = advise_on_report(report, Question(stack=Stack.eyrie), PLACE)
    assert tree.pick.shape == "2x2" and tree.expected == 1.53


def test_batches_between_measured_sizes_and_beyond(made: SimpleNamespace):
    one = made.report().costs[0]
    heavy = replace(one, batch=64, verify={1: 1.0, 3: 1.9, 7: 3.6})
    report = replace(made.report(), costs=[one, heavy], by_batch={})
    light = advise_on_report(report, Question(batch=1, stack=Stack.eyrie), PLACE)
    full = advise_on_report(report, Question(batch=64, stack=Stack.eyrie), PLACE)
    assert full.pick.nodes <= light.pick.nodes and full.pick.is_chain
    between = advise_on_report(report, Question(batch=16), PLACE)
    assert any("on the line between the measured sizes" in note for note in between.notes)
    beyond = advise_on_report(report, Question(batch=128), PLACE)
    assert any("Batch 128 was not measured" in note for note in beyond.notes)


def test_the_gate_is_the_heads_own(made: SimpleNamespace):
    gate = advise_on_report(made.report(), Question(), PLACE).gate
    assert gate is not None and [one.temperature for one in gate.points] == [0, 0.5, 1]
    unmeasured = advise_on_report(made.report(temperatures=()), Question(), PLACE)
    page = render(unmeasured)
    assert "eval.temperatures=[" in page and "0.8" not in str(unmeasured.gate)
    with pytest.raises(ConfigError, match=r"eval\.temperatures|eval\.temperature="):
        advise_on_report(made.report(temperatures=()), Question(temperature=1.0), PLACE)


@pytest.mark.parametrize("rule", [Accept.typical, Accept.lenience])
def test_rules_that_change_the_text_are_refused(made: SimpleNamespace, rule: Accept):
    with pytest.raises(ConfigError, match="no longer the verifier's own"):
        advise_on_report(made.report(), Question(accept=rule), PLACE)


def test_a_loop_that_failed_its_check_is_not_served(made: SimpleNamespace):
    report = made.report()
    wrong = replace(report.by_prompt[0])  # only to have a name
    fault = SimpleNamespace(prompt=wrong.id, position=3, gap=0.5)
    broken = replace(report, lossless=replace(report.lossless, differing=[fault]))
    with pytest.raises(ConfigError, match=r"find the fault with python -m eval\.lossless"):
        advise_on_report(broken, Question(), PLACE)


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (Question(batch=0), "--batch=0: must be 1 or more"),
        (Question(temperature=-1.0), "--temperature=-1.0"),
        (Question(target=Target("p95", 2.0)), "give --answer-length"),
        (Question(tasks={"poetry": 1.0}), "the report has no such task"),
    ],
)
def test_questions_without_an_answer(made: SimpleNamespace, question: Question, says: str):
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        advise_on_report(made.report(), question, PLACE)
    with pytest.raises(ConfigError, match="measure it with python"):
        of_figures([], 0.05, {})


def test_the_line_to_serve_with(made: SimpleNamespace):
    found = advise_on_report(made.report(), Question(), PLACE)
    command = found.serving.line
    assert command.startswith("vllm serve some/verifier ")
    config = json.loads(command.split("--speculative-config ")[1].split("'")[1])
    assert config["method"] == "eagle3" and config["num_speculative_tokens"] == found.pick.nodes
    assert config["model"] == PLACE.head
    other = advise_on_report(made.report(), Question(stack=Stack.sglang), PLACE).serving.line
    assert "--speculative-algorithm EAGLE3" in other
    assert "--speculative-eagle-topk 1" in other


def test_page_and_json_say_the_same(made: SimpleNamespace):
    found = advise_on_report(made.report(), Question(batch=4, answer_length=64), PLACE)
    page, data = render(found), json.loads(advice_json(found))
    assert data["verdict"] == found.verdict and data["pick"]["worked"] in page
    for one in (*data["around"], *data["trees"]):
        assert one["worked"] in page
    for note in data["notes"]:
        assert note in page
    assert "1 + vllm:spec_decode_num_accepted_tokens_total" in page  # telemetry of the stack


def test_the_command_takes_the_newest_report(made: SimpleNamespace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run with a report"):
        tune.main([])
    folder = tmp_path / "runs" / "demo" / "eval"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(to_json(made.report()))
    assert tune.main(["--output", "advice.md", "--json", "advice.json"]) == 0
    assert "# Speculative decoding: on" in capsys.readouterr().out
    assert (tmp_path / "advice.md").read_text().startswith("# Speculative decoding")
    assert json.loads((tmp_path / "advice.json").read_text())["verdict"] == "on"
    assert tune.main(["--alpha", "0.7", "--c", "0.05", "--v", "5=1.1"]) == 0
