"""What eval.tune must not advise on: each is one sentence with the way out."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from conf.compose import load_saved, to_yaml
from conf.schema import ConfigError, RunConfig, RunSection, VerifierSection
from data.manifest import FORMAT_VERSION, Manifest, write_manifest
from eval.advice.advise import advise_on_figures, advise_on_report
from eval.advice.question import Accept, Figures, Question, Stack, Target
from eval.head_check import check_verifier, other_weights
from eval.pages.cautions import list_warnings
from eval.report import to_json
from eval.tune import advise, main, parser
from models.draft_file import CONFIG
from models.token_strings import FILE, save_tokens
from models.verifier import weights_fingerprint


def refused(report, question: Question, place) -> str:
    with pytest.raises(ConfigError) as error:
        advise_on_report(report, question, place)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def plain(made):
    return made.report(costs=[made.costs(1, 0.0)])


@pytest.mark.parametrize("accept", [Accept.typical, Accept.lenience])
def test_rules_that_change_the_text(made, plain, accept):
    text = refused(plain, Question(accept=accept), made.place)
    assert text.startswith(f"--accept={accept.value}: ")
    assert "use argmax_draft or rejection, which are exact" in text
    with pytest.raises(ConfigError, match="no longer the verifier's"):
        advise_on_figures(Figures(0.8, 0.05, [], {}), Question(accept=accept), made.place)


def test_a_report_by_a_rule_that_is_not_exact(made):
    text = refused(made.report(rule="typical"), Question(), made.place)
    assert text.startswith("settings.accept_rule=typical: not one of the exact rules")


def test_a_loop_that_parted_from_plain_decoding(made):
    """A token .5 behind in the logits is no tie, nor an early end; one 1e-5 behind is."""
    table = [made.costs(1, 0.0)]
    text = refused(made.report(costs=table, gap=0.5), Question(), made.place)
    assert text.startswith("lossless: prompt p7 parts from plain decoding at token 12 by 0.5")
    assert "python -m eval.lossless" in text
    refused(made.report(costs=table, gap=math.nan), Question(), made.place)
    tie = made.report(costs=table, gap=1e-5)
    assert advise_on_report(tie, Question(), made.place).verdict == "on"


def test_without_alpha_a_calibration_run_is_asked_for(made, plain):
    empty = made.report(survival=(0.0,), costs=[made.costs(1, 0.0)])
    assert advise_on_report(empty, Question(), made.place).verdict == "off"  # measured, and bad
    with pytest.raises(ConfigError, match=r"--alpha: not known.*measure it with python -m eval"):
        advise_on_figures(Figures(None, 0.05, [], {}), Question(), made.place)


def test_a_report_that_counts_no_round(made, plain):
    text = refused(replace(plain, counters=replace(plain.counters, rounds=0)), Question(), None)
    assert "counts no round" in text and "python -m eval.main" in text


def test_high_temperature_without_measurements(made, plain):
    text = refused(plain, Question(temperature=1.2), made.place)
    assert text.startswith("--temperature=1.2: acceptance was not measured there")
    assert "calibrate with python -m eval.main run.name=demo eval.temperatures=[1.2]" in text


def test_a_creative_mix_that_is_hotter_than_the_measured(made):
    report = made.report(
        costs=[made.costs(1, 0.0)],
        heat={(0.7, "rejection"): (0.6, 0.36)},
        tasks={"stories": (0.5, 0.25)},
    )
    text = refused(report, Question(temperature=1.0, tasks={"stories": 1.0}), made.place)
    assert "only at 0 (greedy), 0.7 (rejection)" in text and "eval.temperatures=[1]" in text
    text = refused(report, Question(temperature=0.7, tasks={"stories": 1.0}), made.place)
    assert "tasks were measured at 0 by the rule greedy alone" in text
    assert "eval.temperature=0.7" in text


def test_a_rule_that_was_not_measured(made):
    report = made.report(costs=[made.costs(1, 0.0)], heat={(1.0, "rejection"): (0.6, 0.3)})
    question = Question(temperature=1.0, accept=Accept.argmax_draft)
    text = refused(report, question, made.place)
    assert "by the rule argmax_draft" in text and "eval.rule=argmax_draft" in text


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (Question(tasks={"sums": 1.0}), "--tasks=sums: the report has no such task; it has chat"),
        (Question(tasks={"chat": 0.0}), "--tasks=chat=0: a share must be above 0"),
        (Question(batch=0), "--batch=0: must be 1 or more"),
        (Question(prompt_length=0), "--prompt-length=0: must be 1 or more"),
        (Question(temperature=-1), "--temperature=-1: must be 0 (greedy) or more"),
        (Question(target=Target("p95", 1.0)), "--latency-target: the time of a request depends"),
        (
            Question(target=Target("p95", 0.0), answer_length=9),
            "--latency-target=p95=0: must be above 0 seconds",
        ),
        (Question(version="new"), "--stack-version=new: not a version; try 0.32.0"),
        (
            Question(stack=Stack.eyrie, version="1"),
            "--stack-version=1: Eyrie's loop is the one of this checkout",
        ),
    ],
)
def test_questions_without_an_answer(made, question, said):
    report = made.report(costs=[made.costs(1, 0.0)], tasks={"chat": (0.5,)})
    assert refused(report, question, made.place).startswith(said)


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (Figures(1.2, 0.05, [], {}), "--alpha=1.2: must lie in 0 to 1"),
        (Figures(0.8, -1, [], {}), "--c=-1: must be 0 or more"),
        (Figures(None, 0.05, [0.5, 0.6], {}), "--survival=0.5,0.6: each must lie in 0 to the one"),
        (Figures(0.8, 0.05, [], {1: 1.0}), "--v=1=1: must be tokens"),
    ],
)
def test_figures_that_no_draft_can_have(made, figures, said):
    with pytest.raises(ConfigError) as error:
        advise_on_figures(figures, Question(), made.place)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["r.json", "--alpha", "0.8", "--c", "0.1"], "leaves open which counts"),
        (["--alpha", "0.8", "--survival", "0.8", "--c", "0.1"], "leaves open which counts"),
        (["--alpha", "0.8"], "--c: the draft's cost is not known"),
        (["--c", "0.1"], "--c: stands in for a report's figures"),
        (["--v", "5=1.1"], "--v: stands in for a report's figures"),
        (["--dialogues", "5"], "--dialogues: stands in for a report's figures"),
        (["--alpha", "0.8", "--c", "0.1", "--batch", "8"], "--batch=8: beside other sequences"),
        (["--alpha", "0.8", "--c", "0.1", "--tasks", "a=1"], "--tasks: shares need the acceptance"),
        ([], "no run with a report in it; make one with python -m eval.main"),
        (["nowhere"], "nowhere"),
    ],
)
def test_command_lines(words, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        main(words)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--latency-target", "p99=1"],
        ["--tasks", "chat"],
        ["--v", "5"],
        ["--accept", "nonsense"],
        ["--survival", "a,b"],
    ],
)
def test_words_that_cannot_be_read(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(words)
    assert ended.value.code == 2 and "--help" in capsys.readouterr().err


@pytest.fixture
def head(tiny_verifier: Path, tmp_path: Path) -> Path:
    """runs/demo/best with the tiny verifier's tokens, and a manifest of its weights in cache/."""
    folder = tmp_path / "runs" / "demo" / "best"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    save_tokens(folder, AutoTokenizer.from_pretrained(tiny_verifier))
    cfg = RunConfig(
        run=RunSection(name="demo", cache=str(tmp_path / "cache")),
        verifier=VerifierSection(path=str(tiny_verifier)),
    )
    (folder.parent / "config.yaml").write_text(to_yaml(cfg))
    capture = tmp_path / "cache" / "capture-1"
    capture.mkdir(parents=True)
    leave_manifest(capture, tiny_verifier, weights_fingerprint(tiny_verifier))
    return folder


