"""What the scaling benchmark concludes: a table for each axis, straight lines, and the bars."""

from dataclasses import asdict, dataclass
from typing import Any

from bars import Bar, bars_as_json
from problem import Problem
from scaling_points import Measured, Plan
from step_report import GIB

OFF_LINE = 0.15  # largest distance from a straight line, of the value measured
PER_GUESS = 1.5  # largest time of a guess over the smallest, along the length
CROSSED = 0.05  # memory that grows with vocabulary x steps, of what keeping the logits takes
BESIDE_HEAD = 0.25  # memory that grows with the vocabulary, the head's gradient apart; likewise
PEAK = 4e9  # bytes of the whole process
TITLES = {
    "tokens": "Length",
    "depth": "Steps K",
    "share": "Supervised share, per cent",
    "vocabulary": "Draft vocabulary",
}
Results = dict[Problem, Measured]


@dataclass(frozen=True)
class Point:
    """One problem and what it took; all that the page, the plot and the JSON say of it."""

    value: int  # on the axis
    problem: Problem
    measured: Measured

    @property
    def rest(self) -> float:
        """Seconds without attention."""
        return self.measured.seconds - self.measured.attention

    @property
    def per_guess(self) -> float:
        return self.rest / self.problem.guesses

    @property
    def rate_share(self) -> float:
        """Needed FLOPs a second without attention, of the machine's own product's."""
        return self.problem.flops / self.rest / self.measured.rate

    def as_json(self) -> dict[str, Any]:
        counted = ("guesses", "flops", "attention_flops")
        derived = {"rest_seconds": self.rest, "rate_share": self.rate_share}
        known = asdict(self.problem) | asdict(self.measured) | derived
        return {"value": self.value} | known | {n: getattr(self.problem, n) for n in counted}


@dataclass(frozen=True)
class Line:
    """value = start + slope * x, and the largest distance from it, of the value measured."""

    start: float
    slope: float
    off: float

    def at(self, x: float) -> float:
        return self.start + self.slope * x


def line_through(xs: list[float], ys: list[float]) -> Line:
    """The line with the least sum of squared distances, each as a share of its value."""
    least = max(max(ys), 1.0) * 1e-6
    sizes = [max(y, least) for y in ys]
    total = sum(1 / size**2 for size in sizes)
    x0 = sum(x / size**2 for x, size in zip(xs, sizes, strict=True)) / total
    y0 = sum(y / size**2 for y, size in zip(ys, sizes, strict=True)) / total
    triples = list(zip(xs, ys, sizes, strict=True))
    spread = sum(((x - x0) / size) ** 2 for x, _, size in triples)
    slope = sum((x - x0) * (y - y0) / size**2 for x, y, size in triples) / spread
    line = Line(y0 - slope * x0, slope, 0.0)
    return Line(line.start, slope, max(abs(line.at(x) - y) / size for x, y, size in triples))


def points_of(plan: Plan, results: Results) -> dict[str, list[Point]]:
    return {
        axis: [Point(value, problem, results[problem]) for value, problem in problems.items()]
        for axis, problems in plan.axes().items()
    }


def lines_of(axis: str, points: list[Point]) -> dict[str, Line]:
    """Time without attention and memory, over guesses; over entries of the draft vocabulary."""
    by_size = axis == "vocabulary"
    xs = [float(p.value if by_size else p.problem.guesses) for p in points]
    return {
        "seconds": line_through(xs, [p.rest for p in points]),
        "bytes": line_through(xs, [float(p.measured.extra_bytes) for p in points]),
    }


def head_gradient(problem: Problem) -> int:
    return 4 * problem.shape.hidden * problem.shape.draft_vocab


@dataclass(frozen=True)
class Growth:
    """Extra memory that comes with a larger draft vocabulary."""

    alone: int  # bytes, at the middle's K
    gradient: int  # bytes, of them, of the head's gradient: needed
    crossed: int  # bytes more at the most steps than at the fewest
    logits: int  # bytes that the added entries' logits would take, kept for the middle's guesses
    crossed_logits: int  # and for the guesses that the most steps have beyond the fewest

    @property
    def share(self) -> float:
        """Of what is not needed, and 1 if logits were kept."""
        return (self.alone - self.gradient) / self.logits

    @property
    def crossed_share(self) -> float:
        return self.crossed / self.crossed_logits


def growth(plan: Plan, results: Results) -> Growth:
    small, large = (plan.with_vocabulary(size) for size in plan.ends())
    few_small, few_large, many_small, many_large = plan.corners()
    extra = {problem: measured.extra_bytes for problem, measured in results.items()}
    entries = large.shape.draft_vocab - small.shape.draft_vocab
    at_most, at_least = extra[many_large] - extra[many_small], extra[few_large] - extra[few_small]
    return Growth(
        alone=extra[large] - extra[small],
        gradient=head_gradient(large) - head_gradient(small),
        crossed=at_most - at_least,
        logits=4 * large.guesses * entries,
        crossed_logits=4 * (many_large.guesses - few_large.guesses) * entries,
    )


