"""The page: it says what the JSON says, adds up, and stays one page."""

import json
import os
import re
from pathlib import Path

import pytest

from eval.advice.advise import Advice, advise_on_figures, advise_on_report
from eval.advice.page import render, to_json
from eval.advice.question import Figures, Question, Stack, Target
from eval.report import to_json as report_json
from eval.report_file import read_report
from eval.tune import main

# Of the record's text: what the page says in other words (names of enums, figures without an
# order), and what stands in one of its tables in parts.
UNSAID = {"question", "pick", "tau_from", "vllm", "sglang"}


def full(made, stack: Stack = Stack.vllm) -> Advice:
    speeds = [made.timed("4", 4, 4, 3.362, 1.8), made.timed("2x2", 2, 6, 2.9, 1.7)]
    report = made.report(
        costs=[made.costs(1, 0.0), made.costs(16, 0.1)],
        timed={1: speeds},
        heat={(1.0, "rejection"): (0.6, 0.36, 0.216, 0.13)},
        ranks=(0.8, 0.09, 0.035),
    )
    target = Target("p95", 30.0)
    question = Question(answer_length=600, prompt_length=20, target=target, stack=stack)
    return advise_on_report(report, question, made.place)


def on_eyrie(made) -> Advice:
    """With trees."""
    return full(made, Stack.eyrie)


def off(made) -> Advice:
    return advise_on_report(
        made.report(survival=made.weak, costs=[made.costs(1, 0.0)]), Question(), made.place
    )


def given(made) -> Advice:
    return advise_on_figures(Figures(0.8, 0.05, [], {}), Question(dialogues=100), made.place)


def texts(value, path: str = "") -> list[tuple[str, str]]:
    """Every string of the JSON with where it stands."""
    if isinstance(value, dict):
        return [pair for key, one in value.items() for pair in texts(one, f"{path}.{key}")]
    if isinstance(value, list):
        return [pair for one in value for pair in texts(one, path)]
    return [(path, value)] if isinstance(value, str) else []


@pytest.mark.parametrize("make", [full, on_eyrie, off, given])
def test_the_page_says_what_the_json_says(made, make):
    advice = make(made)
    page = render(advice)
    found = json.loads(to_json(advice))
    if not found["family"]["others"]:  # an existing head: its family alone, and no table
        found["family"]["family"] = found["family"]["family"]["name"]
    checked = [
        (path, text)
        for path, text in texts(found)
        if not any(part in UNSAID for part in path.strip(".").split("."))
    ]
    missing = [(path, text) for path, text in checked if text.replace("|", "\\|") not in page]
    assert not missing and len(checked) > 12
    for shape in (found["pick"], *found["around"], *found["trees"]):
        assert shape["worked"] in page or make is off
    assert str(found["question"]["batch"]) in page


@pytest.mark.parametrize("make", [full, on_eyrie, off, given])
def test_the_arithmetic_adds_up(made, make):
    """Every tokens / (costs) = speed-up on the page, recomputed from the printed figures."""
    page = render(make(made))
    sums = re.findall(r"([\d.]+) / \(([\d. +]+)\) = ([\d.]+)", page)
    assert len(sums) >= 3
    for tokens, costs, said in sums:
        total = sum(float(one) for one in costs.split(" + "))
        assert float(tokens) / total == pytest.approx(float(said), abs=0.003)


def test_one_page(made):
    for make, most in ((full, 900), (given, 900), (off, 300)):
        assert len(render(make(made)).split()) < most


def test_off_says_nothing_of_watching(made):
    page = render(off(made))
    assert page.startswith("# Speculative decoding: off\n")
    assert "First week" not in page and "Rollback" not in page and "## N: none" in page
    on = render(full(made))
    assert all(f"## {part}" in on for part in ("Serve", "N: 4", "Tree", "Temperature gate"))
    assert all(f"## {part}" in on for part in ("Rollback", "Never set", "First week", "Draft"))
    assert on.index("## Serve") < on.index("## N: 4") < on.index("## First week")


def test_a_table_per_batch_size(made):
    advice = full(made)
    assert [one.batch for one in advice.by_batch] == [1, 16]
    assert f"| 16 | {advice.by_batch[1].chain.shape} | {advice.by_batch[1].chain.worked} |" in (
        render(advice)
    )


def test_the_command(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """From a file to page and JSON; the newest report of runs/ when none is named."""
    report = made.report(costs=[made.costs(1, 0.0)])
    older = tmp_path / "runs" / "a" / "eval" / "report.json"
    older.parent.mkdir(parents=True)
    older.write_text(report_json(made.report(survival=made.weak, costs=[made.costs(1, 0.0)])))
    newer = tmp_path / "runs" / "demo" / "eval" / "report.json"
    newer.parent.mkdir(parents=True)
    newer.write_text(report_json(report))
    os.utime(older, (1, 1))
    monkeypatch.chdir(tmp_path)
    assert main(["--json", "advice.json", "--output", "advice.md"]) == 0
    shown = capsys.readouterr().out
    page = Path("advice.md").read_text()
    assert shown.startswith("report: runs/demo/eval/report.json\n") and page in shown
    assert "python -m launch.export runs/demo/best --to vllm\nvllm serve some/verifier" in page
    assert json.loads(Path("advice.json").read_text())["verdict"] == "on"
    assert main([str(older)]) == 0  # off is an answer, too
    assert "# Speculative decoding: off" in capsys.readouterr().out
    assert read_report(newer).tau == report.tau
    Path("runs/demo/export/vllm").mkdir(parents=True)
    Path("runs/demo/export/vllm/config.json").write_text("{}")
    main([])
    assert "launch.export" not in capsys.readouterr().out


def test_the_command_with_figures(capsys):
    words = "--alpha 0.8 --c 0.05 --v 5=1.2 --v 9=1.4 --stack sglang"
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    # each token more costs .05: 3.689 / 1.5 = 2.459, 3.951 / 1.6 = 2.470, 4.161 / 1.7 = 2.448
    assert "3.951 / (1.300 + 0.300) = 2.470" in shown and "A chain of 6 is predicted" in shown
    assert "chains of 1 to 8 were weighed" in shown
