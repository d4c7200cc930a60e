"""The report as Markdown, HTML, plots and terminal table: all figures, nothing unescaped."""

import json
import math
import re
import shlex
import struct
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conf.compose import load_config
from conf.schema import EvalSection, Precision, StepKind
from eval.measure import ExactRuns
from eval.pages.html_page import render_html
from eval.pages.page import render_page
from eval.pages.prose import command
from eval.pages.publish import publish, terminal_lines
from eval.pages.report_plots import Plot, draw_report
from eval.report import to_json
from eval.tables import shown

RAW = ("settings", "by_prompt", "timings", "provenance", "by_n", "by_tree")  # the last: by_batch


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for item in value.values() for n in numbers(item)]
    if isinstance(value, list):
        return [n for item in value for n in numbers(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_the_page_holds_every_figure_of_the_json(made: SimpleNamespace):
    found = made.report(longest=5)
    page = render_page(found, [Plot("acceptance.png", "Survival")])
    figures = {k: v for k, v in json.loads(to_json(found)).items() if k not in RAW}
    assert figures["beyond_training"] and figures["rank_hits"] and figures["costs"]
    written = set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", page))
    ways = [{shown(n), f"{n:.2e}", f"{n:g}"} for n in numbers(figures)]
    assert [way for way in ways if not way & written] == []
    assert "![Survival](acceptance.png)" in page and "Accept rule greedy" in page
    assert "d differs from plain decoding at token 4" in page
    assert "> prompt lines skipped: 1" in page
    assert "Supervised tokens: 4321; share that is the verifier's own top choice: 0.875" in page
    assert all(not math.isnan(n) for n in numbers(figures))


def test_formulas_are_printed_with_their_counters(made: SimpleNamespace):
    """B83: what is counted, with and without the condition, the verifier's token included."""
    page = render_page(made.report(), [])
    assert "α = Σ accepted / tested = 7 / 13" in page
    assert "1 + Σ survival_k = (8 + 7) / 8" in page and "own token included" in page
    assert "conditional on all guesses before it" in page and "not conditional" in page


def test_a_page_of_little(made: SimpleNamespace):
    """One batch, no temperatures, no ranks: those parts are not there."""
    bare = made.answer([1, 0])
    bare.speculative.ranks = []
    runs = ExactRuns([made.conversation("a", "t", bare)])
    page = render_page(made.report(runs, times=made.speed((1,)), temperatures=()), [])
    assert "By temperature" not in page and "By rank" not in page and "batch 4" not in page


def test_pipes_stay_inside_their_cell(made: SimpleNamespace):
    runs = ExactRuns([made.conversation("a", "t|u\nv", made.answer([1]))])
    assert "| t\\|u v |" in render_page(made.report(runs), [])


def test_terminal_table_is_aligned(made: SimpleNamespace):
    lines = terminal_lines(made.report())
    start = next(i for i, line in enumerate(lines) if line.startswith("guesses "))
    column = lines[start].index("decode")
    cells = [line[column:].split()[0] for line in lines[start + 1 : start + 5]]
    assert cells == ["1.000", "1.310", "1.420", "1.530"]


class Page(HTMLParser):
    """What a browser would see: tags, their attributes, text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "  # cells stand apart


EVIL = '<script>alert("1")</script>&amp;$title'


def test_html_is_one_file_and_escaped(made: SimpleNamespace, tmp_path: Path):
    runs = ExactRuns(
        [
            made.conversation(EVIL, EVIL, made.answer([2, 0, 1], differs=True)),
            made.conversation("b", "other", made.answer([0, 0])),
        ]
    )
    report = made.report(runs)
    plots = draw_report(report, tmp_path, tmp_path / "metrics.jsonl")
    page = Page()
    page.feed(render_html(report, plots, tmp_path))
    assert page.open == []  # every tag was closed
    assert "script" not in page.tags and EVIL in page.text
    pictures = [link for link in page.links if link.startswith("data:image/png;base64,")]
    assert len(pictures) == len(plots) == page.tags.count("img")
    assert all(link.startswith(("#", "data:")) for link in page.links)
    figures = {k: v for k, v in json.loads(to_json(report)).items() if k not in RAW}
    written = set(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", page.text))
    ways = [{shown(n), f"{n:.2e}", f"{n:g}"} for n in numbers(figures)]
    assert [way for way in ways if not way & written] == []


def test_plots_are_drawn_where_there_are_figures(made: SimpleNamespace, tmp_path: Path):
    full = draw_report(made.report(), tmp_path / "full", tmp_path / "metrics.jsonl")
    assert [one.file for one in full] == [
        *("acceptance.png", "speed.png", "time_split.png", "batches.png", "ranges.png"),
        "temperature.png",
    ]
    assert all((tmp_path / "full" / one.file).is_file() for one in full)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1}\n')
    bare = made.report(times=made.speed((1,)), temperatures=())
    few = draw_report(bare, tmp_path / "few", tmp_path / "metrics.jsonl")
    assert [one.file for one in few] == [
        *("acceptance.png", "speed.png", "time_split.png", "ranges.png", "training.png")
    ]
    assert {path.name for path in (tmp_path / "few").iterdir()} == {one.file for one in few}
    header = (tmp_path / "full" / "batches.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:]) == (1440, 600)


def test_all_files_are_published(made: SimpleNamespace, tmp_path: Path, capsys):
    publish(made.report(), tmp_path)
    names = {path.name for path in (tmp_path / "eval").iterdir()}
    assert {"report.json", "report.md", "report.html", "speed.png"} <= names
    assert not [name for name in names if name.endswith(".tmp")]
    said = capsys.readouterr().out
    assert "speed-up, decode" in said and "report.html" in said


def test_the_command_gives_the_settings_back(tmp_path: Path):
    """Through the shell's words and Hydra's grammar."""

    prompts = tmp_path / "some prompts, mine.jsonl"
    prompts.write_text('{"turns": ["x"]}')
    section = EvalSection(
        prompts=[str(prompts), f"gsm8k:{prompts}"],
        n_sweep=[1, 3],
        trees=["2x2", "[[0],[1],[0,0]]", "dynamic:nodes=24,depth=5,top_k=4"],
        stop=['he said "no"', "it's"],
        speed_dtype=Precision.float32,
        step=StepKind.eager,
        temperatures=[0.5],
        max_prompts=7,
        top_p=0.9,
    )
    words = shlex.split(command("demo", section))
    assert words[:3] == ["python", "-m", "eval.main"]
    read = load_config(["eval=default", *words[3:]], [])
    for name in ("prompts", "n_sweep", "trees", "stop", "temperatures", "max_prompts", "top_p"):
        assert getattr(read.eval, name) == getattr(section, name), name
    assert (read.eval.speed_dtype, read.eval.step) == (section.speed_dtype, section.step)


def test_the_default_command_is_short():
    assert command("demo", EvalSection()) == "python -m eval.main run.name=demo"
