"""docs/first-head.md: its commands compose, its knobs exist, and its plan is what the plan says."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from conf.compose import load_config
from conf.runtime import ROOT
from conf.schema import RunConfig, Stage
from eval import compare, lossless, tune
from launch import export, serve_check
from launch.planning.pages import page
from launch.planning.question import Question

TEXT = (ROOT / "docs" / "first-head.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ") and not line.startswith("| symptom")
]
PARSED = {
    "eval.lossless": lossless.parse,
    "eval.tune": lambda words: tune.parser().parse_args(words),
    "eval.compare": compare.parse,
    "launch.export": lambda words: export.parser().parse_args(words),
    "launch.serve_check": lambda words: serve_check.parser().parse_args(words),
}
NEEDS = {  # what must be there for these entries to start
    "data.prepare": [Stage.prepare],
    "data.preview": [Stage.prepare],
    "data.capture": [Stage.prepare, Stage.capture],
}
KNOB = re.compile(r"(?<![\w./])([a-z]+)\.([a-z_]+)(?![\w/]|\.\w)")
SECTIONS = {one.name: one for one in fields(RunConfig)}


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def of_table() -> list[list[str]]:
    found = [shlex.split(command) for row in ROWS for command in re.findall("`(.*?)`", row[3])]
    assert len(found) == len(ROWS) >= 15  # each remedy has its command
    return found


ALL = [words for block in BLOCKS for words in commands(block)] + of_table()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the page names, in a folder of its own."""
    for name in ("prompts.jsonl", "answers.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "runs" / "llama8b" / "best").mkdir(parents=True)
    (tmp_path / "runs" / "llama8b" / "best" / "draft.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def composed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises what the command would answer before it computes."""
    program, *rest = words
    if program == "torchrun":
        assert rest.pop(0) == "--nproc-per-node=8"
        monkeypatch.setenv("WORLD_SIZE", "8")
        if rest[0] == "-m":
            rest.pop(0)
    elif program == "python":
        assert rest.pop(0) == "-m"
    else:
        assert (program, rest.pop(0)) == ("vllm", "serve")
        return
    entry, *given = rest
    file = ROOT / (entry if entry.endswith(".py") else entry.replace(".", "/") + ".py")
    assert file.is_file() or entry == "pytest", entry
    if entry in PARSED:
        PARSED[entry](given)
    else:
        load_config(given, None if entry.endswith(".py") else NEEDS.get(entry, []))


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words)[:60])
def test_every_command_composes(words: list[str], monkeypatch: pytest.MonkeyPatch):
    composed(words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "python -m data.prepare data.no_such=1",
        "python -m launch.nothing",
        "python -m eval.tune --no-such",
        "torchrun --nproc-per-node=8 train/main.py data=jsonl data.path=none.jsonl",
    ],
)
def test_a_wrong_command_would_not(line: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((ValueError, AssertionError, SystemExit)):
        composed(shlex.split(line), monkeypatch)


def unknown_knobs(text: str) -> list[str]:
    """What stands in backticks as section.knob, and is none of conf/schema.py."""
    found = []
    for quoted in re.findall("`(.*?)`", text):
        for section, knob in KNOB.findall(quoted):
            if section in SECTIONS:
                known = {one.name for one in fields(getattr(RunConfig(), section))}
                entry = (ROOT / section / f"{knob}.py").is_file()  # python -m data.prepare
                found += [] if knob in known or entry else [f"{section}.{knob}"]
    return found


def test_every_knob_in_backticks_exists():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert unknown_knobs(prose) == []
    assert unknown_knobs("`optim.speed`, `capture.mode=online`") == ["optim.speed"]
    for symptom, _cause, remedy, command in ROWS:
        assert KNOB.search(remedy + command), symptom


def test_the_plan_on_the_page_is_the_plans(tmp_path: Path):
    words = next(words for words in ALL if words[2] == "launch.plan")
    asked = Question.of(load_config(words[3:], []), tmp_path)
    assert f"```\n{chr(10).join(line.rstrip() for line in page(asked))}\n```" in TEXT


def test_the_line_that_serves_is_the_readmes():
    """But for the example's run, which is the same there."""
    (line,) = [words for words in ALL if words[0] == "vllm" and "--speculative-config" in words]
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    (block,) = [block for block in blocks if "vllm serve" in block]
    assert line in commands(re.sub(r"#.*", "", block))
    assert "docs/first-head.md" in readme
