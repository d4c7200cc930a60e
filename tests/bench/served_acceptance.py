"""Acceptance of a head in real vLLM beside that of our own loop: survival by position, and τ.

    python tests/bench/served_acceptance.py runs/demo/best [--vllm-python FILE] [--json FILE]

Both decode the same token ids greedily, with the same tokens that end an answer and the same limit.
Both count a round whole, also where an end lies among the accepted guesses: vLLM's scheduler notes
what the verifier accepted before it looks for an end, and our counters are taken before the cut.
No round starts after an end. vLLM's warm-up requests are subtracted. In float32 the text is the
same; in bfloat16 it parts at ties, so the figures there are of like text, not of the same.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path += [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "launch")]

import torch  # noqa: E402  after the path is set
from bars import Bar, bar_lines, bars_as_json  # noqa: E402
from vllm_process import Request, Served, VllmProcess, with_head  # noqa: E402

from conf.runtime import progress, write_atomically  # noqa: E402
from conf.schema import Precision, VerifierSection  # noqa: E402
from conf.shapes import chain  # noqa: E402
from data.distributed import use_threads  # noqa: E402
from data.eval_prompts import read_prompts, take  # noqa: E402
from data.template import encode_prompt  # noqa: E402
from eval.acceptance import Counters, total  # noqa: E402
from eval.decode import DecodeSettings, decode  # noqa: E402
from eval.tables import table  # noqa: E402
from models.bundled import SMOLLM2, resolve  # noqa: E402
from models.draft_file import load_draft  # noqa: E402
from models.export.card import CardFacts, DataFacts  # noqa: E402
from models.export.write import export  # noqa: E402
from models.generate import end_ids  # noqa: E402
from models.token_strings import refuse_other_tokens  # noqa: E402
from models.verifier import Verifier  # noqa: E402

ROOM = 16  # positions left free past the longest answer: near its limit vLLM guesses less
PROMPTS = 60  # at least


@dataclass(frozen=True)
class Bounds:
    """How far vLLM may be from our loop."""

    survival: float  # absolute, at every position
    tau: float  # relative


BOUNDS = {Precision.float32: Bounds(0.01, 0.02), Precision.bfloat16: Bounds(0.03, 0.03)}


@dataclass(frozen=True)
class Compared:
    """One precision and chain length."""

    dtype: Precision
    n: int
    ours: Counters
    theirs: Counters
    same: int  # prompts of one text on both sides

    @property
    def survival_apart(self) -> float:
        pairs = zip(self.ours.survival_by_depth, self.theirs.survival_by_depth, strict=True)
        return max(abs(a - b) for a, b in pairs)

    @property
    def tau_apart(self) -> float:
        return abs(self.theirs.tau / self.ours.tau - 1)

    @property
    def bars(self) -> list[Bar]:
        name, bounds = f"{self.dtype.value}, N = {self.n}", BOUNDS[self.dtype]
        return [
            Bar(
                f"{name}: survival apart, worst position",
                self.survival_apart,
                bounds.survival,
                False,
            ),
            Bar(f"{name}: τ apart, share", self.tau_apart, bounds.tau, False),
        ]


@dataclass(frozen=True)
class Own:
    """What our loop made of the prompts."""

    dtype: Precision
    n: int
    tokens: list[list[int]]
    counters: Counters


def name_of(dtype: Precision, n: int) -> str:
    return f"{dtype.value}-{n}"


class Contest:
    """One precision: the verifier, the head, and the prompts as both sides get them."""

    def __init__(self, args: argparse.Namespace, dtype: Precision):
        self.args, self.dtype = args, dtype
        device, precision = torch.device("cpu"), getattr(torch, dtype.value)
        self.verifier = Verifier.load(
            VerifierSection(path=args.verifier), args.cache, device, precision
        )
        refuse_other_tokens(args.head, self.verifier.tokenizer)
        self.draft = load_draft(args.head, device, precision, self.verifier.embedding)
        self.prompts = list(self.encoded())
        self.ends = end_ids(self.verifier)

    def encoded(self) -> Iterator[list[int]]:
        """The first turn of prompts from all tasks, as the report takes them."""
        for prompt in take(read_prompts(self.args.prompts).prompts, self.args.count):
            asked = next(i for i, turn in enumerate(prompt.turns) if turn.role == "user")
            yield encode_prompt(list(prompt.turns[: asked + 1]), self.verifier.tokenizer, {})

    def ask(self, vllm: VllmProcess, n: int) -> None:
        args, folder = self.args, vllm.folder / f"head-{self.dtype.value}"
        served = str(resolve(args.verifier, args.cache))
        if not folder.is_dir():
            head = load_draft(args.head, torch.device("cpu"), torch.float32)
            data = DataFacts("see the run")
            card = CardFacts(args.verifier, served, self.dtype.value, None, data)
            export(head, self.verifier.facts, folder, card, self.dtype)
        vllm.ask(
            Request(
                name=name_of(self.dtype, n),
                model=served,
                prompts=self.prompts,
                max_tokens=args.tokens,
                speculative=with_head(folder, n),
                stop=self.ends,
                dtype=self.dtype.value,
                max_length=max(map(len, self.prompts)) + args.tokens + ROOM,
            )
        )

    def own(self, n: int) -> Own:
        settings = DecodeSettings(self.args.tokens, self.ends, chain(n))
        size = self.args.batch
        groups = [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)]
        made = [
            one
            for group in progress(groups, len(groups), f"ours, {name_of(self.dtype, n)}", "batch")
            for one in decode(self.verifier, self.draft, group, settings).generations
        ]
        counted = total([Counters.of(one.rounds, len(one.tokens), n) for one in made])
        return Own(self.dtype, n, [one.tokens for one in made], counted)


def compare(args: argparse.Namespace, vllm: VllmProcess) -> list[Compared]:
    """Ask vLLM for everything, then decode here while it answers."""
    owns: list[Own] = []
    for dtype in [Precision[name] for name in args.dtypes]:
        contest = Contest(args, dtype)
        for n in args.lengths:
            contest.ask(vllm, n)
        owns += [contest.own(n) for n in args.lengths]
    return [judge(own, vllm.answer(name_of(own.dtype, own.n))) for own in owns]


def judge(own: Own, served: Served) -> Compared:
    same = sum(a == b for a, b in zip(own.tokens, served.tokens, strict=True))
    theirs = Counters(
        rounds=served.drafts,
        accepted_by_depth=served.accepted_by_position,
        tokens=sum(map(len, served.tokens)),
    )
    return Compared(own.dtype, own.n, own.counters, theirs, same)


def rows_of(one: Compared) -> list[list[str]]:
    def row(side: str, counters: Counters) -> list[str]:
        survival = ", ".join(f"{value:.3f}" for value in counters.survival_by_depth)
        figures = [str(counters.rounds), str(counters.tokens), survival, f"{counters.tau:.3f}"]
        return [one.dtype.value, str(one.n), side, *figures]

    return [row("ours", one.ours), row("vLLM", one.theirs)]


def show(found: list[Compared], prompts: int) -> None:
    head = ["dtype", "N", "side", "rounds", "tokens", "survival by position", "τ"]
    print(table(head, [row for one in found for row in rows_of(one)]))
    print("\nprompts with one text on both sides:")
    for one in found:
        print(f"  {one.dtype.value}, N = {one.n}: {one.same} of {prompts}")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("head", type=Path, help="folder of a head, as runs/demo/best")
    parser.add_argument("--verifier", default=SMOLLM2, help="the verifier it was trained on")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--prompts", nargs="+", default=["data/demo/eval_prompts.jsonl"])
    parser.add_argument("--count", type=int, default=64, help="prompts, of all tasks")
    parser.add_argument("--tokens", type=int, default=64, help="most of an answer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 5], help="chain lengths")
    parser.add_argument("--dtypes", nargs="+", default=[one.name for one in Precision])
    parser.add_argument("--batch", type=int, default=8, help="side by side in our loop")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=Path(os.environ.get("EYRIE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")),
        help="interpreter that has vLLM; default: EYRIE_VLLM_PYTHON, or what vllm_env.sh makes",
    )
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if not args.vllm_python.is_file():
        parser.error(f"no interpreter at {args.vllm_python}: bash launch/vllm_env.sh makes one")
    if args.threads:
        use_threads(args.threads)
    prompts = len(take(read_prompts(args.prompts).prompts, args.count))
    with tempfile.TemporaryDirectory() as folder:
        vllm = VllmProcess(args.vllm_python, Path(folder))
        try:
            found = compare(args, vllm)
        finally:
            vllm.close()
    show(found, prompts)
    bars = [Bar("prompts", prompts, PROMPTS), *(bar for one in found for bar in one.bars)]
    for line in bar_lines(bars):
        print(line)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        figures = [figures_of(one) for one in found]
        whole = {**settings, "figures": figures, "bars": bars_as_json(bars)}
        write_atomically(args.json, json.dumps(whole, indent=2) + "\n")


def figures_of(one: Compared) -> dict:
    sides = {"ours": one.ours, "vllm": one.theirs}
    return {
        "dtype": one.dtype.value,
        "n": one.n,
        "same_text": one.same,
        **{
            side: {**asdict(it), "survival_by_depth": it.survival_by_depth, "tau": it.tau}
            for side, it in sides.items()
        },
    }


if __name__ == "__main__":
    main()
