"""The report: figures of hand-counted rounds, what enters the top level, and its JSON."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import ConfigError
from data.eval_prompts import UNSEEN
from eval.foretold import read_held_out
from eval.measure import ExactRuns, count
from eval.positions import range_ends
from eval.report import to_json
from eval.report_file import read_report
from eval.theory import expected_tokens

N = 2
TOP_LEVEL = [
    *("tau", "alpha", "alpha_by_depth", "survival_by_depth", "c", "speedup_decode"),
    *("speedup_end_to_end", "speedup_vs_generate", "predicted_speedup", "by_n", "lossless"),
    *("counters", "intervals", "tasks", "settings", "alpha_tv", "ngram_floor"),
    *("position_ranges", "provenance", "data", "by_tree", "by_batch", "costs", "rank_hits"),
    *("by_temperature", "by_prompt", "timings"),
]


def test_figures_follow_their_definitions(made: SimpleNamespace):
    """Rounds accept 2 0 1 | 0 0 | 2, 1 1: eight rounds, seven drafts accepted."""
    found = made.report()
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
    for figure, interval in [
        (found.tau, found.intervals.tau),
        (found.alpha, found.intervals.alpha),
        *zip(found.alpha_by_depth, found.intervals.alpha_by_depth, strict=True),
        *zip(found.survival_by_depth, found.intervals.survival_by_depth, strict=True),
    ]:
        assert interval.low <= figure <= interval.high


def test_speeds_at_the_top_are_of_the_best_chain(made: SimpleNamespace):
    found = made.report()
    best = found.by_n[2]
    assert (found.settings.best_n, found.settings.best_shape) == (2, "2x2")
    assert found.predicted_speedup == best.predicted_speedup and found.c == best.c
    assert (
        found.speedup_decode == best.speedup_decode == found.by_batch[1].shapes["2"].speedup_decode
    )
    assert set(found.by_n) == {1, 2} and set(found.by_tree) == {"2x2"}
    assert set(found.by_batch) == {1, 4}
    assert found.speedup_vs_generate == found.by_batch[1].library["generate"].speedup


def test_mean_over_all_turns_not_the_last_alone(made: SimpleNamespace):
    """A conversation's rounds are pooled over its turns: 2 | 1 1 gives 1 + 4/3, not 1 + 2/2 (B84).

    Two prompts of 3 and 2 rounds pool to 7 tokens in 5 rounds; the mean of their means is another.
    """
    both = count(made.runs.runs[2], N)
    assert (both.rounds, both.accepted, both.tau) == (3, 4, pytest.approx(1 + 4 / 3))
    pooled = made.report(ExactRuns(made.runs.runs[:2]))
    assert pooled.tau == pytest.approx(1 + 3 / 5)
    assert pooled.tasks["json"].tau == pooled.tau
    assert pooled.tau != pytest.approx(((1 + 3 / 3) + (1 + 0 / 2)) / 2)


def test_unseen_patterns_are_an_entry_of_their_own(made: SimpleNamespace):
    found = made.report()
    assert set(found.tasks) == {"json", "chat", UNSEEN}
    assert found.tasks["json"].prompts == 2 and found.tasks["json"].counters.rounds == 5
    assert found.tasks[UNSEEN].tau == 1.0 and found.tasks[UNSEEN].counters.rounds == 4
    assert (found.lossless.checked, found.lossless.identical) == (3, 3)
    assert found.tasks[UNSEEN].lossless.identical == 0
    parts = [task.counters for name, task in found.tasks.items() if name != UNSEEN]
    assert sum(p.rounds for p in parts) == found.counters.rounds


def test_position_ranges_hold_every_round_once(made: SimpleNamespace):
    long = made.conversation("l", "t", made.answer([2] * 20, prompt=30))
    found = made.report(ExactRuns([long]), longest=40)
    ranges, absolute = found.position_ranges, found.absolute_ranges
    assert [one.positions for one in ranges] == ["0-15", "16-31", "32-63"]
    # First drafts stand at generated positions 1, 4, 7, ..., 58; the prompt has 30 tokens.
    assert [one.counters.rounds for one in ranges] == [5, 6, 9]
    assert [one.positions for one in absolute] == ["16-31", "32-39", "40-63", "64-127"]
    assert [one.counters.rounds for one in absolute] == [1, 2, 8, 9]  # 31 | 34 37 | 40-61 | 64-88
    assert sum(one.counters.tokens for one in absolute) == 60


def test_ranges_cover_the_last_position_and_break_at_the_border():
    assert range_ends(15, None) == [16] and range_ends(16, None) == [16, 32]
    assert range_ends(40, 20) == [16, 20, 32, 64]
    assert range_ends(40, 64) == range_ends(40, 900) == range_ends(40, 0) == [16, 32, 64]


def test_positions_beyond_the_trained_length_are_named(made: SimpleNamespace):
    """Rounds at 5 and 8 accept two each; from 11 on, where no sample reached, none (B87)."""
    runs = ExactRuns([made.conversation("l", "t", made.answer([2, 2, 0, 0, 0], prompt=4))])
    found = made.report(runs, longest=11)
    (warning,) = [one for one in found.warnings if "beyond the longest training sample" in one]
    assert warning.startswith("positions from 11 on") and "3 rounds draft there" in warning
    assert "α = 0.000 and τ = 1.000" in warning and "α = 1.000 and τ = 3.000" in warning
    assert (found.beyond_training.within.rounds, found.beyond_training.beyond.rounds) == (2, 3)
    inside = made.report(runs, longest=14)  # the last round drafts at 13
    assert inside.beyond_training is None
    assert not any("beyond" in one for one in inside.warnings)


def test_the_floor_is_walked_over_the_same_text(made: SimpleNamespace):
    """The table knows 1 2 3 and then guesses 9: one round accepts two, the others none."""
    floor = made.report(ExactRuns([made.runs.runs[0]])).ngram_floor
    assert floor.order == 4 and floor.counters.rounds == 4  # 1 | 2 3 4 | 5 | 6 | 7
    assert floor.tau == pytest.approx(1 + 2 / 4)


def test_sampled_answers_are_not_compared_token_by_token(made: SimpleNamespace):
    found = made.report(temperature=0.7)
    assert (found.lossless.checked, found.lossless.identical) == (0, 0)
    assert found.lossless.note == "sampled answers: distribution test, see eval.lossless"


def test_warnings_name_what_lowers_the_figures(made: SimpleNamespace):
    assert made.report().warnings[0] == "prompt lines skipped: 1 (not JSON)"
    poor = made.report(ExactRuns([made.conversation("a", "t", made.answer([0, 0, 0]))])).warnings
    assert any("does not clear the n-gram floor" in warning for warning in poor)


def test_raw_counters_add_up_to_the_figures(made: SimpleNamespace):
    found = made.report()
    rows = [one for one in found.by_prompt if not one.unseen]
    assert [one.id for one in found.by_prompt] == ["a", "b", "c", "d"]
    assert sum(one.rounds for one in rows) == found.counters.rounds
    assert sum((one.counters for one in rows[1:]), rows[0].counters) == found.counters
    overlap = sum(one.overlap_sum for one in rows) / sum(one.overlap_count for one in rows)
    assert overlap == pytest.approx(found.alpha_tv)
    assert len({one.digest for one in found.by_prompt}) == 4


def test_ranks_and_temperatures(made: SimpleNamespace):
    found = made.report()
    assert found.rank_hits.reached == found.counters.reached_by_depth == [8, 5]
    assert [hits[0] for hits in found.rank_hits.hits] == [8, 5]
    assert [one.temperature for one in found.by_temperature] == [0.5, 1.0]
    assert found.by_temperature[0].counters == found.counters
    bare = made.answer([1])
    bare.speculative.ranks = []
    assert made.report(ExactRuns([made.conversation("a", "t", bare)])).rank_hits is None


def test_what_training_foretold_stands_beside_the_measured(made: SimpleNamespace, tmp_path):
    """User report B86: the estimate of a product of accuracies, beside what was measured."""
    found = made.report().training_estimate
    assert found.held_out_tau == 1.7
    assert found.held_out_tau_if_independent == 1 + 0.5 + 0.25 + 0.125
    alpha = 7 / 13
    assert found.tau_if_independent == pytest.approx(1 + alpha + alpha**2)
    assert found.tau == pytest.approx(1 + 7 / 8)
    assert expected_tokens(1.0, 3) == 4.0
    assert read_held_out(tmp_path).tau is None
    (tmp_path / "acceptance.json").write_text('{"tau": null, "alpha": null, "alpha_by_depth": []}')
    assert read_held_out(tmp_path).tau is None
    text = '{"tau": 1.5, "alpha": 0.4, "alpha_by_depth": [0.4, 0.3]}'
    (tmp_path / "acceptance.json").write_text(text)
    read = read_held_out(tmp_path)
    assert (read.tau, read.alpha, read.depth) == (1.5, 0.4, 2)


def test_json_has_the_agreed_keys_and_no_nan(made: SimpleNamespace):
    runs = ExactRuns([made.conversation("a", "t", made.answer([0, 0]))])
    found = json.loads(to_json(made.report(runs)), parse_constant=lambda name: pytest.fail(name))
    assert set(TOP_LEVEL) <= set(found)
    assert found["alpha_by_depth"] == [0.0, None]  # nobody reached depth 2
    assert found["lossless"]["checked"] == 1 and found["lossless"]["identical"] == 1
    assert {"rounds", "drafted", "tested", "accepted_by_depth", "tokens"} <= set(found["counters"])
    assert set(found["by_n"]) == {"1", "2"} and {"tau", "c", "v", "d"} <= set(found["by_n"]["1"])
    assert len(found["intervals"]["tau"]) == 2
    assert found["ngram_floor"]["order"] == 4
    assert found["settings"]["accept_rule"] == "greedy"
    raw = {"id", "task", "rounds", "drafted", "tested", "tokens", "accepted_by_depth"}
    assert raw | {"reached_by_depth", "digest"} <= set(found["by_prompt"][0])


def test_a_report_is_read_back_as_it_was(made: SimpleNamespace, tmp_path):
    runs = ExactRuns([made.conversation("a", "t", made.answer([0, 0]))])  # null figures, too
    for report in (made.report(), made.report(runs, temperature=0.5, stop=["\n"])):
        text = to_json(report)
        (tmp_path / "eval").mkdir(exist_ok=True)
        (tmp_path / "eval" / "report.json").write_text(text)
        read = read_report(tmp_path)
        assert to_json(read) == text
        assert read.settings == report.settings and read.by_batch == report.by_batch
    assert read_report(tmp_path / "eval") and read_report(tmp_path / "eval" / "report.json")


def broken(text: str, *path: Any, value: Any = None) -> str:
    """The JSON with one key set, or, without a value, taken away."""
    whole = json.loads(text)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(whole)


def test_what_is_no_report_is_refused_in_one_sentence(made: SimpleNamespace, tmp_path):
    good, file = to_json(made.report()), tmp_path / "r.json"
    cases = {
        good[:-20]: "not JSON",
        "[]": "no report of eval.main",
        '{"tau": 1.5}': "no report of eval.main",
        broken(good, "by_prompt"): "another version of Eyrie, it lacks by_prompt; write it anew",
        broken(good, "by_n", "2", "tau"): "by_n.2.tau is missing",
        broken(good, "by_n", "2", "tau", value="x"): "by_n.2.tau='x' is no float",
        broken(good, "by_batch", value={"x": {}}): "by_batch has the key 'x', which is no number",
        broken(good, "tasks", value=[3]): "tasks is no object",
        broken(good, "timings", value={"a": 3}): "timings is no list",
        broken(good, "intervals", "tau", value=[3]): "intervals.tau is no interval",
        broken(good, "settings", "eval", "step", value="x"): "settings.eval.step='x' is none of",
        broken(good, "counters", value=[3]): "counters is no object",
    }
    for text, said in cases.items():
        file.write_text(text)
        with pytest.raises(ConfigError) as refused:
            read_report(file)
        assert said in str(refused.value) and str(file) in str(refused.value)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no report there"):
        read_report(tmp_path / "nowhere")
    file.write_bytes(b'{"tau": "\xe9"}')
    with pytest.raises(ConfigError, match="not JSON"):
        read_report(file)
    file.write_text(broken(good, "counters", "surplus", value=3))  # of a later version
    assert read_report(file).tau == made.report().tau
