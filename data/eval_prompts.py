"""Evaluation prompts: which are read, and which are taken."""

import json
import re
from dataclasses import dataclass
from typing import Any

from conf.prompt_files import PromptFile, parse_prompt_file
from conf.runtime import fingerprint
from conf.schema import ConfigError
from data.benchmarks import read_item
from data.records import Skipped, Turn

ROLES = {"human": "user", "user": "user", "system": "system"}
ANSWERS = ("gpt", "assistant")  # left out: the verifier answers for itself
REPEATED = "the same prompt as an earlier one"
UNSEEN = "unseen_patterns"  # the report's entry of the prompts with that split
HALF = re.compile("[\ud800-\udfff]")
SEEN = {"seen_pattern": True, "unseen_pattern": False}


@dataclass(frozen=True)
class EvalPrompt:
    """The user's side of one conversation; every user turn is answered and measured."""

    id: str
    task: str
    seen: bool | None  # the pattern occurs in the training prompts; None: the file does not say
    turns: tuple[Turn, ...]  # an optional system turn, then user turns

    @property
    def digest(self) -> str:
        """Of roles and text, blanks at the ends apart: one prompt in two files has one digest."""
        said = [[turn.role, turn.content.strip()] for turn in self.turns]
        return fingerprint(said)


@dataclass(frozen=True)
class PromptSet:
    prompts: list[EvalPrompt]
    skipped: Skipped


class BadRow(ValueError):
    """Why one line of a prompt file is not a prompt."""


def read_prompts(files: list[str]) -> PromptSet:
    """Read prompt files in the given order. Raises ConfigError when a file yields no prompt.

    ``gsm8k:FILE`` reads a benchmark's own file (data/benchmarks.py). A line of another is
    ``{"id", "task", "split"?, "conversations" | "messages": [...]}`` or
    ``{"question_id", "category", "turns": [...]}``. A bad line is skipped and counted by its
    reason, and so is a prompt that came before: nothing is scored twice.
    """
    prompts: list[EvalPrompt] = []
    reasons: dict[str, int] = {}
    before: set[str] = set()
    rows = 0
    for file in map(parse_prompt_file, files):
        found = 0
        for number, line in enumerate(read_lines(file), 1):
            if not line.strip():
                continue
            rows += 1
            try:
                prompt = parse_prompt(line, file, number)
                found += 1
                if prompt.digest in before:
                    raise BadRow(REPEATED)
            except BadRow as reason:
                reasons[str(reason)] = reasons.get(str(reason), 0) + 1
                continue
            before.add(prompt.digest)
            prompts.append(prompt)
        if not found:
            why = ", ".join(f"{reason} ({count})" for reason, count in reasons.items())
            raise ConfigError(
                f"{file.knob}: holds no usable prompt: {why or 'the file is empty'}; give "
                'one JSON object a line, for example {"id": "a", "task": "qa", "turns": ["..."]}'
            )
    return PromptSet(prompts, Skipped(rows, len(prompts), reasons))


def read_lines(file: PromptFile) -> list[str]:
    if not file.path.is_file():
        raise ConfigError(f"{file.knob}: no such file; give a .jsonl file of prompts")
    try:
        return file.path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.knob}: not UTF-8 at byte {error.start}; convert the file to UTF-8"
        ) from error


def parse_prompt(line: str, file: PromptFile, number: int) -> EvalPrompt:
    """One line to one prompt; raises BadRow with a reason that can be counted."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise BadRow("not JSON") from error
    if "\\ud" in line.lower() and HALF.search(json.dumps(row, ensure_ascii=False)):
        raise BadRow("text with half a surrogate pair, which no tokenizer reads")
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    fallback_id = f"{file.path.stem}-{number}"
    if file.benchmark is not None:
        item = read_item(file.benchmark, row, f"{file.knob}: line {number}")
        name = f"{file.benchmark.value}/{item.id or fallback_id}"
        return EvalPrompt(name, item.task, None, tuple(Turn("user", text) for text in item.turns))
    turns = parse_turns(row)
    if not any(turn.role == "user" for turn in turns):
        raise BadRow("no user turn")
    split = row.get("split")
    if split is not None and str(split) not in SEEN:
        raise BadRow(f"split {split!r} is neither seen_pattern nor unseen_pattern")
    own = [row[key] for key in ("id", "question_id") if row.get(key) is not None]
    task = str(row.get("task") or row.get("category") or "prompts")
    if task == UNSEEN:
        raise BadRow(f"task {task!r} is the name of the report's entry for split unseen_pattern")
    return EvalPrompt(
        id=str(own[0]) if own else fallback_id,
        task=task,
        seen=None if split is None else SEEN[split],
        turns=tuple(turns),
    )


def parse_turns(row: dict[str, Any]) -> list[Turn]:
    for key in ("conversations", "messages", "turns"):
        if isinstance(row.get(key), list):
            return [turn for entry in row[key] if (turn := parse_turn(entry)) is not None]
    raise BadRow("none of conversations, messages, turns is a list")


def parse_turn(entry: Any) -> Turn | None:
    """A turn to feed, or None for an answer someone else gave."""
    if isinstance(entry, str):
        entry = {"role": "user", "content": entry}
    if not isinstance(entry, dict):
        raise BadRow("a turn is neither text nor an object")
    role = entry.get("role", entry.get("from"))
    content = entry.get("content", entry.get("value"))
    if role in ANSWERS:
        return None
    if str(role) not in ROLES:
        raise BadRow(f"role {role!r} is none of system, user, assistant")
    if not isinstance(content, str) or not content.strip():
        raise BadRow("a turn without text")
    return Turn(ROLES[str(role)], content)


def take(prompts: list[EvalPrompt], count: int | None) -> list[EvalPrompt]:
    """The first ``count`` prompts, one of each task in turn, so that no task crowds out another.

    The order depends on the files alone: a larger count extends a smaller one.
    """
    queues: dict[str, list[EvalPrompt]] = {}
    for prompt in prompts:
        queues.setdefault(prompt.task, []).append(prompt)
    deepest = max((len(queue) for queue in queues.values()), default=0)
    rounds = [[q[i] for q in queues.values() if i < len(q)] for i in range(deepest)]
    ordered = [prompt for one_round in rounds for prompt in one_round]
    return ordered if count is None else ordered[:count]
