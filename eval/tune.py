"""The command that turns a report, or alpha and c, into advice on how to serve a draft.

    python -m eval.tune [REPORT] [--batch 8] [--temperature 0.7] [--stack vllm]
    python -m eval.tune --alpha 0.7 --c 0.05 [--v 5=1.06] [--dialogues 100000]

Exit code 2 and one sentence for what must not be served (a lossy rule, a head of another verifier,
a loop that failed its check) and for what was not measured, with the command that measures it.
Where drafting does not pay, or the stack cannot serve the head, the page says off and the exit code
is 0.
"""

import argparse
from pathlib import Path
from shlex import quote

from conf.compose import sentence_on_error
from conf.runtime import say, write_atomically
from conf.schema import ConfigError, RunSection
from eval.advice.advise import Advice, advise_on_figures, advise_on_report
from eval.advice.page import render, to_json
from eval.advice.question import Accept, Figures, Question, Stack, Target
from eval.advice.serving import Place
from eval.head_check import check_verifier, head_config, served_verifier
from eval.parser import Parser
from eval.report_file import find_report, read_report
from models.export.layout import CONFIG as PUBLISHED


def newest_report(root: Path) -> Path:
    """The report.json written last under ``root``. Raises ConfigError when there is none."""
    reports = list(root.rglob("eval/report.json"))
    if not reports:
        raise ConfigError(
            f"{root}: no run with a report in it; make one with python -m eval.main run.name=NAME, "
            "give a REPORT, or give --alpha and --c"
        )
    return max(reports, key=lambda file: file.stat().st_mtime)


def advise(words: argparse.Namespace) -> Advice:
    """The advice for a parsed command line."""
    question = question_of(words)
    if words.alpha is not None or words.survival:
        refuse_both(words)
        figures = Figures(words.alpha, words.c, words.survival or [], dict(words.v))
        place = Place(words.verifier or "VERIFIER", "DRAFT", "NAME", None)
        return advise_on_figures(figures, question, place)
    unused = next((name for name in ("c", "dialogues") if getattr(words, name) is not None), None)
    if unused or words.v:
        raise ConfigError(
            f"--{unused or 'v'}: stands in for a report's figures and needs --alpha or --survival "
            "beside it; give one, or leave it out"
        )
    file = (
        find_report(Path(words.report)) if words.report else newest_report(Path(RunSection().root))
    )
    say(f"report: {file}")
    report = read_report(file)
    run = file.parent.parent
    head = run / Path(report.settings.draft).name  # beside the report: a run may have moved
    if report.settings.eval.head is not None:
        head = Path(report.settings.draft)
    if words.verifier:
        say(check_verifier(head, words.verifier))
    verifier = words.verifier or served_verifier(run, report.settings.verifier)
    place = place_of(head.parent, head, verifier, report.settings.run)
    return advise_on_report(report, question, place)


def place_of(run: Path, head: Path, verifier: str, name: str) -> Place:
    """What the stack's line names; the head is exported first where it is not yet."""
    if (head / PUBLISHED).is_file():
        return Place(verifier, str(head), name, head_config(head))
    exported = run / "export" / "vllm"
    written = (exported / "config.json").is_file()
    export = f"python -m launch.export {quote(str(head))} --to vllm"
    return Place(verifier, str(exported), name, head_config(head), None if written else export)


def refuse_both(words: argparse.Namespace) -> None:
    if words.report:
        raise ConfigError(
            f"{words.report}: a report beside --alpha or --survival leaves open which counts; "
            "give one"
        )
    if words.alpha is not None and words.survival:
        raise ConfigError("--alpha beside --survival leaves open which counts; give one")
    if words.c is None:
        raise ConfigError(
            "--c: the draft's cost is not known, and no length can be told without it; give a "
            "forward of the draft over a plain step of the verifier, such as --c 0.05"
        )


def question_of(words: argparse.Namespace) -> Question:
    return Question(
        batch=words.batch,
        temperature=words.temperature,
        prompt_length=words.prompt_length,
        answer_length=words.answer_length,
        target=words.latency_target,
        tasks=dict(words.tasks),
        stack=Stack(words.stack),
        version=words.stack_version,
        accept=Accept(words.accept),
        dialogues=words.dialogues,
    )


def target(text: str) -> Target:
    """p95=2.5"""
    name, equals, seconds = text.partition("=")
    if name not in ("p50", "p95") or not equals:
        raise argparse.ArgumentTypeError(f"{text}: say which, p50=SECONDS or p95=SECONDS")
    return Target(name, float(seconds))


def shares(text: str) -> list[tuple[str, float]]:
    """chat=0.7,code=0.3"""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text}: write shares as chat=0.7,code=0.3")
    return [(name, float(share)) for name, _, share in pairs]


def cost(text: str) -> tuple[int, float]:
    """5=1.06"""
    n, equals, ratio = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: write tokens=ratio, such as 5=1.06")
    return int(n), float(ratio)


def curve(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parser() -> Parser:
    made = Parser(prog="python -m eval.tune", description="How to serve a draft, and whether to.")
    add = made.add_argument
    add("report", nargs="?", metavar="REPORT", help="report.json or a run; default: the newest")
    add("--alpha", type=float, help="chance of a guess to stand, in place of a report")
    add(
        "--survival",
        type=curve,
        metavar="S1,S2,...",
        help="rounds that accept k guesses; for alpha",
    )
    add("--c", type=float, help="a forward of the draft / a plain step of the verifier")
    add("--v", type=cost, action="append", default=[], metavar="N=RATIO", help="verifying N tokens")
    add("--dialogues", type=int, help="that could be trained on, when there is no report")
    add("--batch", type=int, default=1, help="sequences decoded side by side")
    add("--prompt-length", type=int, help="tokens")
    add("--answer-length", type=int, help="tokens")
    add("--latency-target", type=target, metavar="p95=SECONDS", help="of a request, p50 or p95")
    add("--temperature", type=float, help="default: the report's; 0 is greedy")
    add("--tasks", type=shares, default=[], metavar="chat=0.7,...", help="shares of the tokens")
    add("--accept", choices=[one.value for one in Accept], default="auto", help="accept rule")
    add("--stack", choices=[one.value for one in Stack], default="vllm")
    add("--stack-version", help="default: the one whose source was read")
    add("--verifier", metavar="PATH", help="to be served: compared with the one trained on")
    add("--json", type=Path, metavar="FILE", help="write the advice as JSON, too")
    add("--output", type=Path, metavar="FILE.md", help="write the page, too")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the page; 0 whether it says on or off."""
    words = parser().parse_args(argv)
    advice = advise(words)
    page = render(advice)
    say(page)
    if words.json:
        write_atomically(words.json, to_json(advice))
    if words.output:
        write_atomically(words.output, page)
    return 0


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
