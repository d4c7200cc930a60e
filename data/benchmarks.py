"""The benchmarks people quote, in the files their authors publish: columns, tasks, prompts.

Every file is one JSON object a line. The wording around an item is the one in use for chat models:
the bare question for Spec-Bench, MT-Bench, GSM8K and Alpaca; EAGLE's line before the code of
HumanEval, without a break between them, as in its own file; the instruction of the MBPP paper
(2108.07732, without its worked examples) around task and tests.
"""

from dataclasses import dataclass
from typing import Any

from conf.choices import Benchmark
from conf.schema import ConfigError

EAGLE_CODE = "Complete the code I provided."
MBPP = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass "
    "these tests:\n\n{tests}"
)
# Spec-Bench names its multi-turn part by MT-Bench's eight categories; published tables have six.
MT_BENCH = "mt_bench"
MT_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
SPEC_TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
NAMES = 200  # characters shown of the columns of a wrong file
TURNS = ("question_id", "category", "turns")  # EAGLE's files of other benchmarks have them too
COLUMNS = {
    Benchmark.spec_bench: (TURNS,),
    Benchmark.mt_bench: (TURNS,),
    Benchmark.humaneval: (("task_id", "prompt", "test"), TURNS),
    Benchmark.gsm8k: (("question", "answer"), TURNS),
    Benchmark.mbpp: (("task_id", "text", "test_list"),),
    Benchmark.alpaca: (TURNS,),
}


@dataclass(frozen=True)
class Item:
    """One conversation of a benchmark."""

    id: str | None  # None: the file numbers its lines only
    task: str
    turns: list[str]  # of the user


def read_item(benchmark: Benchmark, row: dict[str, Any], place: str) -> Item:
    """Raises ConfigError, which begins with ``place``, for a row of another file's columns."""
    known = COLUMNS[benchmark]
    columns = next((one for one in known if all(name in row for name in one)), None)
    if columns is None:
        raise ConfigError(
            f"{place} has the columns {shortened(row)} and {benchmark.value} has "
            f"{' or '.join(', '.join(one) for one in known)}; give that benchmark's file, or leave "
            "its name out"
        )
    if columns is TURNS:
        turns = row["turns"]
    elif wrong := wrong_column(benchmark, row):
        raise ConfigError(
            f"{place} has a column of another kind than {benchmark.value}'s, {wrong}; take the "
            "file as it was published"
        )
    else:
        turns = [ask(benchmark, row)]
    whole = isinstance(turns, list) and turns
    if not whole or not all(isinstance(text, str) and text.strip() for text in turns):
        raise ConfigError(f"{place} has a turn without text; take the file as it was published")
    if benchmark is Benchmark.mt_bench and len(turns) != 2:
        raise ConfigError(
            f"{place} has {len(turns)} turns and every MT-Bench item has 2; take the file as it "
            "was published"
        )
    own = row.get("question_id", row.get("task_id"))
    name = None if own is None else str(own).rpartition("/")[2]
    return Item(name, task_of(benchmark, str(row.get("category")), place), turns)


def shortened(row: dict[str, Any]) -> str:
    """The names of its columns, in one line that can be read."""
    names = ", ".join(row) or "none"
    return " ".join((names if len(names) <= NAMES else f"{names[:NAMES]}...").split())


def wrong_column(benchmark: Benchmark, row: dict[str, Any]) -> str | None:
    """The column that a prompt cannot be made of; an empty text is judged as a turn."""
    name = {Benchmark.humaneval: "prompt", Benchmark.mbpp: "text"}.get(benchmark, "question")
    if not isinstance(row[name], str):
        return name
    if benchmark is not Benchmark.mbpp:
        return None
    tests = row["test_list"]
    fine = isinstance(tests, list) and tests and all(isinstance(one, str) for one in tests)
    return None if fine else "test_list"


def ask(benchmark: Benchmark, row: dict[str, Any]) -> str:
    """The prompt made of an item that is no list of turns."""
    if benchmark is Benchmark.humaneval:
        return f"{EAGLE_CODE}{row['prompt']}"
    if benchmark is Benchmark.mbpp:
        return MBPP.format(text=row["text"], tests="\n".join(map(str, row["test_list"])))
    return str(row["question"])


def task_of(benchmark: Benchmark, category: str, place: str) -> str:
    """Spec-Bench's six tasks, MT-Bench's eight categories; else the benchmark's name."""
    if benchmark is Benchmark.spec_bench:
        names = {**dict.fromkeys(MT_CATEGORIES, MT_BENCH), **{one: one for one in SPEC_TASKS}}
    elif benchmark is Benchmark.mt_bench:
        names = {one: one for one in MT_CATEGORIES}
    else:
        return benchmark.value
    if category not in names:
        raise ConfigError(
            f"{place} has category={category}, which {benchmark.value} does not have; it has "
            f"{', '.join(names)}"
        )
    return names[category]