def leave_manifest(capture: Path, verifier: Path, weights: str) -> None:
    write_manifest(
        capture,
        Manifest(
            *(FORMAT_VERSION, "f", weights, str(verifier), "float32", "p", "t", "t", "float32"),
            *(64, [2, 4, 5], "transformers", ""),
        ),
    )


def test_the_verifier_that_the_head_was_trained_on(head: Path, tiny_verifier: Path):
    assert "that the head was trained on" in check_verifier(head, str(tiny_verifier))


def test_a_verifier_of_other_tokens(head: Path, tiny_verifier: Path):
    tokens = json.loads((head / FILE).read_text())
    tokens[9], tokens[10] = tokens[10], tokens[9]
    (head / FILE).write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match="token 9 is"):
        check_verifier(head, str(tiny_verifier))


def test_another_revision_of_the_verifier(head: Path, tiny_verifier: Path, tmp_path: Path):
    leave_manifest(tmp_path / "cache" / "capture-1", tiny_verifier, "another")
    with pytest.raises(ConfigError, match=r"its weights .* are not those that the head learnt"):
        check_verifier(head, str(tiny_verifier))


def test_a_report_warns_of_weights_that_changed(
    made, head: Path, tiny_verifier: Path, tmp_path: Path
):
    """User report B69: a head serves the weights and the precision that it learnt from."""
    cfg = load_saved(head.parent / "config.yaml")
    assert other_weights(cfg) is None
    leave_manifest(tmp_path / "cache" / "capture-1", tiny_verifier, "another")
    words = other_weights(cfg)
    assert words == f"{weights_fingerprint(tiny_verifier)}, not another"
    report = made.report(costs=[made.costs(1, 0.0)])
    exact = SimpleNamespace(skipped={})
    assert not any("other weights" in one for one in list_warnings(report, exact))
    report = replace(report, data=replace(report.data, other_weights=words))
    assert any(f"fingerprint {words}" in one for one in list_warnings(report, exact))
    (tmp_path / "cache" / "capture-1" / "manifest.json").unlink()
    assert other_weights(cfg) is None
    cfg = replace(cfg, eval=replace(cfg.eval, head=str(tmp_path)))  # one that was exported
    assert other_weights(cfg) is None
    (tmp_path / "eyrie.json").write_text(json.dumps({"fingerprint": "another"}))
    assert other_weights(cfg) == words
    (tmp_path / "eyrie.json").write_text("[]")
    with pytest.raises(ConfigError, match="not as export wrote it"):
        other_weights(cfg)


def test_weights_that_cannot_be_compared_are_said(head: Path, tiny_verifier: Path, tmp_path: Path):
    (tmp_path / "cache" / "capture-1" / "manifest.json").unlink()
    assert "were not compared" in check_verifier(head, str(tiny_verifier))
    with pytest.raises(ConfigError, match="no head in"):
        check_verifier(tmp_path, str(tiny_verifier))


def test_the_command_line_compares_the_verifier(made, head: Path, tiny_verifier: Path, tmp_path):
    (head / CONFIG).unlink()
    file = tmp_path / "runs" / "demo" / "eval" / "report.json"
    file.parent.mkdir()
    file.write_text(to_json(made.report(costs=[made.costs(1, 0.0)])))
    with pytest.raises(ConfigError, match="no head in"):
        advise(parser().parse_args([str(file), "--verifier", str(tiny_verifier)]))
