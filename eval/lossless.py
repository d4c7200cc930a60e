"""Whether speculation changes the output: token by token when greedy, counted when sampled.

    python -m eval.lossless [HEAD_DIR] [--prompts FILE ...] [--count 20] [--new-tokens 64]

compares the two loops of eval/decode.py in fp32 and runs the tables of eval/toy.py. Exit code 1
when either finds a difference, or when the toy test passes a rule that is known to be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.compose import load_saved, sentence_on_error
from conf.runtime import cache_dir, note_once, progress, say
from conf.schema import ConfigError, RunSection
from conf.shapes import chain
from data.dialects import RowRefused
from data.distributed import pick_device
from data.eval_prompts import EvalPrompt, read_prompts, take
from data.records import Turn
from data.template import encode_prompt
from eval.decode import DecodeSettings, decode
from eval.difference import Difference, compare
from eval.parser import Parser
from eval.toy import CASES, ToyResult, run_toy
from models.draft_file import CONFIG, load_draft
from models.eagle3 import Eagle3Draft
from models.generate import end_ids
from models.token_strings import refuse_other_tokens
from models.verifier import Verifier


@dataclass(frozen=True)
class LosslessReport:
    checked: int
    identical: int
    differences: list[Difference]
    refused: int = 0  # prompts that the chat template does not take

    @property
    def passed(self) -> bool:
        return self.checked == self.identical


def check_greedy(
    verifier: Verifier, draft: Eagle3Draft, prompts: list[list[int]], settings: DecodeSettings
) -> LosslessReport:
    """Decode every prompt (token ids) with and without ``draft`` and compare the tokens.

    Meant for fp32: in bf16 several tokens at once round differently from one, and ties part.
    """
    differences: list[Difference] = []
    for index, ids in enumerate(progress(prompts, len(prompts), "lossless", "prompt")):
        plain = decode(verifier, None, [ids], settings).generations[0]
        speculative = decode(verifier, draft, [ids], settings).generations[0]
        found = compare(verifier, ids, plain, speculative, index)
        differences += [] if found is None else [found]
    return LosslessReport(len(prompts), len(prompts) - len(differences), differences)


def newest_head(root: Path) -> Path:
    """The best/ folder written last under ``root``. Raises ConfigError when there is none."""
    heads = [path.parent for path in root.rglob(f"best/{CONFIG}")]
    if not heads:
        raise ConfigError(
            f"{root}: no run with a best/ head in it; train one with bash launch/demo.sh or give "
            "a HEAD_DIR"
        )
    return max(heads, key=lambda head: (head / CONFIG).stat().st_mtime)


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    head: Path
    prompts: list[str]  # files; empty: those of the run
    count: int
    new_tokens: int


def check_head(request: Request) -> LosslessReport:
    """Load head and verifier in fp32 and compare the loops on the first ``count`` prompts."""
    cfg = load_saved(request.head.parent / "config.yaml")
    device = pick_device(cfg.run.device, 0)
    prompts = take(read_prompts(request.prompts or cfg.eval.prompts).prompts, request.count)
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, torch.float32)
    draft = load_draft(request.head, device, torch.float32, verifier.embedding)
    refuse_other_tokens(request.head, verifier.tokenizer)
    settings = DecodeSettings(request.new_tokens, end_ids(verifier), chain(cfg.eval.n_draft))
    ids = encode_first(verifier, prompts, cfg.data.template_kwargs)
    if not ids:
        raise ConfigError(
            "eval.prompts: the chat template refuses every prompt; give others with --prompts"
        )
    report = check_greedy(verifier, draft, ids, settings)
    return replace(report, refused=len(prompts) - len(ids))


def encode_first(
    verifier: Verifier, prompts: Sequence[EvalPrompt], template_kwargs: dict[str, Any]
) -> list[list[int]]:
    """Token ids of each prompt's first question; those the template refuses are left out."""
    found: list[list[int]] = []
    for prompt in prompts:
        try:
            turns = first_question(prompt.turns)
            found.append(encode_prompt(turns, verifier.tokenizer, template_kwargs))
        except RowRefused as refusal:
            note_once(refusal.note)
    return found


def first_question(turns: Sequence[Turn]) -> list[Turn]:
    """A system turn, if any, and the first user turn."""
    end = next(i for i, turn in enumerate(turns) if turn.role == "user") + 1
    return list(turns[:end])


def describe_greedy(report: LosslessReport) -> list[str]:
    lines = [f"greedy, fp32: {report.identical} of {report.checked} prompts token-identical"]
    for found in report.differences:
        lines.append(
            f"  prompt {found.prompt}, token {found.position}: plain {found.plain}, speculative "
            f"{found.speculative}, gap of the top two logits {found.gap:.2e}"
        )
    if report.refused:
        lines.append(f"  not compared: {report.refused} prompts that the chat template refuses")
    return lines


def describe_toy(results: Sequence[ToyResult]) -> list[str]:
    """A table: one line a case, with what was expected of it."""
    row = "{:24} {:8} {:8} {:12} {:25} {:>10} {:>8}  {}"
    names = ("rule", "shape", "draft", "sampling", "control", "smallest p", "bound", "result")
    lines = [
        "sampled, toy tables: chi-square of 1-, 2-, 3-token blocks against exact probabilities",
        row.format(*names),
    ]
    for result in results:
        case = result.case
        control = case.control.value if case.control else "-"
        verdict = "exact" if result.exact else "biased"
        surprise = "" if result.as_expected else "  UNEXPECTED"
        p, bound = f"{result.smallest_p:.1e}", f"{result.bound:.1e}"
        words = (case.rule.value, case.shape_kind, case.vocabulary, case.filters, control, p, bound)
        lines.append(row.format(*words, verdict + surprise))
    return lines


def parse(argv: list[str] | None) -> Request:
    parser = Parser(
        prog="python -m eval.lossless",
        description="Compare speculative with plain decoding (greedy, fp32), and test the "
        "sampling rules by counting. Exit code 1 when something differs.",
    )
    parser.add_argument(
        "head", nargs="?", type=Path, metavar="HEAD_DIR", help="default: best/ of the newest run"
    )
    parser.add_argument(
        "--prompts", nargs="+", default=[], metavar="FILE", help="default: those of the run"
    )
    parser.add_argument("--count", type=int, default=20, help="prompts to compare")
    parser.add_argument("--new-tokens", type=int, default=64, help="limit of one answer")
    words = parser.parse_args(argv)
    for name in ("count", "new_tokens"):
        if getattr(words, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(words, name)}: must be 1 or more")
    head = words.head or newest_head(Path(RunSection().root))
    return Request(head, words.prompts, words.count, words.new_tokens)


def main(argv: list[str] | None = None) -> int:
    """Print both tests; 0 when all is as it should be."""
    request = parse(argv)
    say(f"head: {request.head}")
    greedy = check_head(request)
    for line in describe_greedy(greedy):
        say(line)
    results = [run_toy(case) for case in progress(CASES, len(CASES), "toy tables", "case")]
    for line in describe_toy(results):
        say(line)
    return 0 if greedy.passed and all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
