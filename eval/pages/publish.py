"""The files of a report in a run's folder, and what the terminal shows of it."""

from pathlib import Path

from conf.runtime import say, write_atomically
from eval.pages.html_page import render_html
from eval.pages.page import headline, render_page
from eval.pages.report_plots import draw_report
from eval.report import EvalReport, to_json
from eval.tables import aligned, shown


def publish(report: EvalReport, run: Path) -> None:
    """Write everything below ``run``/eval, then say the table."""
    folder = run / "eval"
    plots = draw_report(report, folder, run / "metrics.jsonl")
    write_atomically(folder / "report.md", render_page(report, plots))
    write_atomically(folder / "report.html", render_html(report, plots, folder))
    write_atomically(folder / "report.json", to_json(report))  # last: where it is, all is there
    say()
    for line in terminal_lines(report):
        say(line)
    say(f"\n{folder / 'report.md'}")
    say(str(folder / "report.html"))


def terminal_lines(report: EvalReport) -> list[str]:
    """Headline and table of shapes, columns aligned."""
    base = report.baselines
    head = ["guesses", "τ", "v", "d", "c", "predicted", "decode", "end to end", "tok/s"]
    without = f"{base.plain_tokens_per_second_decode:.1f}"
    rows = [["none", "1.000", "", "", "", "", "1.000", "1.000", without]]
    for at in [*report.by_n.values(), *report.by_tree.values()]:
        figures = [at.tau, at.v, at.d, at.c, at.predicted_speedup, at.speedup_decode]
        cells = [shown(value) for value in [*figures, at.speedup_end_to_end]]
        rows.append([at.label, *cells, f"{at.tokens_per_second_decode:.1f}"])
    return [
        *aligned(["", "value", "95 %"], [line[:3] for line in headline(report)]),
        "",
        *aligned(head, rows),
        *([""] if report.warnings else []),
        *[f"note: {warning}" for warning in report.warnings],
    ]
