"""The report: figures of hand-counted rounds, what enters the top level, and the page."""

import json
import math
import re
from typing import Any

import pytest

from conf.schema import EvalSection
from data.eval_prompts import EvalPrompt
from data.records import Turn
from eval.generation import Generation, Round
from eval.lossless import Difference
from eval.measure import Answer, ExactRuns, PromptRuns, count, count_range
from eval.ngram import NgramTable
from eval.page import render_page, terminal_lines
from eval.report import UNSEEN, DataOrigin, EvalReport, EvalSettings, to_json
from eval.speed import SpeedReport, Timing, summarise
from eval.summary import build_report
from eval.tables import shown

N = 2
TOP_LEVEL = [
    *("tau", "alpha", "alpha_by_depth", "survival_by_depth", "c", "speedup_decode"),
    *("speedup_end_to_end", "speedup_vs_generate", "predicted_speedup", "by_n", "lossless"),
    *("counters", "intervals", "tasks", "settings", "alpha_tv", "ngram_floor"),
    *("position_ranges", "provenance", "data"),
]


def answer(accepted: list[int], differs: bool = False) -> Answer:
    """Rounds that accept so many of two guesses each; the text is 1, 2, 3, ..."""
    count = 1 + sum(n + 1 for n in accepted)
    tokens = list(range(1, count + 1))
    rounds = [Round([0] * N, n) for n in accepted]
    plain = Generation(tokens, [], [count + 1, count + 2], 0.1, 1.0, 0.0, 0.0, [])
    spoken = [*tokens[:-1], 99] if differs else tokens
    overlap = [0.5] * sum(min(n + 1, N) for n in accepted)
    fast = Generation(spoken, rounds, [], 0.1, 0.7, 0.1, 0.6, overlap)
    difference = Difference(0, count - 1, tokens[-1], 99, 1e-7) if differs else None
    return Answer([0], plain, fast, difference)


def conversation(name: str, task: str, *answers: Answer, seen: bool | None = True) -> PromptRuns:
    prompt = EvalPrompt(name, task, seen, (Turn("user", "x"),) * len(answers))
    return PromptRuns(prompt, list(answers))


RUNS = ExactRuns(
    [
        conversation("a", "json", answer([2, 0, 1])),
        conversation("b", "json", answer([0, 0]), seen=None),
        conversation("c", "chat", answer([2]), answer([1, 1])),
        conversation("d", "poem", answer([0, 0, 0, 0], differs=True), seen=False),
    ]
)


def speed() -> SpeedReport:
    return summarise(
        {
            "plain": [Timing(11, 0.5, 1.0), Timing(21, 0.5, 2.2)],
            "1": [Timing(11, 0.6, 0.7, 0.1, 0.6, 6, 5), Timing(21, 0.6, 1.5, 0.2, 1.3, 12, 9)],
            "2": [Timing(11, 0.6, 0.9, 0.2, 0.6, 5, 6), Timing(21, 0.6, 1.6, 0.5, 1.1, 9, 12)],
            "generate": [Timing(11, 0.0, 2.0), Timing(21, 0.0, 4.2)],
        },
        resamples=200,
        seed=0,
    )


def settings(**changes: Any) -> EvalSettings:
    section = EvalSection(n_draft=N, max_new_tokens=64, bootstrap=200, **changes)
    return EvalSettings(
        section, "demo", "some/verifier", "best", [2, 4], "greedy", "float32", "CPU", 2, "sdpa", 1
    )


def report(runs: ExactRuns = RUNS, longest: int = 512, **changes: Any) -> EvalReport:
    origin = DataOrigin(
        *(["p.jsonl"], 4, {"not JSON": 1}, 2, 1, ["t.jsonl"], 90, 10, longest, 1.7),
        supervised_tokens=4321,
        verifier_agreement=0.875,
    )
    table = NgramTable(4).fit([[1, 2, 3, 9]])
    provenance = {"git": "abc", "packages": {"torch": "2.13.0"}}
    return build_report(runs, speed(), table, settings(**changes), origin, provenance)


def test_figures_follow_their_definitions():
    """Rounds accept 2 0 1 | 0 0 | 2, 1 1: eight rounds, seven drafts accepted."""
    found = report()
    counters = found.counters
    assert counters.rounds == 8 and counters.drafted == 16
    assert counters.accepted_by_depth == [5, 2] and counters.reached_by_depth == [8, 5]
    assert counters.tested == 13
    assert counters.tokens == 1 + 6 + 1 + 2 + 1 + 3 + 1 + 4
    assert found.tau == pytest.approx(1 + 7 / 8) == pytest.approx(1 + sum(found.survival_by_depth))
    assert found.alpha == pytest.approx(7 / 13)
    assert found.alpha_by_depth == pytest.approx([5 / 8, 2 / 5])
    assert found.survival_by_depth == pytest.approx([5 / 8, 2 / 8])
    assert found.alpha_tv == 0.5
    alpha = 7 / 13
    assert found.tau_if_independent == pytest.approx(1 + alpha + alpha**2)
    assert found.prompts == 3
    best = speed().by_n[1]
    assert found.predicted_speedup == best.predicted_speedup and found.c == best.c
    assert found.speedup_decode == best.speedup_decode
    for figure, interval in [
        (found.tau, found.intervals.tau),
        (found.alpha, found.intervals.alpha),
        *zip(found.alpha_by_depth, found.intervals.alpha_by_depth, strict=True),
        *zip(found.survival_by_depth, found.intervals.survival_by_depth, strict=True),
    ]:
        assert interval.low <= figure <= interval.high


