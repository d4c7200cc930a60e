"""The arithmetic of chains: known figures, its limits, and the command."""

import json
import math
from pathlib import Path

import pytest

from conf.schema import ConfigError
from eval.arithmetic.published import CHAIN_RUNS, arithmetic_checks, chain_checks, survival_of
from eval.theory import (
    Best,
    best_n,
    best_n_of_alpha,
    continued,
    expected_tokens,
    expected_tokens_of_survival,
    main,
    speedup,
    time_per_token,
)

LENGTHS = (1, 3, 5, 7, 10)
# Printed in the course lesson (E and time a token at c = .04); its figures stand.
TOKENS = {
    0.55: (1.55, 2.02, 2.16, 2.20, 2.22),
    0.70: (1.70, 2.53, 2.94, 3.14, 3.27),
    0.80: (1.80, 2.95, 3.69, 4.16, 4.57),
    0.90: (1.90, 3.44, 4.69, 5.70, 6.86),
    0.95: (1.95, 3.71, 5.30, 6.73, 8.62),
}
TIMES = {
    0.55: (0.671, 0.555, 0.555, 0.581, 0.631),
    0.70: (0.612, 0.442, 0.408, 0.407, 0.428),
    0.80: (0.578, 0.379, 0.325, 0.308, 0.306),
    0.90: (0.547, 0.326, 0.256, 0.225, 0.204),
    0.95: (0.533, 0.302, 0.226, 0.190, 0.162),
}
# Best N and speed-up at c = .01 .02 .04 .05 .10 .20 .30, found by a scan that is not this code.
OPTIMA = {
    0.50: "5:1.88 4:1.79 3:1.67 3:1.63 2:1.46 1:1.25 1:1.15",
    0.60: "7:2.30 6:2.17 4:1.99 4:1.92 3:1.67 2:1.40 1:1.23",
    0.70: "9:2.97 8:2.76 6:2.47 6:2.35 4:1.98 3:1.58 2:1.37",
    0.75: "11:3.49 9:3.20 7:2.81 7:2.67 5:2.19 3:1.71 2:1.45",
    0.80: "14:4.23 11:3.82 9:3.28 8:3.09 6:2.47 4:1.87 3:1.55",
    0.85: "17:5.39 14:4.75 11:3.97 10:3.70 7:2.85 5:2.08 4:1.69",
    0.90: "24:7.49 19:6.37 15:5.09 13:4.67 10:3.43 7:2.37 5:1.87",
    0.95: "40:12.5 31:9.95 23:7.38 21:6.60 15:4.48 10:2.87 8:2.18",
}
COSTS = (0.01, 0.02, 0.04, 0.05, 0.10, 0.20, 0.30)


@pytest.mark.parametrize("alpha", TOKENS)
def test_the_lessons_tables(alpha: float):
    for n, tokens, time in zip(LENGTHS, TOKENS[alpha], TIMES[alpha], strict=True):
        found = expected_tokens(alpha, n)
        assert found == pytest.approx(tokens, abs=0.005001)
        assert time_per_token(found, n, 0.04) == pytest.approx(time, abs=0.000501)
        if n <= 5:  # an off-by-one shows; beyond, low α has too little left to add
            assert expected_tokens(alpha, n - 1) != pytest.approx(tokens, abs=0.005001)


@pytest.mark.parametrize("alpha", OPTIMA)
def test_best_n_over_alpha_and_c(alpha: float):
    for c, known in zip(COSTS, OPTIMA[alpha].split(), strict=True):
        n, times = known.split(":")
        best = best_n_of_alpha(alpha, c)
        digit = 0.5 * 10 ** -len(times.partition(".")[2]) + 1e-6
        assert best.n == int(n)
        assert best.speedup == pytest.approx(float(times), abs=digit)


def test_the_band_by_brute_force():
    """Every length inside loses less than 1 %, every other one more."""
    for alpha, c in ((0.8, 0.05), (0.95, 0.02), (0.6, 0.3)):
        best = best_n_of_alpha(alpha, c)
        for n in range(200):
            near = speedup(expected_tokens(alpha, n), n, c) >= 0.99 * best.speedup
            assert near is (best.low <= n <= best.high)


def test_published_checks_pass_and_an_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch):
    assert all(check.passed for check in [*arithmetic_checks(), *chain_checks()])
    monkeypatch.setattr(
        "eval.arithmetic.published.expected_tokens", lambda alpha, n: expected_tokens(alpha, n - 1)
    )
    assert not all(check.passed for check in arithmetic_checks())


def test_rates_by_depth_as_if_unconditional_would_be_caught():
    """1 + the sum of conditional rates, a mistake that has been made, is far from the count."""
    for run in CHAIN_RUNS:
        assert abs(1 + sum(run.alphas) - run.tokens) > 1
        right = expected_tokens_of_survival(survival_of(run.alphas), 5)
        assert abs(right - run.tokens) < 0.115


def test_limits():
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(1 - 1e-12, 7) == pytest.approx(8, abs=1e-9)
    assert best_n_of_alpha(0.3, 0.3).n == 0  # a guess that costs what it brings: draft nothing
    assert best_n_of_alpha(0.3, 0.29).n == 1
    assert best_n_of_alpha(1.0, 0.1, max_n=50).n == 50
    assert best_n_of_alpha(0.31, 0.3).speedup >= (1 + 0.31) / (1 + 0.3)  # Leviathan's lower bound


def test_verifying_guesses_costs():
    """Free guesses, then 1 % of a step each: the figure at 4.67 falls to 4.34."""
    assert best_n_of_alpha(0.9, 0.05).speedup == pytest.approx(4.67, abs=0.005)
    assert best_n_of_alpha(0.9, 0.05, 0.01).speedup == pytest.approx(4.34, abs=0.005)
    assert speedup(2.0, 4, 0.1, 0.05) == pytest.approx(2 / 1.6)


