"""Tokens a second of our batched greedy generation against the library's, same prompts and batch.

    python tests/bench/regenerate.py [--batch 32] [--new 64] [--dtype bfloat16] [--json FILE]

Two cases, each timed in turns so that a busy machine slows both: "fixed", every answer has --new
tokens (the cost of a step), and "ends", answers end where the verifier ends them (what a
regeneration costs; the library computes a finished row to the end of its batch).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch  # noqa: E402  after the path is set

from conf.runtime import write_atomically  # noqa: E402
from conf.schema import Precision, VerifierSection  # noqa: E402
from data.sources import DataFile, RowLog, read_conversations  # noqa: E402
from data.template import encode_prompt  # noqa: E402
from models.bundled import SMOLLM2  # noqa: E402
from models.generate import Request, end_ids, generate  # noqa: E402
from models.verifier import Verifier  # noqa: E402


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int  # of the answers
    eyrie: float  # tokens a second, median over the rounds
    library: float
    ratio: float  # median over the rounds of eyrie / library, each pair timed one after the other
    same: int  # answers equal token by token
    answers: int


def run_library(
    verifier: Verifier, prompts: list[list[int]], new: int, ends: list[int]
) -> list[list[int]]:
    """The library's generate on the left-padded batch; answers up to their end token."""
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=verifier.device)
    mask = torch.tensor(
        [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=verifier.device
    )
    out = verifier.model.generate(  # pyright: ignore[reportCallIssue]
        padded,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=ends,
        pad_token_id=0,
    )
    answers = []
    for row in out[:, longest:].tolist():
        at = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        answers.append(row[: at + 1])
    return answers


def run_eyrie(
    verifier: Verifier, prompts: list[list[int]], new: int, ends: list[int]
) -> list[list[int]]:
    requests = [Request(prompt) for prompt in prompts]
    answers = sorted(generate(verifier, requests, new, ends), key=lambda answer: answer.index)
    return [answer.ids for answer in answers]


def timed(run: Callable[[], list[list[int]]]) -> tuple[list[list[int]], float]:
    begin = perf_counter()
    answers = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return answers, perf_counter() - begin


def measure(verifier: Verifier, prompts: list[list[int]], args: argparse.Namespace) -> list[Case]:
    cases = []
    never = [verifier.facts.vocab_size]  # a token that no answer can hold
    for name, ends in (("fixed", never), ("ends", end_ids(verifier))):
        seconds: dict[str, list[float]] = {"eyrie": [], "library": []}
        ours: list[list[int]] = []
        theirs: list[list[int]] = []
        for number in range(args.rounds + 1):
            new = 4 if number == 0 else args.new  # the first round warms up
            ours, own = timed(lambda n=new, e=ends: run_eyrie(verifier, prompts, n, e))
            theirs, other = timed(lambda n=new, e=ends: run_library(verifier, prompts, n, e))
            if number:
                seconds["eyrie"].append(own)
                seconds["library"].append(other)
        tokens = sum(map(len, ours))
        pairs = zip(seconds["library"], seconds["eyrie"], strict=True)
        case = Case(
            name=name,
            tokens=tokens,
            eyrie=tokens / median(seconds["eyrie"]),
            library=sum(map(len, theirs)) / median(seconds["library"]),
            ratio=median(slow / quick for slow, quick in pairs),
            same=sum(a == b for a, b in zip(ours, theirs, strict=True)),
            answers=len(prompts),
        )
        print(
            f"{case.name:>6}: {case.eyrie:7.1f} tokens/s, library {case.library:7.1f}; "
            f"ratio {case.ratio:.2f}; {case.same} of {case.answers} answers identical",
            flush=True,
        )
        cases.append(case)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--verifier", default=SMOLLM2, help="folder, hub name or wheel")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data/demo/train_prompts.jsonl")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens an answer at most")
    parser.add_argument("--dtype", choices=[p.value for p in Precision], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    section = VerifierSection(path=args.verifier, dtype=Precision(args.dtype))
    dtype = getattr(torch, args.dtype)
    verifier = Verifier.load(section, ROOT / "cache", torch.device(args.device), dtype)
    source = DataFile.alone(args.prompts)
    talks = islice(read_conversations([source], RowLog(), prompts=True), args.batch)
    prompts = [encode_prompt(talk.turns, verifier.tokenizer, {}) for talk in talks]
    print(f"{len(prompts)} prompts, {args.new} new tokens, {args.dtype}, {args.device}")
    cases = measure(verifier, prompts, args)
    if args.json:
        figures = {
            "batch": len(prompts),
            "new": args.new,
            "dtype": args.dtype,
            "device": args.device,
            "cases": [asdict(case) for case in cases],
        }
        write_atomically(args.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