def bars_of(plan: Plan, results: Results) -> list[Bar]:
    axes = points_of(plan, results)
    bars = []
    for axis in ("tokens", "depth", "share"):
        line = lines_of(axis, axes[axis])["seconds"]
        what = f"{TITLES[axis]}: time without attention, off a line in guesses"
        bars.append(Bar(what, line.off, OFF_LINE, least=False))
    of_guess = [point.per_guess for point in axes["tokens"]]
    what = "Length: time of a guess without attention, largest over smallest"
    bars.append(Bar(what, max(of_guess) / min(of_guess), PER_GUESS, least=False))
    for axis in ("tokens", "share"):
        line = lines_of(axis, axes[axis])["bytes"]
        what = f"{TITLES[axis]}: extra memory, off a line in guesses"
        bars.append(Bar(what, line.off, OFF_LINE, least=False))
    grown = growth(plan, results)
    what = "Draft vocabulary: extra memory but the head's gradient, of what keeping logits takes"
    bars.append(Bar(what, grown.share, BESIDE_HEAD, least=False))
    what = "Draft vocabulary x K: extra memory, of what keeping logits takes"
    bars.append(Bar(what, grown.crossed_share, CROSSED, least=False))
    for problem in plan.checkpointed():
        peak = results[problem].peak_bytes
        if peak is not None and problem.shape.tokens == plan.filled:
            what = f"{title(problem)}: peak of the process, GB"
            bars.append(Bar(what, peak / 1e9, PEAK / 1e9, least=False))
    return bars


def title(problem: Problem) -> str:
    name = f"{problem.shape.tokens} tokens, K = {problem.depth}, {problem.share} % supervised"
    name += f", draft vocabulary {problem.shape.draft_vocab}"
    return name + (", recomputed" if problem.recompute else "")


def page(plan: Plan, results: Results) -> str:
    lines = [f"Around {title(plan.middle)}; width {plan.middle.shape.hidden}, fp32", ""]
    for axis, points in points_of(plan, results).items():
        lines += table(axis, points)
    return "\n".join([*lines, *corner_lines(plan, results), *checkpoint_lines(plan, results)])


def table(axis: str, points: list[Point]) -> list[str]:
    lines = [
        f"  {TITLES[axis]}",
        f"  {'':>8}{'guesses':>10}{'GFLOP':>9}{'s/step':>9}{'attention s':>13}{'the rest s':>12}"
        f"{'µs a guess':>12}{'of matrix product':>19}{'extra GiB':>11}",
    ]
    for point in points:
        problem, measured = point.problem, point.measured
        lines.append(
            f"  {point.value:>8}{problem.guesses:>10}{problem.flops / 1e9:>9.3g}"
            f"{measured.seconds:>9.3g}{measured.attention:>13.3g}{point.rest:>12.3g}"
            f"{point.per_guess * 1e6:>12.0f}{point.rate_share:>19.0%}"
            f"{measured.extra_bytes / GIB:>11.3f}"
        )
    fits, unit = lines_of(axis, points), "an entry" if axis == "vocabulary" else "a guess"
    time, memory = fits["seconds"], fits["bytes"]
    return [
        *lines,
        f"  the rest = {time.start:.3g} s + {time.slope * 1e6:.3g} µs {unit}, "
        f"off by at most {time.off:.0%}",
        f"  extra memory = {memory.start / GIB:.3g} GiB + {memory.slope / 1024:.3g} KiB {unit}, "
        f"off by at most {memory.off:.0%}",
        "",
    ]


def corner_lines(plan: Plan, results: Results) -> list[str]:
    lines = ["  Draft vocabulary x K: extra GiB, and without the head's gradient"]
    for problem in plan.corners():
        extra = results[problem].extra_bytes
        lines.append(
            f"  K = {problem.depth:<3} {problem.shape.draft_vocab:>6} entries: {extra / GIB:.3f}, "
            f"{(extra - head_gradient(problem)) / GIB:.3f}"
        )
    grown = growth(plan, results)
    return [
        *lines,
        f"  grown with the vocabulary: {grown.alone / GIB:.3f} GiB, of which the head's gradient "
        f"{grown.gradient / GIB:.3f}; kept logits would take {grown.logits / GIB:.3f}",
        f"  grown with both: {grown.crossed / GIB:.3f} GiB; kept logits would take "
        f"{grown.crossed_logits / GIB:.3f}",
        "",
    ]


def checkpoint_lines(plan: Plan, results: Results) -> list[str]:
    lines = [
        "  Activation checkpointing of each step",
        f"  {'tokens':>8}{'share':>7}{'recomputed':>12}{'s/step':>9}{'attention s':>13}"
        f"{'extra GiB':>11}{'process GB':>12}",
    ]
    for problem in plan.checkpointed():
        for tried in (plain_twin(problem), problem):
            measured = results.get(tried)
            if measured is None:  # all of it supervised is measured recomputed alone
                continue
            peak = "" if measured.peak_bytes is None else f"{measured.peak_bytes / 1e9:.2f}"
            lines.append(
                f"  {tried.shape.tokens:>8}{tried.share:>7}{'yes' if tried.recompute else 'no':>12}"
                f"{measured.seconds:>9.3g}{measured.attention:>13.3g}"
                f"{measured.extra_bytes / GIB:>11.3f}{peak:>12}"
            )
    return [*lines, ""]


def plain_twin(problem: Problem) -> Problem:
    return Problem(problem.shape, problem.share, problem.depth)


def as_json(plan: Plan, results: Results) -> dict[str, Any]:
    axes = points_of(plan, results)
    checkpointed = [Point(p.shape.tokens, p, results[p]) for p in plan.checkpointed()]
    corners = [Point(p.shape.draft_vocab, p, results[p]) for p in plan.corners()]
    return {
        "axes": {axis: [point.as_json() for point in points] for axis, points in axes.items()},
        "lines": {
            axis: {name: asdict(line) for name, line in lines_of(axis, points).items()}
            for axis, points in axes.items()
        },
        "corners": [point.as_json() for point in corners],
        "vocabulary_growth": asdict(growth(plan, results)),
        "recomputed": [point.as_json() for point in checkpointed],
        "bars": bars_as_json(bars_of(plan, results)),
    }
