"""The report as the table a terminal ends with."""

from eval.page import headline
from eval.report import EvalReport
from eval.tables import aligned, shown


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
