"""A bar: a figure that a benchmark holds against a bound, and how it is printed."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    what: str
    value: float | None
    bound: float
    least: bool = True  # the value must reach the bound, else stay below it

    @property
    def reached(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound


def bar_lines(bars: list[Bar]) -> list[str]:
    lines = ["Bars"]
    for bar in bars:
        value = "not measured" if bar.value is None else f"{bar.value:.3g}"
        bound = f"at {'least' if bar.least else 'most'} {bar.bound:.3g}"
        word = {True: "reached", False: "MISSED", None: "-"}[bar.reached]
        lines.append(f"  {word:<8} {bar.what}: {value} ({bound})")
    return lines


def bars_as_json(bars: list[Bar]) -> list[dict[str, Any]]:
    return [{**asdict(bar), "reached": bar.reached} for bar in bars]
