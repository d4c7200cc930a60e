"""Whether speculation changes the output: token by token when greedy, counted when sampled.

    python -m eval.lossless [HEAD_DIR] [--verifier PATH] [--prompts FILE ...] [--quick]

runs the product's loop against itself without a draft (eval/proof/greedy_proof.py), the accept
rules on tables with known probabilities (eval/proof/toy.py), and on the real verifier's first token
(eval/proof/first_token.py). Rules that are known to be wrong take the same tests and must fail.
HEAD_DIR is a run, its best/ folder or an exported one. Exit code 1 when anything differs that
should not.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from conf.compose import sentence_on_error
from conf.runtime import progress, say
from conf.schema import RunSection
from conf.shapes import Shape, parse_shape
from eval.parser import Parser
from eval.proof.examined import Request, best_of, examine, newest_head
from eval.proof.first_token import FirstToken, prove_first_token
from eval.proof.greedy_proof import GreedyCheck, Way, prove_greedy
from eval.proof.toy import CASES, SEEDS, ToyResult, run_toy
from eval.tables import aligned

SHAPES = ["4", "2x2x2", "dynamic:nodes=12,depth=4,top_k=3"]
BATCH = 20
QUICK_DRAWS = 10_000
DRAWS = 50_000
QUICK_PROMPTS, QUICK_TOKENS = 4, 32


@dataclass(frozen=True)
class Proof:
    greedy: list[GreedyCheck]  # float32
    rounded: list[GreedyCheck]  # bfloat16, graded
    first: list[FirstToken]
    toy: list[ToyResult]
    refused: int  # prompts that the chat template does not take

    @property
    def passed(self) -> bool:
        sampled = [*self.first, *self.toy]
        return all(one.passed for one in [*self.greedy, *self.rounded]) and all(
            one.as_expected for one in sampled
        )


def prove(request: Request) -> Proof:
    """All parts. Raises ConfigError for a head, verifier or prompts that cannot be had."""
    shapes = [parse_shape(text, "--shapes") for text in request.shapes]
    exact = request.dtype != "bfloat16"
    exam = examine(request, torch.float32 if exact else torch.bfloat16)
    greedy = prove_greedy(exam, 1, ways_of(shapes)) if exact else []
    draws = QUICK_DRAWS if request.quick else DRAWS
    first = prove_first_token(exam.verifier, exam.draft, exam.prompts, draws)
    refused = exam.refused
    rounded: list[GreedyCheck] = []
    if request.dtype == "bfloat16" or (request.dtype is None and not request.quick):
        if exact:
            del exam  # one verifier in memory at a time
            gc.collect()  # hooks refer back to it
            exam = examine(request, torch.bfloat16)
        rounded = prove_greedy(exam, BATCH, [Way(shape, BATCH) for shape in shapes])
    seeds = 1 if request.quick else SEEDS
    cases = progress(CASES, len(CASES), "toy tables", "case")
    toy = [run_toy(case, seeds, draws) for case in cases]
    return Proof(greedy, rounded, first, toy, refused)


def ways_of(shapes: Sequence[Shape]) -> list[Way]:
    """Single sequences by the first shape, and batches by each."""
    return [Way(shapes[0], 1), *(Way(shape, BATCH) for shape in shapes)]


# ---- what is printed ---------------------------------------------------------------------------


def describe_greedy(checks: Sequence[GreedyCheck], dtype: str) -> list[str]:
    lines: list[str] = []
    for check in checks:
        ties = sum(one.tie for one in check.graded)
        graded = f", {ties} of the others ties of rounding" if check.graded else ""
        lines.append(
            f"greedy, {dtype}, {check.way.name}: {check.identical} of {check.checked} prompts "
            f"token-identical{graded}"
        )
        for one in check.graded:
            found = one.difference
            verdict = "a tie" if one.tie else "NO TIE"
            lines.append(
                f"  prompt {found.prompt}, token {found.position}: plain {found.plain}, here "
                f"{found.speculative}; the top two logits are {found.gap:.2e} apart, the worse of "
                f"both tokens {found.behind:.2e} below, rounding can close {one.tolerance:.2e}: "
                f"{verdict}"
            )
    return lines


def describe_first(results: Sequence[FirstToken], draws: int) -> list[str]:
    if not results:
        return ["first token: no prompt leaves the verifier a choice; give others with --prompts"]
    rows = [
        (
            *(str(one.prompt), one.rule.value, one.control.value if one.control else "-"),
            *(str(one.tokens), f"{one.accepted:.3f}", f"{one.p:.1e}", f"{one.bound:.1e}"),
            verdict_of(one),
        )
        for one in results
    ]
    head = ("prompt", "rule", "control", "tokens", "accepted", "p", "bound", "result")
    title = f"sampled, first token of the real verifier: {draws:,} draws against its distribution"
    lines = [title, *aligned(head, rows)]
    if not any(one.control for one in results):
        lines.append(
            f"no control: draft and verifier agree so well that a wrong rule shows in no {draws:,} "
            "draws; give other prompts with --prompts"
        )
    return lines


def describe_toy(results: Sequence[ToyResult]) -> list[str]:
    """A table: one line a case, with what was expected of it."""
    rows = []
    for one in results:
        case = one.case
        control = case.control.value if case.control else "-"
        words = (case.rule.value, case.shape_kind, case.vocabulary, case.filters, control)
        rows.append((*words, f"{one.smallest_p:.1e}", f"{one.bound:.1e}", verdict_of(one)))
    head = ("rule", "shape", "draft", "sampling", "control", "smallest p", "bound", "result")
    title = "sampled, toy tables: chi-square of 1-, 2-, 3-token blocks against exact probabilities"
    return [title, *aligned(head, rows)]


def verdict_of(one: FirstToken | ToyResult) -> str:
    return ("exact" if one.exact else "biased") + ("" if one.as_expected else "  UNEXPECTED")


def describe(proof: Proof, quick: bool) -> list[str]:
    verdict = "PROVED: nothing differs that should not, and every wrong rule was caught"
    return [
        *describe_greedy(proof.greedy, "float32"),
        *describe_greedy(proof.rounded, "bfloat16"),
        *(
            [f"not compared: {proof.refused} prompts that the chat template refuses"]
            if proof.refused
            else []
        ),
        *describe_first(proof.first, QUICK_DRAWS if quick else DRAWS),
        *describe_toy(proof.toy),
        verdict if proof.passed else "FAILED: see NO TIE, UNEXPECTED and missing prompts above",
    ]


def parse(argv: list[str] | None) -> Request:
    parser = Parser(
        prog="python -m eval.lossless",
        description="Prove that speculation leaves the output as it is. Exit code 1 when it does "
        "not, or when a test passes a rule that is known to be wrong.",
    )
    parser.add_argument(
        "head", nargs="?", type=Path, metavar="HEAD_DIR", help="default: the newest run"
    )
    parser.add_argument("--verifier", metavar="PATH", help="default: that of the run")
    parser.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE", help="default: those of the run"
    )
    parser.add_argument("--count", type=int, default=20, help="prompts to compare")
    parser.add_argument("--new-tokens", type=int, default=64, help="limit of one answer")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SHAPE", help="of guesses")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the real models; default: both"
    )
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: 4 prompts, float32, fewer draws"
    )
    words = parser.parse_args(argv)
    for name in ("count", "new_tokens"):
        if getattr(words, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(words, name)}: must be 1 or more")
    head = best_of(words.head) if words.head else newest_head(Path(RunSection().root))
    return Request(
        head=head,
        verifier=words.verifier,
        prompts=words.prompts,
        count=min(words.count, QUICK_PROMPTS) if words.quick else words.count,
        new_tokens=min(words.new_tokens, QUICK_TOKENS) if words.quick else words.new_tokens,
        shapes=words.shapes,
        dtype=words.dtype,
        quick=words.quick,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the proof; 0 when all is as it should be."""
    request = parse(argv)
    say(f"head: {request.head}")
    proof = prove(request)
    for line in describe(proof, request.quick):
        say(line)
    return 0 if proof.passed else 1


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
