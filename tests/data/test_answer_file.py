"""The answer file keeps what was appended, drops what is torn, and refuses what is not its own."""

import json
from pathlib import Path

import pytest

from conf.schema import ConfigError
from data.answer_file import AnswerFile, AnswerRow
from data.records import Turn

SETTINGS = {"verifier": "abc", "samples": 1}


def row(name: str, answer: str = "yes") -> AnswerRow:
    turns = [Turn("user", "hi"), Turn("assistant", answer)]
    return AnswerRow(name, "t", turns, [7, 2], greedy=True, cut=False, temperature=0.0, seed=0)


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
    again.finish(["a#0", "b#0", "c#0"])
    assert again.finished and not again.partial.exists()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [line["id"] for line in lines] == ["a#0", "b#0", "c#0"]
    answers = [line["conversations"][1]["content"] for line in lines]
    assert answers == ["done again", "yes", "\u00e9\u2028"]
    assert list(lines[0]) == [
        "id", "task", "conversations", "answer_ids", "greedy", "cut", "temperature", "seed"
    ]  # fmt: skip


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
    file.finish(["a#0"])
    with pytest.raises(ConfigError, match=r"now verifier=other; .* or delete a\.jsonl to start"):
        AnswerFile(path, {**SETTINGS, "verifier": "other"})


def test_a_file_of_unknown_origin_is_left_alone(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"meta\.json is missing.*delete a\.jsonl to"):
        AnswerFile(path, SETTINGS)
    (tmp_path / "a.jsonl.meta.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        AnswerFile(path, SETTINGS)
    assert path.read_text() == "mine\n"