def test_survival_says_the_same_as_alpha_where_it_is_flat():
    survival = [0.8**k for k in range(1, 13)]
    for n in range(13):
        assert expected_tokens_of_survival(survival, n) == pytest.approx(expected_tokens(0.8, n))
    depths = range(len(survival) + 1)
    assert best_n([expected_tokens_of_survival(survival, n) for n in depths], 0.05).n == 8
    assert continued(survival[:2], 12) == pytest.approx(survival)
    assert continued(survival, 3) == survival[:3]
    assert continued([0.5, 0.0], 4) == [0.5, 0.0, 0.0, 0.0]


def test_a_curve_is_not_asked_for_more_than_it_knows():
    with pytest.raises(ValueError, match="depth 2"):
        expected_tokens_of_survival([0.5, 0.2], 3)
    with pytest.raises(ValueError, match="no chain"):
        best_n([], 0.1)
    assert best_n([1.0], 0.1) == Best(0, 1.0, 0, 0)


def test_command_without_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["--plots", str(tmp_path), "--json", str(tmp_path / "t.json")]) == 0
    page = capsys.readouterr().out
    for words in ("8:3.09 [7-9]", "31:9.95 [26-37]", "best N 15 at 5.09", "N13 7.71/4.67"):
        assert words in page
    found = json.loads((tmp_path / "t.json").read_text())
    best = {(row["alpha"], row["c"]): row["best"] for row in found["best"]}
    assert best[0.95, 0.02] | {"speedup": 0} == {"n": 31, "low": 26, "high": 37, "speedup": 0}
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "theory_tokens.png",
        "theory_time.png",
        "theory_best_n.png",
    }


def test_command_fails_when_a_check_is_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eval.arithmetic.published.CHAIN_REACH", 0.0)
    assert main([]) == 1
    assert "off: Vicuna-7B" in capsys.readouterr().out


def test_a_range_that_ends_before_the_minimum_says_so(capsys: pytest.CaptureFixture[str]):
    """The lesson looks for a minimum in 1..10 at α .9, c .04; it is at 15."""
    main(["--alpha", "0.9", "--c", "0.04", "--max-n", "10"])
    assert "raise --max-n above 10" in capsys.readouterr().out
    main(["--alpha", "0.9", "--c", "0.04"])
    assert "best N 15 at 5.09, within 1 % 13 to 17\n" in capsys.readouterr().out


def test_a_measured_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    words = ["--survival", "0.5", "0.2", "--c", "0.1", "--max-n", "3"]
    main([*words, "--json", str(tmp_path / "s.json")])
    page = capsys.readouterr().out
    assert "deeper than measured" in page
    one = json.loads((tmp_path / "s.json").read_text())["drafts"][0]
    assert one["draft"]["tokens"] == pytest.approx([1, 1.5, 1.7, 1.78])
    assert one["best"]["n"] == 2


def report_file(folder: Path) -> Path:
    """d = .1 N and v = 1 + .02 N, so the lines through them are known."""
    runs = {
        str(n): {"d": 0.1 * n, "v": 1 + 0.02 * n, "speedup_decode": 1 + n / 10} for n in (1, 2, 4)
    }
    path = folder / "report.json"
    path.write_text(json.dumps({"survival_by_depth": [0.6, 0.3, 0.2, None], "by_n": runs}))
    return path


def test_a_report_brings_survival_and_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = report_file(tmp_path)
    main(["--report", str(path), "--json", str(tmp_path / "r.json")])
    one = json.loads((tmp_path / "r.json").read_text())["drafts"][0]
    assert one["draft"]["c"] == pytest.approx(0.1)
    assert one["draft"]["verify_cost"] == pytest.approx(0.02)
    assert one["draft"]["tokens"] == pytest.approx([1, 1.6, 1.9, 2.1])
    speedups = [tokens / (1 + n * 0.12) for n, tokens in enumerate(one["draft"]["tokens"])]
    assert one["best"]["speedup"] == pytest.approx(max(speedups))
    assert "measured 1.200" in capsys.readouterr().out
    main(["--report", str(path), "--c", "0.2", "0.3", "--verify-cost", "0"])
    page = capsys.readouterr().out
    assert "c 0.2, 0 a verified" in page and "c 0.3, 0 a verified" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--alpha", "1.2"], "--alpha=1.2: a chance is from 0 to 1"),
        (["--alpha", "nan"], "--alpha=nan: a chance"),
        (["--c", "-1"], "--c=-1.0: a cost is 0 or more"),
        (["--verify-cost", "inf"], "--verify-cost=inf: a cost"),
        (["--max-n", "0"], "--max-n=0: must be 1"),
        (["--survival", "0.2", "0.5"], "--survival=0.5: shares of all rounds"),
        (["--alpha", "0.5", "--survival", "0.5"], "not allowed with"),
    ],
)
def test_bad_words_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


@pytest.mark.parametrize("content", [None, "no json", "[]", '{"survival_by_depth": []}'])
def test_a_file_that_is_no_report(content: str | None, tmp_path: Path):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="--report="):
        main(["--report", str(path)])


def test_a_report_without_rounds(tmp_path: Path):
    path = report_file(tmp_path)
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"survival_by_depth": [None]}))
    with pytest.raises(ConfigError, match="no round"):
        main(["--report", str(path)])


def test_figures_stay_finite():
    assert math.isfinite(time_per_token(expected_tokens(0.0, 10_000), 10_000, 1.0))
