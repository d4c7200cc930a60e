"""What the step benchmark concludes: figures of each case, the bars, and the printed page."""

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from arena import Rival, Sample, title
from bars import Bar, bar_lines, bars_as_json
from flops import chain_rows, step_flops
from workload import Case, Shape, answer_length

OURS, OURS_BF16 = "eyrie", "eyrie bf16"
PEERS = ("specforge", "speculators")
BAR_DEPTH = 7  # the bars hold at this depth; others are printed beside it
SPEED_BARS = {8: 11.0, 40: 3.3, 100: 1.4}  # times the better peer's supervised tokens a second
MEMORY_BARS = {8: 1 / 5, 40: 1 / 5, 100: 1 / 3}  # of the smaller peer's extra memory
RATE_BARS = {8: 0.60, 40: 0.72, 100: 0.72}  # of the machine's own matrix product
BF16_BARS = {40: 1.5}  # times our own fp32
GRADIENT_BAR = 1e-2  # of bf16, against fp64
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One rival in one case; medians over the rounds that count."""

    name: str
    seconds: list[float]
    tokens_per_s: float | None
    supervised_per_s: float | None
    extra_bytes: int | None
    rate_share: float | None  # needed FLOPs a second, of the matrix product's in the same round
    loss: float | None
    rows: list[int]  # by step: how many carry loss
    error: str = ""


@dataclass(frozen=True)
class Figures:
    """One case."""

    case: Case
    rounds: int
    tokens: int
    supervised: int  # tokens of the loss mask, the same for all
    flops: int  # that the exact step needs
    rows: list[Row]
    ratios: dict[str, float] = field(default_factory=dict)  # time of another / ours, by its name

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)


def figures_of(
    shape: Shape, case: Case, rivals: list[Rival], samples: list[Sample], memory: dict[str, Any]
) -> Figures:
    """``samples``: of this case, those kept; ``memory``: extra bytes by rival."""
    expected = chain_rows(shape, case.share, case.depth)
    tokens = shape.batch * shape.tokens
    flops = step_flops(shape, case.share, case.depth).products
    supervised = shape.batch * answer_length(shape, case.share)
    rows = []
    for rival in rivals:
        row = row_of(rival.name, samples, (tokens, supervised, flops), memory.get(rival.name))
        if rival.name == OURS and row.rows and row.rows != expected:
            raise SystemExit(f"{title(case)}: our rows are {row.rows}, the count is {expected}")
        rows.append(row)
    return Figures(
        case, len(samples), tokens, supervised, flops, rows, ratios(samples, rivals[0].name)
    )


def row_of(name: str, samples: list[Sample], sizes: tuple[int, int, int], extra: int | None) -> Row:
    """``sizes``: tokens, supervised tokens and needed FLOPs of a step."""
    replies = [sample.answers[name] for sample in samples]
    error = next((reply["error"] for reply in replies if "error" in reply), "")
    if error or not replies:
        return Row(name, [], None, None, None, None, None, [], error or "no round counts")
    tokens, supervised, flops = sizes
    seconds = [reply["seconds"] for reply in replies]
    shares = [
        flops / reply["seconds"] / max(sample.rates)
        for reply, sample in zip(replies, samples, strict=True)
    ]
    return Row(
        name=name,
        seconds=seconds,
        tokens_per_s=tokens / median(seconds),
        supervised_per_s=supervised / median(seconds),
        extra_bytes=extra,
        rate_share=median(shares),
        loss=replies[-1]["loss"],
        rows=replies[-1]["rows"],
    )


def ratios(samples: list[Sample], base: str) -> dict[str, float]:
    """Another's seconds over ours (``base``), pairs of one round each; their median."""
    paired: dict[str, list[float]] = {}
    for sample in samples:
        ours = sample.answers[base].get("seconds")
        for name, reply in sample.answers.items():
            if name != base and ours and "seconds" in reply:
                paired.setdefault(name, []).append(reply["seconds"] / ours)
    return {name: median(values) for name, values in paired.items()}


def bars_of(figures: list[Figures], gradient_error: float | None) -> list[Bar]:
    bars = []
    for one in figures:
        if one.case.depth == BAR_DEPTH and one.case.share in SPEED_BARS:
            bars += case_bars(one)
    bars.append(Bar("bf16 gradient's error against fp64", gradient_error, GRADIENT_BAR, False))
    return bars


def case_bars(one: Figures) -> list[Bar]:
    share, name = one.case.share, title(one.case)
    speed = min((one.ratios[peer] for peer in PEERS if peer in one.ratios), default=None)
    ours = one.row(OURS)
    theirs = [row.extra_bytes for row in one.rows if row.name in PEERS and row.extra_bytes]
    extra = ours.extra_bytes if ours else None
    memory = extra / min(theirs) if extra is not None and theirs else None
    bars = [
        Bar(f"{name}: supervised tokens/s, of the better peer", speed, SPEED_BARS[share]),
        Bar(f"{name}: extra memory, of the smaller peer", memory, MEMORY_BARS[share], False),
        Bar(f"{name}: of the matrix product", ours and ours.rate_share, RATE_BARS[share]),
    ]
    if share in BF16_BARS:
        narrow = one.ratios.get(OURS_BF16)
        gain = 1 / narrow if narrow else None
        bars.append(Bar(f"{name}: bf16, of our own fp32", gain, BF16_BARS[share]))
    return bars


def page(figures: list[Figures], compiled: list[Figures], bars: list[Bar]) -> str:
    lines = []
    for one in figures:
        lines += table(one, title(one.case))
    for one in compiled:
        lines += table(one, f"{title(one.case)}, under torch.compile (no bar)")
    lines += bar_lines(bars)
    return "\n".join(lines)


def table(one: Figures, heading: str) -> list[str]:
    lines = [
        f"{heading}: {one.supervised} of {one.tokens} tokens, "
        f"{one.flops / 1e9:.0f} GFLOP needed, {one.rounds} rounds",
        f"  {'':<22}{'s/step':>8}{'tokens/s':>10}{'supervised/s':>14}{'extra GiB':>11}"
        f"{'of matrix product':>19}{'time / ours':>13}",
    ]
    for row in one.rows:
        if row.tokens_per_s is None or row.supervised_per_s is None or row.rate_share is None:
            lines.append(f"  {row.name:<22}  {row.error}")
            continue
        extra = "-" if row.extra_bytes is None else f"{row.extra_bytes / GIB:.2f}"
        ratio = f"{one.ratios[row.name]:.2f}" if row.name in one.ratios else ""
        lines.append(
            f"  {row.name:<22}{median(row.seconds):>8.2f}{row.tokens_per_s:>10.0f}"
            f"{row.supervised_per_s:>14.0f}{extra:>11}{row.rate_share:>19.0%}{ratio:>13}"
        )
    return [*lines, ""]


def as_json(figures: list[Figures], compiled: list[Figures], bars: list[Bar]) -> dict[str, Any]:
    return {
        "cases": [asdict(one) for one in figures],
        "compiled": [asdict(one) for one in compiled],
        "bars": bars_as_json(bars),
    }
