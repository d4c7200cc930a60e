"""What a page is made of: sections of text, lists and tables; and how one figure is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from eval.acceptance import Interval

Row = Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table; ``fold`` is the line it hides behind until a reader asks."""

    head: Row
    rows: Sequence[Row]
    fold: str = ""


@dataclass(frozen=True)
class Bullets:
    lines: Sequence[str]


@dataclass(frozen=True)
class Command:
    """What a person types."""

    line: str


Block = str | Grid | Bullets | Command  # text is a paragraph


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


def table(head: Row, rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(in_cell, line)) + " |" for line in lines)


def in_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def markdown(block: Block) -> str:
    if isinstance(block, Grid):
        rows = table(block.head, block.rows)
        if not block.fold:
            return rows
        return f"<details><summary>{block.fold}</summary>\n\n{rows}\n\n</details>"
    if isinstance(block, Bullets):
        return "\n".join(f"- {line}" for line in block.lines)
    if isinstance(block, Command):
        return f"```\n{block.line}\n```"
    return block


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
