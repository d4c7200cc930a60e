"""Time of token ids with masks against one plain tokenise pass over the same rendered texts.

    python tests/bench/template.py [--rows 200] [--turns 4] [--words 60] [--json FILE]

The plain pass is ``tokenizer(texts)`` on texts that are rendered already; ours renders, finds the
answers, tokenises and makes the masks. Both run on --threads cores, in turns, so that a busy
machine slows both.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from transformers.tokenization_utils_base import PreTrainedTokenizerBase  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402  after the path is set
from conf.schema import VerifierSection  # noqa: E402
from data.records import Conversation, Turn  # noqa: E402
from data.render import ChatTemplate  # noqa: E402
from data.template import encode_all  # noqa: E402
from models.bundled import SMOLLM2  # noqa: E402
from models.verifier import load_tokenizer  # noqa: E402

SOURCE = ROOT / "data/demo/answers.jsonl"


@dataclass(frozen=True)
class Round:
    plain: float  # seconds of the plain pass
    eyrie: float  # seconds with masks


@dataclass(frozen=True)
class Figures:
    rows: int
    turns: int
    tokens_a_row: float
    supervised: float  # share of the tokens
    threads: int
    plain_tokens_per_s: float
    eyrie_tokens_per_s: float
    ratio: float  # median over the rounds of eyrie / plain, each pair timed one after the other
    rounds: list[Round]


def conversations(rows: int, turns: int, words: int) -> list[Conversation]:
    """Rows of words from the demo's answers, drawn by a fixed seed; no two are alike."""
    known: list[str] = []
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        for turn in json.loads(line)["conversations"]:
            known += turn["content"].split()
    draw = random.Random(0)
    roles = ("user", "assistant")
    return [
        Conversation(
            str(row),
            tuple(Turn(roles[i % 2], " ".join(draw.choices(known, k=words))) for i in range(turns)),
        )
        for row in range(rows)
    ]


def timed(run: Callable[[], Any]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def measure(tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Figures:
    talks = conversations(args.rows, args.turns, args.words)
    template = ChatTemplate(tokenizer, {})
    texts = [template.whole(talk.turns) for talk in talks]
    batches = range(0, args.rows, args.batch)

    def plain() -> list[Any]:
        return [tokenizer(texts[at : at + args.batch], verbose=False) for at in batches]

    def ours() -> list[Any]:
        return [encode_all(talks[at : at + args.batch], template) for at in batches]

    masks = [sample.loss_mask for batch in ours() for sample in batch]  # the first one warms up
    tokens = sum(len(ids) for batch in plain() for ids in batch["input_ids"])
    rounds = [Round(timed(plain), timed(ours)) for _ in range(args.rounds)]
    return Figures(
        rows=args.rows,
        turns=args.turns,
        tokens_a_row=tokens / args.rows,
        supervised=sum(map(sum, masks)) / sum(map(len, masks)),
        threads=args.threads,
        plain_tokens_per_s=tokens / median(one.plain for one in rounds),
        eyrie_tokens_per_s=tokens / median(one.eyrie for one in rounds),
        ratio=median(one.eyrie / one.plain for one in rounds),
        rounds=rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--verifier", default=SMOLLM2, help="folder, hub name or wheel")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--words", type=int, default=60, help="words a turn")
    parser.add_argument("--batch", type=int, default=256, help="rows a call")
    parser.add_argument("--threads", type=int, default=1, help="of the tokenizer, for both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    # Read by the tokenizer's thread pool when it first starts.
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if args.threads > 1 else "false"
    tokenizer = load_tokenizer(VerifierSection(path=args.verifier), ROOT / "cache")
    figures = measure(tokenizer, args)
    print(
        f"{figures.rows} rows of {figures.turns} turns, {figures.tokens_a_row:.0f} tokens a row, "
        f"{figures.supervised:.0%} supervised, {figures.threads} cores\n"
        f"plain {figures.plain_tokens_per_s:,.0f} tokens/s, with masks "
        f"{figures.eyrie_tokens_per_s:,.0f} tokens/s; {figures.ratio:.2f} times the time"
    )
    if args.json:
        write_atomically(args.json, json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
