"""The fixed data of the acceptance bench: prompts, the verifier's own answers, and their states.

Everything lies in one work folder and is made once. Prompts are read by path from the shared data
(``EYRIE_SHARED``); nothing of them enters the repository. The demo's answers, which the same
verifier gave under the same limit, are part of the greedy set.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
VALID_SHARE = 0.05
LONGEST_PROMPT = 400  # characters: states of long prompts cost more than they teach
TRAIN_TOKENS, HELD_TOKENS = 72, 64
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")  # the rest: MT-bench
EACH = 24  # prompts of a Spec-Bench category
OWN = 60
OURS = 600  # of our training prompts: the bench's figures were taken with the first so many
AUX_LAYERS = [2, 9, 15, 21, 27, 30]  # a recipe reads some of them; 30 is the last of SmolLM2-135M


# Prompts of each set of training answers, by the order of train_prompts. "whole" is the bench's
# cache; "greedy", its beginning, is what recipes are compared on: no budget of theirs goes through
# it once. The others are answers to the same prompts by other means.
PROMPTS = {"whole": 4400, "greedy": 1300, "sampled": 600, "foreign": 600}
SAMPLED = ["regenerate.greedy=false", "regenerate.samples=1"]
HELD = "greedy"  # the cache with the states of all held-out answers; one has to be in each


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    part.replace(path)


def train_prompts(shared: Path) -> list[dict[str, Any]]:
    """First turns of every training file and our own, in one fixed random order."""
    rows = []
    for path in sorted((shared / "train").glob("*.jsonl")):
        for row in rows_of(path):
            first = row["conversations"][0]
            if first["role"] == "user" and len(first["content"]) <= LONGEST_PROMPT:
                rows.append({"id": row["id"], "conversations": [first]})
    rows += islice(rows_of(ROOT / "data" / "demo" / "train_prompts.jsonl"), OURS)
    random.Random(0).shuffle(rows)
    return rows


def held_prompts(shared: Path) -> list[dict[str, Any]]:
    """First turns of Spec-Bench, as many of each category, and our own of seen patterns."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(shared / "eval" / "spec_bench.jsonl"):
        category = row["category"] if row["category"] in CATEGORIES else "mt_bench"
        groups.setdefault(category, []).append(row)
    found = [
        {
            "id": f"{task}-{row['question_id']}",
            "task": task,
            "conversations": [{"role": "user", "content": row["turns"][0]}],
        }
        for task, rows in groups.items()
        for row in random.Random(0).sample(rows, EACH)
    ]
    own = list(rows_of(ROOT / "data" / "demo" / "eval_prompts.jsonl"))[:OWN]
    return found + [{key: row[key] for key in ("id", "task", "conversations")} for row in own]


def named(row: dict[str, Any], stem: str, held_out: bool) -> dict[str, Any]:
    """``row`` under an id that the product's own split puts where it belongs."""
    from data.split import place

    name = next(
        name
        for name in (f"{stem}~{number}" for number in range(10_000))
        if (place(name) < VALID_SHARE) is held_out
    )
    return {**row, "id": name}


def answered(work: Path, name: str, prompts: list[dict[str, Any]], overrides: list[str]) -> Path:
    """The verifier's answers to ``prompts``; what an earlier call made is kept."""
    asked, output = work / f"{name}_prompts.jsonl", work / f"{name}.jsonl"
    if not output.exists():
        write_rows(asked, prompts)
        words = [f"regenerate.prompts={asked}", f"regenerate.output={output}", *overrides]
        subprocess.run([sys.executable, "-m", "data.regenerate", *words], cwd=ROOT, check=True)
    return output


def own_answers(
    work: Path, whole: list[dict[str, Any]], prompts: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The verifier's greedy answers to ``prompts``, some of ``whole``; the demo's are shipped."""
    demo = rows_of(ROOT / "data" / "demo" / "answers.jsonl")
    shipped = {row["id"].partition("#")[0]: row for row in demo}
    asked = [row for row in whole if row["id"] not in shipped]
    words = [f"regenerate.max_new_tokens={TRAIN_TOKENS}"]
    made = answered(work, "answers", asked, words)
    found = {row["id"].rpartition("#")[0]: row for row in rows_of(made)} | shipped
    return [found[row["id"]] for row in prompts]


def foreign(shared: Path, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that the files have for ``prompts``; ours have none."""
    answers = {
        row["id"]: row["conversations"][:2]
        for path in sorted((shared / "train").glob("*.jsonl"))
        for row in rows_of(path)
    }
    names = [row["id"] for row in prompts if row["id"] in answers]
    return [{"id": name, "conversations": answers[name]} for name in names]


def data_file(work: Path, shared: Path, kind: str) -> Path:
    """Training answers of one ``kind`` and held-out ones, ready for data.prepare."""
    path = work / f"data_{kind}.jsonl"
    if path.exists():
        return path
    prompts = train_prompts(shared)
    chosen, whole = prompts[: PROMPTS[kind]], prompts[: PROMPTS["whole"]]
    if kind == "foreign":
        train = foreign(shared, chosen)
    elif kind == "sampled":
        words = [f"regenerate.max_new_tokens={TRAIN_TOKENS}", *SAMPLED]
        train = list(rows_of(answered(work, "sampled", chosen, words)))
    else:
        train = own_answers(work, whole, chosen)
    asked = [f"regenerate.max_new_tokens={HELD_TOKENS}"]
    held = list(rows_of(answered(work, "held", held_prompts(shared), asked)))
    rows = [named(row, f"t{number}", False) for number, row in enumerate(train)]
    kept = held if kind == HELD else held[:1]
    rows += [named(row, f"h{number}", True) for number, row in enumerate(kept)]
    write_rows(path, rows)
    return path


def overrides_of(work: Path, kind: str) -> list[str]:
    """The product's settings for one cache."""
    return [
        f"data.path={work / f'data_{kind}.jsonl'}",
        f"data.valid_share={VALID_SHARE}",
        "data.max_length=2048",
        f"verifier.aux_layers={AUX_LAYERS}".replace(" ", ""),
        f"run.cache={work / 'cache'}",
        f"run.root={work / 'runs'}",
        "capture.min_agreement=0",
    ]


def make(work: Path, shared: Path, kind: str) -> None:
    """Answers and states; everything that is there is kept."""
    work.mkdir(parents=True, exist_ok=True)
    data_file(work, shared, kind)
    words = [*overrides_of(work, kind), "run.name=capture"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
    subprocess.run([*torchrun, "data.capture", *words], cwd=ROOT, check=True)
