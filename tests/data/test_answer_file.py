"""The answer file keeps what was appended, drops what is torn, and refuses what is not its own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import ConfigError
from data.answer_file import AnswerFile, AnswerRow
from data.dialects import read_row
from data.records import Turn

SETTINGS = {"verifier": "abc", "samples": 1}


def row(name: str, answer: str = "yes") -> AnswerRow:
    turns = [Turn("user", "hi"), Turn("assistant", answer)]
    return AnswerRow(name, "t", turns, [[7, 2]], greedy=True, cut=False, temperature=0.0, seed=0)


def test_appended_rows_survive_and_are_written_in_order(tmp_path: Path):
    path = tmp_path / "deep" / "a.jsonl"
    file = AnswerFile(path, SETTINGS)
    assert file.start() == set() and not file.finished
    file.append([row("c#0", "\u00e9\u2028"), row("a#0")])
    with file.partial.open("ab") as stream:
        stream.write(b'{"id": "b#0", "ta\xc3')  # torn in a character
    again = AnswerFile(path, SETTINGS)
    assert again.start() == {"a#0", "c#0"}
    again.append([row("b#0"), row("a#0", "done again")])
    again.finish(["a#0", "b#0", "c#0"], {"no answer": 2}, {"cut": 1})
    assert again.finished and not again.partial.exists()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line["id"] for line in lines] == ["a#0", "b#0", "c#0"]
    answers = [line["conversations"][1]["content"] for line in lines]
    assert answers == ["done again", "yes", "\u00e9\u2028"]
    meta = json.loads(again.meta.read_text())
    assert (meta["left_out"], meta["changed"]) == ({"no answer": 2}, {"cut": 1})
    assert list(lines[0]) == [
        "id", "task", "conversations", "answer_ids", "greedy", "cut", "temperature", "seed"
    ]  # fmt: skip


def test_answer_ids_are_a_list_an_answer_and_read_back(tmp_path: Path):
    talk = [Turn("user", "q"), Turn("assistant", "a"), Turn("user", "r"), Turn("assistant", "b")]
    for turns, ids, written in (
        (talk[:2], [[7, 2]], [7, 2]),
        (talk[:2], [], []),
        (talk, [[7, 2], [8, 2]], [[7, 2], [8, 2]]),
        (talk, [[8, 2]], [[8, 2]]),  # of the last answer alone
    ):
        one = AnswerRow("a#0", "t", turns, ids, greedy=True, cut=True, temperature=0.0, seed=0)
        line = json.loads(one.to_line())
        assert line["answer_ids"] == written
        read = read_row(line, "here").conversation
        assert read.answer_ids == tuple(map(tuple, ids)) and read.turns == tuple(turns)
        assert read.cut and read.greedy
    thoughtful = replace(one, conversations=[talk[0], Turn("assistant", "a", reasoning="why")])
    said = json.loads(thoughtful.to_line())["conversations"]
    assert said[1] == {"role": "assistant", "content": "a", "reasoning_content": "why"}


def test_other_settings_are_refused_while_answers_are_there(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    file = AnswerFile(path, SETTINGS)
    file.start()
    AnswerFile(path, {**SETTINGS, "samples": 2})  # nothing made yet, so nothing to lose
    file.append([row("a#0")])
    with pytest.raises(ConfigError, match=r"with samples=1, and now samples=2.*a\.jsonl\.part"):
        AnswerFile(path, {**SETTINGS, "samples": 2})
    with pytest.raises(ConfigError, match=r"with top_p=None, and now top_p=0\.9"):
        AnswerFile(path, {**SETTINGS, "top_p": 0.9})
    file.finish(["a#0"], {}, {})
    with pytest.raises(ConfigError, match=r"now verifier=other; .* or delete a\.jsonl to start"):
        AnswerFile(path, {**SETTINGS, "verifier": "other"})


def test_a_second_run_is_kept_out(tmp_path: Path):
    first, second = (AnswerFile(tmp_path / "new" / "a.jsonl", SETTINGS) for _ in range(2))
    other = AnswerFile(first.path, {**SETTINGS, "samples": 2})  # nothing is there yet
    with first.sole_writer():
        first.start()
        first.append([row("a#0")])
        with pytest.raises(ConfigError, match=r"^regenerate\.output=\S+: another process is wri"):
            second.sole_writer().__enter__()
    with second.sole_writer():
        assert second.start() == {"a#0"}
    with pytest.raises(ConfigError, match="with samples=1, and now samples=2"):
        other.sole_writer().__enter__()


def test_a_file_of_unknown_origin_is_left_alone(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"meta\.json is missing.*delete a\.jsonl to"):
        AnswerFile(path, SETTINGS)
    (tmp_path / "a.jsonl.meta.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        AnswerFile(path, SETTINGS)
    assert path.read_text() == "mine\n"
