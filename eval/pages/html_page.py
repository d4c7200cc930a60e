"""The report as one HTML file to show a colleague: plots inside it, nothing loaded from outside.

The page holds no script. Every text is escaped: names of runs, tasks and prompts come from files.
"""

import base64
from html import escape
from pathlib import Path
from string import Template

from eval.pages.page import headline_grid, sections, summary_sentence, title
from eval.pages.report_plots import Plot
from eval.report import EvalReport
from eval.tables import Block, Bullets, Command, Grid, Section

TEMPLATE = Path(__file__).with_name("report.html")


def render_html(report: EvalReport, plots: list[Plot], folder: Path) -> str:
    """The page's text; the ``plots`` are read from ``folder``."""
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    found = sections(report)
    return template.substitute(
        title=escape(title(report)),
        summary=escape(summary_sentence(report)),
        warnings="".join(f'<p class="warning">{escape(one)}</p>\n' for one in report.warnings),
        headline=block(headline_grid(report)),
        plots="".join(figure(one, folder) for one in plots),
        contents="".join(
            f'<li><a href="#part{number}">{escape(one.title)}</a></li>\n'
            for number, one in enumerate(found)
        ),
        sections="".join(section(number, one) for number, one in enumerate(found)),
    )


def figure(plot: Plot, folder: Path) -> str:
    data = base64.b64encode((folder / plot.file).read_bytes()).decode()
    says = escape(plot.says)
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{says}">'
        f"<figcaption>{says}</figcaption></figure>\n"
    )


def section(number: int, one: Section) -> str:
    blocks = "".join(map(block, one.blocks))
    return f'<section id="part{number}">\n<h2>{escape(one.title)}</h2>\n{blocks}</section>\n'


def block(one: Block) -> str:
    if isinstance(one, Grid):
        return grid(one)
    if isinstance(one, Bullets):
        return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in one.lines)}</ul>\n"
    if isinstance(one, Command):
        return f"<pre>{escape(one.line)}</pre>\n"
    return f"<p>{escape(one)}</p>\n"


def grid(one: Grid) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in one.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in one.rows
    )
    table = f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>\n'
    if not one.fold:
        return table
    return f"<details><summary>{escape(one.fold)}</summary>\n{table}</details>\n"
