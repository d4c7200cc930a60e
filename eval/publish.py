"""The files of a report in a run's folder, and what the terminal shows of it."""

from pathlib import Path

from conf.runtime import say, write_atomically
from eval.html_page import render_html
from eval.page import render_page
from eval.report import EvalReport, to_json
from eval.report_plots import draw_report
from eval.screen import terminal_lines


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
