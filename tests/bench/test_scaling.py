"""The scaling benchmark: its whole path on tiny shapes, and that its bars can be missed."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # the benchmark's modules import each other

from bars import Bar
from problem import Problem
from scaling_points import FULL, SMALL, Measured, measure
from scaling_report import Results, bars_of, growth, head_gradient, line_through


def numbers_in(content) -> list[float]:
    if isinstance(content, dict):
        return [n for item in content.values() for n in numbers_in(item)]
    if isinstance(content, list):
        return [n for item in content for n in numbers_in(item)]
    return [content] if isinstance(content, int | float) else []


def test_the_path_runs_and_every_printed_figure_is_in_the_json(tmp_path: Path):
    target, plot = tmp_path / "scaling.json", tmp_path / "scaling.png"
    options = ["--tiny", "--threads", "1", "--tries", "1", "--json", target, "--plot", plot]
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("scaling.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(target.read_text())
    assert all(math.isfinite(number) for number in numbers_in(figures))
    assert list(figures["axes"]) == ["tokens", "depth", "share", "vocabulary"]
    assert [point["value"] for point in figures["axes"]["tokens"]] == [64, 128, 256]
    for point in (point for axis in figures["axes"].values() for point in axis):
        assert 0 < point["attention"] < point["seconds"]
        assert point["rest_seconds"] == pytest.approx(point["seconds"] - point["attention"])
        assert point["loss"] > 0 and point["guesses"] > 0 and point["rate"] > 0
    alone = figures["recomputed"][-1]
    assert alone["recompute"] and alone["shape"]["tokens"] == 512 and alone["share"] == 100
    assert alone["peak_bytes"] > 100e6  # a whole process, with its libraries
    assert "Bars" in run.stdout and "512 tokens, K = 3, 100 %" in run.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_recomputing_changes_no_loss():
    losses = [
        measure(replace(SMALL.with_tokens(64), recompute=recompute), 1, 1).loss
        for recompute in (False, True)
    ]
    assert losses[0] == losses[1]


def test_a_line_is_found_and_what_is_no_line_is_off():
    xs = [1.0, 10.0, 100.0]
    line = line_through(xs, [3 + 2 * x for x in xs])
    assert (line.start, line.slope) == (pytest.approx(3), pytest.approx(2))
    assert line.off < 1e-9
    assert line_through(xs, [x * x for x in xs]).off > 0.5
    assert math.isfinite(line_through(xs, [0.0, 0.0, 0.0]).off)


def test_full_plan_keeps_to_one_axis_at_a_time():
    axes = FULL.axes()
    assert all(FULL.middle in problems.values() for problems in axes.values())
    tokens = [problem.shape.tokens for problem in FULL.problems()]
    assert (min(tokens), max(tokens)) == (512, 16384)
    assert {problem.shape.draft_vocab for problem in FULL.problems()} >= {4096, 49152}


def as_if(seconds, extra) -> Results:
    """Results of the full plan that follow two formulas in a problem."""
    return {
        problem: Measured(
            seconds=seconds(problem) + problem.attention_flops / 1e11,
            attention=problem.attention_flops / 1e11,
            extra_bytes=int(extra(problem)),
            rate=2e11,
            loss=1.0,
            peak_bytes=2_000_000_000,
        )
        for problem in FULL.problems()
    }


def missed(results: Results) -> list[str]:
    bars: list[Bar] = bars_of(FULL, results)
    return [bar.what for bar in bars if not bar.reached]


def linear_time(problem: Problem) -> float:
    return problem.flops / 1.5e11


def linear_memory(problem: Problem) -> float:
    return 30_000 * problem.guesses + 12_000 * problem.tokens + head_gradient(problem)


def test_what_is_linear_reaches_every_bar():
    assert not missed(as_if(linear_time, linear_memory))


def test_time_that_is_quadratic_in_length_misses():
    slow = as_if(lambda p: linear_time(p) + (p.tokens / 2048) ** 2, linear_memory)
    assert any("Length: time of a guess" in what for what in missed(slow))
    assert any("Length: time without attention" in what for what in missed(slow))


def test_logits_that_are_kept_miss():
    def keeping(problem: Problem) -> float:
        return linear_memory(problem) + 4 * problem.guesses * problem.shape.draft_vocab

    found = as_if(linear_time, keeping)
    assert growth(FULL, found).share == pytest.approx(1)
    assert growth(FULL, found).crossed_share == pytest.approx(1)
    assert sum("Draft vocabulary" in what for what in missed(found)) == 2


def test_a_process_above_four_gigabytes_misses():
    found = as_if(linear_time, linear_memory)
    large = {problem: replace(taken, peak_bytes=4_100_000_000) for problem, taken in found.items()}
    assert sum("peak of the process" in what for what in missed(large)) == 2
