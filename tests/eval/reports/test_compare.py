"""Two reports compared: values, intervals, pairs, what makes them hard to compare, the command."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.schema import ConfigError, Precision
from eval.acceptance import Interval
from eval.compare import main
from eval.differences import (
    HIGHER,
    LOWER,
    NOTHING,
    SAME,
    Formula,
    Prompts,
    Resampling,
    compare_prompts,
    judge,
)
from eval.measure import ExactRuns
from eval.report import EvalReport, to_json

MEAN = Formula("mean", lambda sums: sums[..., 0] / sums[..., 1])


def prompts(values: list[float], names: str = "p") -> Prompts:
    rows = np.array([[value, 1.0] for value in values])
    return Prompts([(f"{names}{i}", "x") for i in range(len(values))], rows)


def test_pairs_cancel_what_makes_prompts_hard():
    """Values spread widely over prompts and b is 0.1 above a in each: seen in pairs alone."""
    spread = [float(i % 7) for i in range(40)]
    a, b = (
        prompts(spread),
        prompts([value + 0.1 + 0.01 * (i % 2) for i, value in enumerate(spread)]),
    )
    (paired,) = compare_prompts([MEAN], a, b, Resampling(2000))
    assert paired.paired and paired.verdict == HIGHER
    assert paired.difference == pytest.approx(0.105)
    assert 0.1 < paired.interval.low < 0.105 < paired.interval.high < 0.11
    (reverse,) = compare_prompts([MEAN], b, a, Resampling(2000))
    assert reverse.verdict == LOWER
    (apart,) = compare_prompts([MEAN], a, prompts(list(b.rows[:, 0]), "q"), Resampling(2000))
    assert not apart.paired and apart.verdict == SAME
    assert apart.interval.low < -0.3 and apart.interval.high > 0.3
    (equal,) = compare_prompts([MEAN], a, a, Resampling(100))
    assert (equal.interval, equal.verdict) == (Interval(0.0, 0.0), SAME)


def test_unpaired_interval_is_the_textbook_one():
    """Two means of 400: the difference's standard error is sqrt(s_a^2/n + s_b^2/n)."""
    generator = np.random.default_rng(3)
    first, second = generator.normal(0, 1, 400), generator.normal(0.3, 2, 400)
    (found,) = compare_prompts(
        [MEAN], prompts(list(first)), prompts(list(second), "q"), Resampling(4000)
    )
    error = 1.96 * np.sqrt(first.var() / 400 + second.var() / 400)
    assert found.interval.low == pytest.approx(found.difference - error, abs=0.02)
    assert found.interval.high == pytest.approx(found.difference + error, abs=0.02)


def test_order_of_the_prompts_does_not_matter():
    a, b = prompts([1, 2, 3, 9]), prompts([2, 4, 3, 9])
    turned = Prompts(b.keys[::-1], b.rows[::-1])
    assert compare_prompts([MEAN], a, b, Resampling(50)) == compare_prompts(
        [MEAN], a, turned, Resampling(50)
    )
    (partly,) = compare_prompts([MEAN], a, b.take(b.keys[1:3]), Resampling(50))
    assert (partly.a, partly.b, partly.prompts_a, partly.prompts_b) == (2.5, 3.5, 2, 2)


def test_nothing_measured_says_so():
    empty = Prompts([("p0", "x")], np.array([[0.0, 0.0]]))
    (found,) = compare_prompts([MEAN], empty, empty, Resampling(20))
    assert found.verdict == NOTHING and np.isnan(found.difference)
    assert judge(Interval(0.0, 1.0)) == judge(Interval(-1.0, 0.0)) == SAME
    assert compare_prompts([MEAN], prompts([]), empty, Resampling(20)) == []


def written(folder: Path, name: str, report: EvalReport) -> str:
    path = folder / f"{name}.json"
    path.write_text(to_json(report))
    return str(path)


def compared(folder: Path, a: EvalReport, b: EvalReport, *words: str) -> dict[str, Any]:
    """The command's own JSON."""
    out = folder / "out.json"
    files = [written(folder, "a", a), written(folder, "b", b)]
    assert main([*files, "--json", str(out), "--bootstrap", "300", *words]) == 0
    found = json.loads(out.read_text())
    return {**found, "figures": {one["name"]: one for one in found["figures"]}}


@pytest.fixture
def heads(made: SimpleNamespace) -> SimpleNamespace:
    """Two heads on twelve prompts; the second accepts one guess more in a round of each."""
    names = [f"p{i}" for i in range(12)]
    tasks = ["qa", "code"]
    runs = [
        ExactRuns(
            [
                made.conversation(name, tasks[i % 2], made.answer([i % 3, 0, *more]))
                for i, name in enumerate(names)
            ]
        )
        for more in ([0], [1])
    ]
    return SimpleNamespace(
        a=made.report(runs[0]), b=made.report(runs[1], times=made.speed(factor=0.8)), runs=runs
    )


