"""The named prompt sets: columns, tasks and prompts of each, overlaps, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from conf.choices import Benchmark
from conf.compose import load_config
from conf.prompt_files import parse_prompt_file
from conf.schema import ConfigError, Stage
from data.benchmarks import COLUMNS, MT_CATEGORIES, SPEC_TASKS
from data.eval_prompts import REPEATED, PromptSet, read_prompts

GSM8K = {"question": "Two and two?", "answer": "They are <<2+2=4>>4\n#### 4"}
HUMANEVAL = {
    **{"task_id": "HumanEval/3", "prompt": "def f(x):\n", "entry_point": "f"},
    **{"canonical_solution": "    return x\n", "test": "def check(f): ..."},
}
MBPP = {
    **{"text": "Write a function.", "code": "def f(): ...", "task_id": 11, "test_setup_code": ""},
    **{"test_list": ["assert f(1)", "assert f(2)"], "challenge_test_list": []},
}


def turns(number: int, category: str, *said: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": list(said)}


def file(folder: Path, name: str, *rows: Any) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def read(folder: Path, name: str, *rows: Any) -> PromptSet:
    return read_prompts([f"{name}:{file(folder, name, *rows)}"])


def asked(found: PromptSet) -> list[list[str]]:
    return [[turn.content for turn in prompt.turns] for prompt in found.prompts]


def test_spec_bench_has_six_tasks(tmp_path: Path):
    rows = [turns(i, name, f"{name} one", "two") for i, name in enumerate(MT_CATEGORIES)]
    rows += [turns(100 + i, name, name) for i, name in enumerate(SPEC_TASKS)]
    found = read(tmp_path, "spec_bench", *rows)
    assert {prompt.task for prompt in found.prompts} == {"mt_bench", *SPEC_TASKS}
    assert sum(prompt.task == "mt_bench" for prompt in found.prompts) == 8
    assert found.prompts[0].id == "spec_bench/0" and asked(found)[0] == ["writing one", "two"]


def test_mt_bench_has_eight_categories_of_two_turns(tmp_path: Path):
    rows = [turns(i, name, name, "and then?") for i, name in enumerate(MT_CATEGORIES)]
    found = read(tmp_path, "mt_bench", *rows)
    assert [prompt.task for prompt in found.prompts] == list(MT_CATEGORIES)
    assert all(len(prompt.turns) == 2 for prompt in found.prompts)
    with pytest.raises(ConfigError, match=r"line 1 has 1 turns and every MT-Bench item has 2"):
        read(tmp_path, "mt_bench", turns(1, "stem", "alone"))


def test_what_is_asked(tmp_path: Path):
    assert asked(read(tmp_path, "gsm8k", GSM8K)) == [["Two and two?"]]
    assert asked(read(tmp_path, "humaneval", HUMANEVAL)) == [
        ["Complete the code I provided.def f(x):\n"]
    ]
    (mbpp,) = read(tmp_path, "mbpp", MBPP).prompts
    assert mbpp.turns[0].content == (
        "You are an expert Python programmer, and here is your task: Write a function. Your code "
        "should pass these tests:\n\nassert f(1)\nassert f(2)"
    )
    (alpaca,) = read(tmp_path, "alpaca", turns(5, "", "What is the best exercise?")).prompts
    assert (alpaca.id, alpaca.task) == ("alpaca/5", "alpaca")
    assert read(tmp_path, "gsm8k", GSM8K).prompts[0].id == "gsm8k/gsm8k-1"
    assert read(tmp_path, "humaneval", HUMANEVAL).prompts[0].id == "humaneval/3"


def test_a_prompt_of_two_sets_is_scored_once(tmp_path: Path):
    spec = file(tmp_path, "s", turns(1, "math_reasoning", "Two and two? "), turns(2, "qa", "why?"))
    both = [f"spec_bench:{spec}", f"gsm8k:{file(tmp_path, 'g', GSM8K)}"]
    found = read_prompts(both)
    assert [prompt.task for prompt in found.prompts] == ["math_reasoning", "qa"]
    assert found.skipped.reasons == {REPEATED: 1}
    assert found.skipped.rows_in == found.skipped.rows_out + 1
    assert [p.task for p in read_prompts(both[::-1]).prompts] == ["gsm8k", "qa"]
    # A first turn alone, or another second turn, is another prompt.
    other = [turns(3, "stem", "one", "two"), turns(4, "stem", "one", "three")]
    assert len(read(tmp_path, "mt_bench", *other).prompts) == 2


@pytest.mark.parametrize("benchmark", list(Benchmark))
def test_other_columns_are_refused(tmp_path: Path, benchmark: Benchmark):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, benchmark.value, {"id": 1, "conversations": []})
    said = str(refused.value)
    assert (
        said.startswith(f"eval.prompts={benchmark.value}:") and "line 1 has the columns id" in said
    )
    assert all(column in said for column in COLUMNS[benchmark][0]) and "\n" not in said


def test_what_else_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="category=poems, which spec_bench does not have"):
        read(tmp_path, "spec_bench", turns(1, "poems", "x"))
    for wrong in ([], [""], [3], "text"):
        with pytest.raises(ConfigError, match="line 1 has a turn without text"):
            read(tmp_path, "alpaca", {**turns(1, ""), "turns": wrong})
    for name, row in (
        ("gsm8k", {**GSM8K, "question": None}),
        ("humaneval", {**HUMANEVAL, "prompt": ["def f():"]}),
        ("mbpp", {**MBPP, "text": 5}),
        ("mbpp", {**MBPP, "test_list": None}),
        ("mbpp", {**MBPP, "test_list": "assert f(1)"}),
        ("mbpp", {**MBPP, "test_list": []}),
    ):
        with pytest.raises(ConfigError, match="line 1 has a column of another kind"):
            read(tmp_path, name, row)
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "gsm8k", {"a\nb": 1, **{f"column{i}": i for i in range(3000)}})
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    with pytest.raises(ConfigError, match=r"eval\.prompts=gsm8k:.*missing\.jsonl: no such file"):
        read_prompts([f"gsm8k:{tmp_path / 'missing.jsonl'}"])
    with pytest.raises(ConfigError, match="no known prompt set; take one of spec_bench, mt_bench"):
        read_prompts([f"gsm9k:{file(tmp_path, 'g', GSM8K)}"])


def test_a_colon_in_the_name_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file(tmp_path, "mine:own", turns(1, "x", "y"))
    assert parse_prompt_file("mine:own.jsonl").benchmark is None
    assert len(read_prompts(["mine:own.jsonl"]).prompts) == 1
    assert parse_prompt_file("./gsm8k:x").benchmark is None


def test_names_are_settings(tmp_path: Path):
    """Hydra's grammar takes the colon, and the rules look for the file behind it."""
    path = file(tmp_path, "g", GSM8K)
    cfg = load_config([f"eval.prompts=[gsm8k:{path}]"], [Stage.eval])
    assert list(cfg.eval.prompts) == [f"gsm8k:{path}"]
    for wrong, rule in (
        (f"gsm8k:{path}x", "no such file"),
        (f"gsm9k:{path}", "no known prompt set"),
    ):
        with pytest.raises(ConfigError, match=rf"eval\.prompts=gsm.k:.*{rule}"):
            load_config([f"eval.prompts=[{wrong}]"], [Stage.eval])


