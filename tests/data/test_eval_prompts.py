"""Prompt files: the shapes that are read, what is skipped, and which prompts are taken."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.schema import ConfigError
from data.eval_prompts import read_prompts, take
from data.records import Turn

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, *rows: Any) -> str:
    path = folder / "p.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_shapes_of_a_line(tmp_path: Path):
    path = written(
        tmp_path,
        {"id": "a", "task": "qa", "split": "seen_pattern", "conversations": [user("one")]},
        {
            "id": 7,
            "split": "unseen_pattern",
            "messages": [{"role": "system", "content": "be brief"}, user("two")],
        },
        {"question_id": 81, "category": "writing", "turns": ["three", "four"]},
        "",
        {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "x"}]},
    )
    found = read_prompts([path])
    assert [p.id for p in found.prompts] == ["a", "7", "81", "p-5"]
    assert [p.task for p in found.prompts] == ["qa", "prompts", "writing", "prompts"]
    assert [p.seen for p in found.prompts] == [True, False, None, None]
    assert found.prompts[1].turns == (Turn("system", "be brief"), Turn("user", "two"))
    assert found.prompts[2].turns == (Turn("user", "three"), Turn("user", "four"))
    assert found.prompts[3].turns == (Turn("user", "five"),)
    assert (found.skipped.rows_in, found.skipped.rows_out, found.skipped.reasons) == (4, 4, {})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ({"id": 1}, "none of conversations, messages, turns is a list"),
        ({"turns": []}, "no user turn"),
        ({"turns": [3]}, "a turn is neither text nor an object"),
        ({"turns": [" "]}, "a turn without text"),
        ({"messages": [user(None)]}, "a turn without text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool' is none of"),
        ({"turns": ["x"], "split": ["seen"]}, "split ['seen'] is neither"),
        ('{"turns": ["x"], "id": ' + "9" * 5000 + "}", "not JSON"),  # more digits than Python reads
        ("[" * 100_000, "not JSON"),
        ('{"turns": ["half a pair \\ud83d"]}', "half a surrogate pair"),
        ('{"turns": ["x"], "task": "\\ud83d"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_skipped_and_counted(tmp_path: Path, row: Any, reason: str):
    found = read_prompts([written(tmp_path, {"turns": ["fine"]}, row, row)])
    assert found.prompts[0].turns == (Turn("user", "fine"),)
    assert len(found.prompts) == 1
    ((counted, times),) = found.skipped.reasons.items()
    assert reason in counted and times == 2
    assert found.skipped.rows_in == found.skipped.rows_out + times


def test_an_id_of_null_is_no_id(tmp_path: Path):
    rows = [{"id": None, "turns": [text]} for text in ("one", "two")]
    assert [one.id for one in read_prompts([written(tmp_path, *rows)]).prompts] == ["p-1", "p-2"]


def test_the_name_of_the_unseen_patterns_is_no_task(tmp_path: Path):
    """The report has one entry for them, which would take the place of the task's."""
    row = {"turns": ["x"], "task": "unseen_patterns"}
    with pytest.raises(ConfigError, match="task 'unseen_patterns' is the name of"):
        read_prompts([written(tmp_path, row)])


def test_files_that_cannot_be_used(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"eval\.prompts=.*no such file"):
        read_prompts([str(tmp_path / "missing.jsonl")])
    with pytest.raises(ConfigError, match="no usable prompt: the file is empty"):
        read_prompts([written(tmp_path)])
    with pytest.raises(ConfigError, match=r"no usable prompt: not JSON \(1\)"):
        read_prompts([written(tmp_path, "{")])
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["caf\xe9"]}')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 15"):
        read_prompts([str(tmp_path / "latin.jsonl")])


def test_tasks_take_turns_and_a_larger_count_extends_a_smaller_one(tmp_path: Path):
    rows = [
        {"id": f"{task}{i}", "task": task, "turns": [f"{task}{i}"]}
        for task in "ab"
        for i in range(3)
    ]
    prompts = read_prompts([written(tmp_path, *rows, {"id": "c0", "task": "c", "turns": ["x"]})])
    ids = [p.id for p in take(prompts.prompts, None)]
    assert ids == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]
    for count in range(1, 9):
        assert [p.id for p in take(prompts.prompts, count)] == ids[:count]


def test_shipped_prompts():
    found = read_prompts([str(ROOT / "data" / "demo" / "eval_prompts.jsonl")])
    seen = [p for p in found.prompts if p.seen]
    unseen = [p for p in found.prompts if p.seen is False]
    assert (len(seen), len(unseen), found.skipped.reasons) == (60, 20, {})
    assert not {p.task for p in seen} & {p.task for p in unseen}
    assert len({p.task for p in take(seen, 20)}) == 20


def test_shared_benchmarks_are_read(shared: Path):
    found = read_prompts([str(shared / "data" / "eval" / "spec_bench.jsonl")])
    assert len(found.prompts) == 480 and found.skipped.reasons == {}
    assert sum(len(p.turns) == 2 for p in found.prompts) == 80
