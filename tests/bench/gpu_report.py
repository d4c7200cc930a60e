"""What the GPU benchmark concludes: the table of each head, and the bars."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bars import Bar
from problem import Problem
from step_report import GIB, GRADIENT_BAR

MFU_BAR, MFU_TOKENS = 0.5, 8192  # on an H100 or H200


@dataclass(frozen=True)
class Case:
    head: str
    problem: Problem
    kernel: str = ""  # none was tried


@dataclass(frozen=True)
class Taken:
    seconds: list[float]  # of each timed step
    extra_bytes: int  # beyond weights and states
    loss: float


@dataclass(frozen=True)
class Figure:
    """One case: what its steps took, or why none was timed."""

    case: Case
    peak: float  # FLOP/s that the shares are of
    taken: Taken | None = None
    error: str = ""

    @property
    def seconds(self) -> float:
        assert self.taken is not None
        return median(self.taken.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.case.problem.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Counted FLOPs a second, attention's included, of the device's peak."""
        return self.mfu_without_attention + self.share(self.case.problem.attention_flops)

    @property
    def mfu_without_attention(self) -> float:
        """The same time, and attention's FLOPs not counted."""
        return self.share(self.case.problem.flops)

    def share(self, flops: int) -> float:
        return flops / self.seconds / self.peak

    def as_json(self) -> dict[str, Any]:
        problem = self.case.problem
        known = {"head": self.case.head, "kernel": self.case.kernel} | asdict(problem)
        known |= {"flops": problem.flops, "attention_flops": problem.attention_flops}
        known |= {"guesses": problem.guesses, "error": self.error}
        if self.taken is None:
            return known
        derived = ("tokens_per_s", "mfu", "mfu_without_attention")
        return known | asdict(self.taken) | {name: getattr(self, name) for name in derived}


def described(figure: Figure) -> str:
    """One line, while it runs."""
    result = f"{figure.seconds:.3g} s, MFU {figure.mfu:.0%}" if figure.taken else figure.error
    return f"{figure.case.head}, {name_of(figure.case)}: {result}"


def name_of(case: Case) -> str:
    problem = case.problem
    return f"{problem.shape.tokens} tokens, {problem.share} %, {kernel_of(case)}".rstrip(", ")


def kernel_of(case: Case) -> str:
    return case.kernel + (", recomputed" if case.problem.recompute else "")


def table(head: str, figures: list[Figure]) -> list[str]:
    shape = figures[0].case.problem.shape
    lines = [
        f"{head}: hidden {shape.hidden}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, "
        f"MLP {shape.mlp}, V {shape.vocab}, Vd {shape.draft_vocab}, "
        f"K = {figures[0].case.problem.depth}, bf16",
        f"  {'tokens':>8}{'share':>7}  {'kernel':<36}{'s/step':>9}{'tokens/s':>10}{'TFLOP':>9}"
        f"{'attention':>11}{'MFU':>7}{'without':>9}{'extra GiB':>11}",
    ]
    for figure in figures:
        problem = figure.case.problem
        start = f"  {problem.shape.tokens:>8}{problem.share:>7}  {kernel_of(figure.case):<36}"
        if figure.taken is None:
            lines.append(f"{start}  {figure.error}")
            continue
        lines.append(
            f"{start}{figure.seconds:>9.3g}{figure.tokens_per_s:>10.0f}"
            f"{problem.flops / 1e12:>9.3g}{problem.attention_flops / 1e12:>11.3g}"
            f"{figure.mfu:>7.1%}{figure.mfu_without_attention:>9.1%}"
            f"{figure.taken.extra_bytes / GIB:>11.3f}"
        )
    return [*lines, ""]


def parity_lines(errors: dict[str, float]) -> list[str]:
    lines = ["Gradient in bf16 against the plain kernel in fp32: norm of the difference / norm"]
    return [*lines, *(f"  {name:<36}{error:.2e}" for name, error in errors.items()), ""]


def bars_of(figures: list[Figure], errors: dict[str, float], goal: bool) -> list[Bar]:
    """``goal``: the device is one that the MFU's bar is for."""
    bars = [
        Bar(f"bf16 gradient's error, {name}", error, GRADIENT_BAR, least=False)
        for name, error in errors.items()
    ]
    heads = dict.fromkeys(figure.case.head for figure in figures) if goal else {}
    for head in heads:
        for share in sorted({figure.case.problem.share for figure in figures}):
            what = f"{head}, {MFU_TOKENS} tokens, {share} % supervised: MFU"
            bars.append(Bar(what, best_mfu(figures, head, share), MFU_BAR))
    return bars


def best_mfu(figures: list[Figure], head: str, share: int) -> float | None:
    """Of the kernels, at the bar's length; None where no step was timed."""
    found = [
        figure.mfu
        for figure in figures
        if figure.taken
        and figure.case.head == head
        and figure.case.problem.share == share
        and figure.case.problem.shape.tokens == MFU_TOKENS
    ]
    return max(found, default=None)