def test_mean_over_all_turns_not_the_last_alone():
    """A conversation's rounds are pooled over its turns: 2 | 1 1 gives 1 + 4/3."""
    both = count(RUNS.runs[2], N)
    assert (both.rounds, both.accepted, both.tau) == (3, 4, pytest.approx(1 + 4 / 3))


def test_unseen_patterns_are_an_entry_of_their_own():
    found = report()
    assert set(found.tasks) == {"json", "chat", UNSEEN}
    assert found.tasks["json"].prompts == 2 and found.tasks["json"].counters.rounds == 5
    assert found.tasks[UNSEEN].tau == 1.0 and found.tasks[UNSEEN].counters.rounds == 4
    assert (found.lossless.checked, found.lossless.identical) == (3, 3)
    assert found.tasks[UNSEEN].lossless.identical == 0
    parts = [task.counters for name, task in found.tasks.items() if name != UNSEEN]
    assert sum(p.rounds for p in parts) == found.counters.rounds


def test_position_ranges_hold_every_round_once():
    long = conversation("l", "t", answer([2] * 20))
    ranges = report(ExactRuns([long])).position_ranges
    assert [one.positions for one in ranges] == ["0-15", "16-31", "32-63"]
    # First drafts stand at generated positions 1, 4, 7, ..., 58.
    assert [one.counters.rounds for one in ranges] == [5, 6, 9]
    assert count_range(long, N, 0, 2).rounds == 1 and count_range(long, N, 2, 4).rounds == 0


def test_the_floor_is_walked_over_the_same_text():
    """The table knows 1 2 3 and then guesses 9: one round accepts two, the others none."""
    floor = report(ExactRuns([RUNS.runs[0]])).ngram_floor
    assert floor.order == 4 and floor.counters.rounds == 4  # 1 | 2 3 4 | 5 | 6 | 7
    assert floor.tau == pytest.approx(1 + 2 / 4)


def test_sampled_answers_are_not_compared_token_by_token():
    found = report(temperature=0.7)
    assert (found.lossless.checked, found.lossless.identical) == (0, 0)
    assert found.lossless.note == "sampled answers: distribution test, see eval.lossless"
    assert "distribution test" in render_page(found, [])


def test_warnings_name_what_lowers_the_figures():
    assert report().warnings[0] == "prompt lines skipped: 1 (not JSON)"
    short = report(longest=6).warnings
    assert any("reach beyond 6 tokens" in warning for warning in short)
    poor = report(ExactRuns([conversation("a", "t", answer([0, 0, 0]))])).warnings
    assert any("does not clear the n-gram floor" in warning for warning in poor)


def test_json_has_the_agreed_keys_and_no_nan():
    text = to_json(report(ExactRuns([conversation("a", "t", answer([0, 0]))])))
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert set(TOP_LEVEL) <= set(found)
    assert found["alpha_by_depth"] == [0.0, None]  # nobody reached depth 2
    assert found["lossless"]["checked"] == 1 and found["lossless"]["identical"] == 1
    assert {"rounds", "drafted", "tested", "accepted_by_depth", "tokens"} <= set(found["counters"])
    assert set(found["by_n"]) == {"1", "2"} and {"tau", "c", "v", "d"} <= set(found["by_n"]["1"])
    assert len(found["intervals"]["tau"]) == 2
    assert found["ngram_floor"]["order"] == 4
    assert found["settings"]["accept_rule"] == "greedy"


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_page_holds_every_figure_of_the_json():
    found = report()
    page = render_page(found, ["acceptance.png", "speed.png"])
    figures = {k: v for k, v in json.loads(to_json(found)).items() if k != "settings"}
    written = set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", page))
    assert [n for n in numbers(figures) if not {shown(n), f"{n:.2e}"} & written] == []
    assert "![acceptance](acceptance.png)" in page and "Accept rule `greedy`" in page
    assert "d differs from plain decoding at token 4" in page
    assert "> prompt lines skipped: 1" in page and "batch 1" in page
    assert "Supervised tokens: 4321; share that is the verifier's own top choice: 0.875" in page
    assert all(not math.isnan(n) for n in numbers(figures))


def test_terminal_table_is_aligned():
    lines = terminal_lines(report())
    start = next(i for i, line in enumerate(lines) if line.startswith("N "))
    column = lines[start].index("decode")
    assert lines[start + 1][column:].startswith("1.000")
    assert lines[start + 2][column:].startswith(shown(speed().by_n[1].speedup_decode))
