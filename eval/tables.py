"""Figures in rows: Markdown tables, tables for a terminal, and how one figure is written."""

import math
from collections.abc import Sequence

from eval.acceptance import Interval

Row = Sequence[str]


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def aligned(head: Row, rows: Sequence[Row]) -> list[str]:
    """Lines for a terminal, columns under each other."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def shown(value: float | int | None) -> str:
    """Counts whole, figures to three decimals, n/a for 0 of 0."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "n/a"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def span(interval: Interval | None) -> str:
    return "" if interval is None else f"[{shown(interval.low)}, {shown(interval.high)}]"