SIZES = {
    "spec_bench": ("spec_bench.jsonl", 480, 6),
    "mt_bench": ("mt_bench.jsonl", 80, 8),
    "humaneval": ("humaneval.jsonl", 164, 1),
    "gsm8k": ("gsm8k_test.jsonl", 1319, 1),
    "mbpp": ("mbpp_test.jsonl", 500, 1),
    "alpaca": ("noncommercial/alpaca_eagle80.jsonl", 80, 1),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_files(shared: Path, name: str):
    path, count, tasks = SIZES[name]
    found = read_prompts([f"{name}:{shared / 'data' / 'eval' / path}"])
    assert len(found.prompts) == count and found.skipped.reasons == {}
    assert len({prompt.task for prompt in found.prompts}) == tasks
    assert len({prompt.id for prompt in found.prompts}) == count


@pytest.mark.parametrize(
    ("first", "second", "shared_items"),
    [
        ("spec_bench:spec_bench", "mt_bench:mt_bench", 80),
        ("spec_bench:spec_bench", "gsm8k:gsm8k_test", 80),
        ("gsm8k:gsm8k_test", "gsm8k:gsm8k_eagle80", 80),
        ("humaneval:humaneval", "humaneval:humaneval_eagle80", 80),
    ],
)
def test_published_overlaps(shared: Path, first: str, second: str, shared_items: int):
    named = []
    for text in (first, second):
        name, _, stem = text.partition(":")
        named.append(f"{name}:{shared / 'data' / 'eval' / stem}.jsonl")
    assert read_prompts(named).skipped.reasons == {REPEATED: shared_items}
