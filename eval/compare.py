"""Two reports compared: two heads, or one head under two settings.

    python -m eval.compare a/eval/report.json b/eval/report.json [--json FILE] [--plot FILE]

Every figure that both have: a, b, the difference with its 95 % interval, and a verdict. What makes
the two hard to compare is named first.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from conf.compose import sentence_on_error
from conf.runtime import say, write_atomically
from conf.schema import ConfigError
from eval.acceptance import Interval
from eval.compare_figures import compare_acceptance, compare_speed
from eval.differences import Compared, Resampling
from eval.parser import Parser
from eval.plots import Labels, Point, draw_rows
from eval.report import EvalReport, jsonable
from eval.report_file import find_report, read_report
from eval.tables import aligned, shown, span

CHANCE = (
    "Each interval is a 95 % one of its own: of twenty figures of equal heads, one on average "
    "leaves zero out by chance."
)


@dataclass(frozen=True)
class Side:
    """One of the two reports."""

    file: str
    run: str
    head: str
    verifier: str


@dataclass(frozen=True)
class Comparison:
    a: Side
    b: Side
    warnings: list[str]
    figures: list[Compared]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    a: Path
    b: Path
    json: Path | None
    plot: Path | None
    resamples: int
    same_verifier: bool


def compare_reports(request: Request) -> Comparison:
    """Raises ConfigError for a report that cannot be read, and for two verifiers."""
    a, b = read_report(request.a), read_report(request.b)
    if a.settings.verifier != b.settings.verifier and not request.same_verifier:
        raise ConfigError(
            f"{request.b}: measured with the verifier {b.settings.verifier} and {request.a} with "
            f"{a.settings.verifier}, whose answers differ, so no figure compares; if both paths "
            "name one model give --same-verifier"
        )
    how = Resampling(request.resamples)
    figures = compare_acceptance(a, b, how) + compare_speed(a, b, how)
    return Comparison(side(request.a, a), side(request.b, b), warn(a, b), figures)


def side(path: Path, report: EvalReport) -> Side:
    settings = report.settings
    return Side(str(find_report(path)), settings.run, settings.draft, settings.verifier)


def warn(a: EvalReport, b: EvalReport) -> list[str]:
    """What differs between the two measurements besides the heads."""
    found = prompts_apart(a, b)
    for one in settings_of(a, b):
        if one.a != one.b:
            found.append(f"{one.name}: a has {one.a}, b has {one.b}; {one.touches}")
    return found


def prompts_apart(a: EvalReport, b: EvalReport) -> list[str]:
    """Matched by id and text; the figures count shared prompts alone, where there are any."""
    keys = [{(one.id, one.digest) for one in report.by_prompt} for report in (a, b)]
    shared = len(keys[0] & keys[1])
    alone = [len(keys[0]) - shared, len(keys[1]) - shared]
    if not any(alone):
        return []
    if not shared:
        return [
            f"other prompts: none of a's {alone[0]} is among b's {alone[1]}; each side counts its "
            "own, unpaired, and a difference may be the prompts'"
        ]
    return [
        f"other prompts: {shared} are shared and compared in pairs; {alone[0]} of a alone and "
        f"{alone[1]} of b alone are left out, so figures differ from the reports' own"
    ]


@dataclass(frozen=True)
class Setting:
    name: str
    a: object
    b: object
    touches: str


def settings_of(a: EvalReport, b: EvalReport) -> list[Setting]:
    of_a, of_b = a.settings, b.settings
    eval_a, eval_b = of_a.eval, of_b.eval
    both = "acceptance and speed differ for that alone"
    counts, speeds = "acceptance differs for that alone", "speeds differ for that alone"
    names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop")
    return [
        Setting("verifier", of_a.verifier, of_b.verifier, "taken for one model, as asked"),
        Setting("eval.n_draft", eval_a.n_draft, eval_b.n_draft, "τ and α are over other depths"),
        Setting("accept rule", of_a.accept_rule, of_b.accept_rule, counts),
        *[Setting(f"eval.{n}", getattr(eval_a, n), getattr(eval_b, n), both) for n in names],
        Setting("precision of the counters", of_a.counters_dtype, of_b.counters_dtype, counts),
        Setting("eval.speed_dtype", eval_a.speed_dtype.value, eval_b.speed_dtype.value, speeds),
        Setting("device", of_a.device, of_b.device, speeds),
        Setting("threads", of_a.threads, of_b.threads, speeds),
        Setting("attention", of_a.attention, of_b.attention, speeds),
        Setting("verifier step", a.baselines.step, b.baselines.step, speeds),
    ]


def lines_of(found: Comparison) -> list[str]:
    """For a terminal: what is compared, what to heed, the table."""
    head = ["", "a", "b", "b - a", "95 %", "b / a", "95 %", "b is", "prompts"]
    rows = [
        (
            one.name,
            shown(one.a),
            shown(one.b),
            f"{one.difference:+.3f}" if shown(one.difference) != "n/a" else "n/a",
            span(one.interval),
            "" if one.ratio is None else shown(one.ratio),
            span(one.ratio_interval),
            one.verdict,
            f"{one.prompts_a} in pairs" if one.paired else f"{one.prompts_a}, {one.prompts_b}",
        )
        for one in found.figures
    ]
    sides = [("a", found.a), ("b", found.b)]
    return [
        *[f"{letter}: {one.file} (run {one.run}, head {one.head})" for letter, one in sides],
        *[f"warning: {one}" for one in found.warnings],
        "",
        *aligned(head, rows),
        "",
        CHANCE,
    ]


def draw(found: Comparison, path: Path) -> None:
    """Differences relative to a, so that figures of any unit share one axis."""
    points = [
        Point(
            one.name,
            one.difference / one.a,
            Interval(one.interval.low / one.a, one.interval.high / one.a),
        )
        for one in found.figures
        if one.a > 0 and shown(one.difference) != "n/a" and shown(one.interval.low) != "n/a"
    ]
    title = f"{found.b.run} against {found.a.run}: (b - a) / a"
    draw_rows(path, [Labels(title, "difference", "")], [points], 0.0)


def parse(argv: list[str] | None) -> Request:
    parser = Parser(
        prog="python -m eval.compare",
        description="Compare two reports: each figure's difference with its 95 % interval.",
    )
    parser.add_argument("a", type=Path, help="report.json, or the folder of an evaluated run")
    parser.add_argument("b", type=Path, help="the other")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the differences, a PNG")
    parser.add_argument("--bootstrap", type=int, default=2000, help="resamples of an interval")
    parser.add_argument(
        "--same-verifier", action="store_true", help="both verifier paths name one model"
    )
    words = parser.parse_args(argv)
    if words.bootstrap < 1:
        parser.error(f"--bootstrap={words.bootstrap}: must be 1 or more")
    return Request(words.a, words.b, words.json, words.plot, words.bootstrap, words.same_verifier)


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 whatever it shows."""
    request = parse(argv)
    found = compare_reports(request)
    for line in lines_of(found):
        say(line)
    if request.json is not None:
        text = json.dumps(jsonable(found), indent=2, allow_nan=False, ensure_ascii=False)
        write_atomically(request.json, text + "\n")
    if request.plot is not None:
        draw(found, request.plot)
    return 0


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