def test_values_are_the_reports_own(heads: SimpleNamespace, tmp_path: Path, capsys):
    found = compared(tmp_path, heads.a, heads.b)
    figures, a, b = found["figures"], heads.a, heads.b
    for name, of_a, of_b in [
        ("τ", a.tau, b.tau),
        ("α", a.alpha, b.alpha),
        ("α_tv", a.alpha_tv, b.alpha_tv),
        ("α_2", a.alpha_by_depth[1], b.alpha_by_depth[1]),
        ("survival_1", a.survival_by_depth[0], b.survival_by_depth[0]),
        ("qa: τ", a.tasks["qa"].tau, b.tasks["qa"].tau),
        ("code: α", a.tasks["code"].alpha, b.tasks["code"].alpha),
    ]:
        assert figures[name]["a"] == pytest.approx(of_a), name
        assert figures[name]["b"] == pytest.approx(of_b), name
        assert figures[name]["difference"] == pytest.approx(of_b - of_a), name
        low, high = figures[name]["interval"]
        assert low <= figures[name]["difference"] <= high
    assert figures["τ"]["verdict"] == HIGHER and figures["τ"]["prompts_a"] == 12
    assert figures["τ"]["difference"] == pytest.approx(1 / 3) and figures["τ"]["ratio"] is None
    # The plain loop takes 1.4 times as long in a, and 1.4 * 0.8 times in b.
    speed = figures["batch 1, N = 2: speed-up, decode"]
    assert (speed["a"], speed["b"]) == (pytest.approx(1.4), pytest.approx(1.12))
    assert speed["ratio"] == pytest.approx(0.8) and speed["verdict"] == LOWER
    assert figures["batch 1, N = 1: speed-up, decode"]["verdict"] == SAME
    assert figures["batch 1, N = 1: d"]["a"] == pytest.approx(0.1 / 20 * 40 * 3 / 3.3)
    assert found["warnings"] == []
    said = capsys.readouterr().out
    assert "12 in pairs" in said and "by chance" in said


def test_what_differs_besides_the_head_is_named(heads: SimpleNamespace, tmp_path: Path):
    section = replace(
        heads.b.settings.eval, n_draft=3, temperature=0.5, speed_dtype=Precision.float32
    )
    settings = replace(
        heads.b.settings, eval=section, accept_rule="rejection", device="H200", threads=8
    )
    said = compared(tmp_path, heads.a, replace(heads.b, settings=settings))["warnings"]
    for part in (
        "eval.n_draft: a has 2, b has 3",
        "eval.temperature: a has 0.0, b has 0.5",
        "accept rule: a has greedy, b has rejection",
        "eval.speed_dtype: a has bfloat16, b has float32",
        "device: a has CPU, b has H200",
        "threads: a has 2, b has 8",
    ):
        assert any(one.startswith(part) for one in said), part
    assert len(said) == 6


def test_another_verifier_is_refused(heads: SimpleNamespace, tmp_path: Path):
    other = replace(heads.b, settings=replace(heads.b.settings, verifier="another"))
    with pytest.raises(ConfigError, match=r"verifier another and .* with some/verifier"):
        compared(tmp_path, heads.a, other)
    found = compared(tmp_path, heads.a, other, "--same-verifier")
    assert found["warnings"][0].startswith("verifier: a has some/verifier, b has another")


def test_other_prompts_are_told_and_not_paired(
    made: SimpleNamespace, heads: SimpleNamespace, tmp_path: Path
):
    """Matched by id and text: the same ids with other questions are other prompts."""
    renamed = ExactRuns(
        [
            replace(one, prompt=replace(one.prompt, turns=one.prompt.turns * 2))
            for one in heads.runs[1].runs
        ]
    )
    found = compared(tmp_path, heads.a, made.report(renamed))
    assert not found["figures"]["τ"]["paired"]
    assert "none of a's 12 is among b's 12" in found["warnings"][0]
    half = ExactRuns(heads.runs[1].runs[:7])
    partly = compared(tmp_path, heads.a, made.report(half))
    assert partly["figures"]["τ"]["prompts_a"] == 7 and partly["figures"]["τ"]["paired"]
    assert partly["warnings"][0].startswith("other prompts: 7 are shared")
    assert partly["figures"]["τ"]["a"] != pytest.approx(heads.a.tau)


def test_the_command_draws_and_refuses(heads: SimpleNamespace, tmp_path: Path, capsys):
    plot = tmp_path / "d.png"
    compared(tmp_path, heads.a, heads.b, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no report there"):
        main([str(tmp_path / "nowhere"), str(tmp_path / "a.json")])
    for words in (["a.json"], ["a", "b", "--bootstrap", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert capsys.readouterr().err.strip().count("\n") == 1
