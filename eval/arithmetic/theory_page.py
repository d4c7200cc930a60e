"""What eval.theory prints: tables over α, c and N, one draft at every N, trees; and its plots."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.runtime import plain, say, write_atomically
from conf.schema import ConfigError
from eval.arithmetic.checks import check_lines
from eval.arithmetic.published import arithmetic_checks, chain_checks
from eval.arithmetic.tree_compare import BUDGETS, compare_heads, leaf_lines, tree_lines
from eval.plots import Curve, Labels, draw_curves
from eval.tables import aligned
from eval.theory import (
    MAX_N,
    Best,
    Request,
    best_n,
    best_n_of_alpha,
    continued,
    expected_tokens,
    expected_tokens_of_survival,
    speedup,
    time_per_token,
)

ALPHAS = (0.50, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95)
COSTS = (0.01, 0.02, 0.04, 0.05, 0.10, 0.20, 0.30)
FEW_ALPHAS = (0.55, 0.70, 0.80, 0.90, 0.95)  # of the tables over N
FEW_LENGTHS = (1, 3, 5, 7, 10)
C = 0.04  # of the table of times
SWEEP = 24  # chains of the plots
SHOWN = 20  # lengths of a table, at most, the band's ends apart


@dataclass(frozen=True)
class Draft:
    """A draft with its costs; ``tokens[n]`` a call with n guesses."""

    name: str
    tokens: list[float]
    c: float
    verify_cost: float
    measured: int = MAX_N  # depths beyond it continue the curve
    speedups: dict[int, float] = field(default_factory=dict)  # measured, by N

    @property
    def best(self) -> Best:
        return best_n(self.tokens, self.c, self.verify_cost)


def print_tables(request: Request) -> int:
    """Everything that does not depend on a draft; 1 when a check is off."""
    verify_cost = request.verify_cost or 0.0
    costs = request.costs or COSTS
    max_n = request.max_n or MAX_N
    checks = [*arithmetic_checks(), *chain_checks()]
    comparisons = [compare_heads(budget) for budget in BUDGETS]
    parts = (
        best_lines(ALPHAS, costs, verify_cost, max_n),
        ["Tokens a verifier call", *grid(FEW_ALPHAS, lambda a, n: expected_tokens(a, n))],
        [
            f"Time a token, c = {C:g}",
            *grid(FEW_ALPHAS, lambda a, n: time_per_token(expected_tokens(a, n), n, C)),
        ],
        draft_lines(of_alpha(0.9, C, 0.0, MAX_N)),
        *(tree_lines(one) for one in comparisons),
        leaf_lines(),
        ["Checks", *check_lines(checks)],
    )
    for lines in parts:
        for text in ("", *lines):
            say(text)
    off = [check.name for check in checks if not check.passed]
    if off:
        say(f"\noff: {'; '.join(off)}")
    if request.plots:
        draw_tables(request.plots, costs, verify_cost, max_n)
    if request.json:
        best = [
            {"alpha": a, "c": c, "best": best_n_of_alpha(a, c, verify_cost, max_n)}
            for a in ALPHAS
            for c in costs
        ]
        keep(request.json, {"best": best, "trees": comparisons, "checks": checks})
    return 1 if off else 0


def best_lines(
    alphas: Sequence[float], costs: Sequence[float], verify_cost: float, max_n: int
) -> list[str]:
    """Best N : speed-up [lengths within 1 %]."""
    rows: list[list[str]] = []
    for alpha in alphas:
        found = [best_n_of_alpha(alpha, c, verify_cost, max_n) for c in costs]
        rows.append([f"{alpha:g}", *(show_best(best) for best in found)])
    more = f", {verify_cost:g} a verified guess" if verify_cost else ""
    title = f"Best N : speed-up [within 1 %], by α and c{more}"
    return [title, *aligned(["α", *(f"c = {c:g}" for c in costs)], rows)]


def show_best(best: Best) -> str:
    return f"{best.n}:{best.speedup:.2f} [{best.low}-{best.high}]"


def grid(alphas: Sequence[float], value: Any) -> list[str]:
    rows = [[f"{a:g}", *(f"{value(a, n):.3f}" for n in FEW_LENGTHS)] for a in alphas]
    return aligned(["α", *(f"N = {n}" for n in FEW_LENGTHS)], rows)


def of_alpha(alpha: float, c: float, verify_cost: float, max_n: int) -> Draft:
    tokens = [expected_tokens(alpha, n) for n in range(max_n + 1)]
    return Draft(f"α {alpha:g}, c {c:g}", tokens, c, verify_cost, max_n)


def of_survival(survival: list[float], c: float, verify_cost: float, max_n: int | None) -> Draft:
    """To ``max_n`` where the command names one, else as deep as measured."""
    depth = len(survival) if max_n is None else max_n
    curve = continued(survival, depth)
    tokens = [expected_tokens_of_survival(curve, n) for n in range(depth + 1)]
    return Draft(f"measured survival, c {c:.3g}", tokens, c, verify_cost, len(survival))


def of_report(request: Request, c: float | None) -> Draft:
    """Survival, costs and speed-ups from a report; ``c`` and --verify-cost stand above its own.

    Costs are lines through what was measured of each N, d = N·c and v = 1 + N·w. Raises ConfigError
    for a file that is no report.
    """
    assert request.report is not None
    path = request.report
    try:
        found = json.loads(path.read_text())
        survival = [float(value) for value in found["survival_by_depth"] if value is not None]
        runs = {int(n): one for n, one in found["by_n"].items()}
        measured_c = slope({n: float(one["d"]) for n, one in runs.items()})
        verify_cost = max(0.0, slope({n: float(one["v"]) - 1 for n, one in runs.items()}))
        speedups = {n: float(one["speedup_decode"]) for n, one in runs.items()}
    except OSError as error:
        raise ConfigError(f"--report={path}: {error.strerror}; eval.main writes it") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--report={path}: no report.json of eval.main ({type(error).__name__}: {error}); give "
            "runs/NAME/eval/report.json, or --survival and --c"
        ) from error
    if not survival:
        raise ConfigError(f"--report={path}: no round in it; measure with python -m eval.main")
    c = measured_c if c is None else c
    verify_cost = verify_cost if request.verify_cost is None else request.verify_cost
    draft = of_survival(survival, c, verify_cost, request.max_n)
    name = f"{path}: c {c:.3g}, {verify_cost:.3g} a verified guess"
    return Draft(name, draft.tokens, c, verify_cost, draft.measured, speedups)


def slope(points: dict[int, float]) -> float:
    """Of the line through 0 nearest to ``points``. Raises ValueError without one."""
    if not points:
        raise ValueError("nothing was timed")
    return sum(n * value for n, value in points.items()) / sum(n * n for n in points)


def print_drafts(request: Request) -> None:
    """The drafts of the command line: one at every N, several as the table of the best."""
    verify_cost = request.verify_cost or 0.0
    if request.report:
        drafts = [of_report(request, c) for c in request.costs or [None]]
    elif request.survival:
        costs = request.costs or [0.05]
        drafts = [of_survival(request.survival, c, verify_cost, request.max_n) for c in costs]
    else:
        costs, max_n = request.costs or list(COSTS), request.max_n or MAX_N
        drafts = [of_alpha(a, c, verify_cost, max_n) for a in request.alphas for c in costs]
        if len(drafts) > 1:
            for text in best_lines(request.alphas, costs, verify_cost, max_n):
                say(text)
    if len(drafts) == 1 or not request.alphas:
        for draft in drafts:
            for text in draft_lines(draft):
                say(text)
    if request.plots:
        draw_times(request.plots, drafts)
    if request.json:
        figures = [{"draft": draft, "best": draft.best} for draft in drafts]
        keep(request.json, {"drafts": figures})


def draft_lines(draft: Draft) -> list[str]:
    """Tokens, time and speed-up at every N up to the band's end."""
    best = draft.best
    last = len(draft.tokens) - 1
    upto = min(last, max(best.high + 2, 10))
    step = max(1, upto // SHOWN)
    shown = sorted({*range(0, upto + 1, step), best.n, best.low, best.high})
    head = ["N", "tokens a call", "time a token", "speed-up", ""]
    rows: list[list[str]] = []
    for n in shown:
        tokens = draft.tokens[n]
        cost = (n, draft.c, draft.verify_cost)
        figures = [time_per_token(tokens, *cost), speedup(tokens, *cost)]
        rows.append([str(n), *(f"{value:.3f}" for value in (tokens, *figures)), remark(draft, n)])
    end = f"; the longest looked at: raise --max-n above {last}" if best.n == last else ""
    gain = f"best N {best.n} at {best.speedup:.2f}, within 1 % {best.low} to {best.high}{end}"
    return [draft.name, *aligned(head, rows), gain]


def remark(draft: Draft, n: int) -> str:
    best = draft.best
    marks = ["best" if n == best.n else "within 1 %"] if best.low <= n <= best.high else []
    marks += [f"measured {draft.speedups[n]:.3f}"] if n in draft.speedups else []
    marks += ["deeper than measured"] if n > draft.measured else []
    return ", ".join(marks)


def draw_tables(folder: Path, costs: Sequence[float], verify_cost: float, max_n: int) -> None:
    lengths = list(range(SWEEP + 1))
    tokens = [
        Curve(f"α {a:g}", [expected_tokens(a, n) for n in lengths], None, lengths)
        for a in FEW_ALPHAS
    ]
    labels = Labels("Tokens a verifier call", "guesses a call, N", "tokens")
    draw_curves(folder / "theory_tokens.png", labels, tokens)
    draw_times(folder, [of_alpha(a, C, verify_cost, max_n) for a in FEW_ALPHAS])
    best = [
        Curve(
            f"α {a:g}",
            [best_n_of_alpha(a, c, verify_cost, max_n).n for c in costs],
            None,
            [round(1000 * c) for c in costs],
        )
        for a in ALPHAS
    ]
    labels = Labels("Best number of guesses", "c, thousandths of a plain verifier step", "best N")
    draw_curves(folder / "theory_best_n.png", labels, best)


def draw_times(folder: Path, drafts: Sequence[Draft]) -> None:
    """Time a token over N; a ring at each minimum that lies in the picture."""
    curves: list[Curve] = []
    rings: list[Curve] = []
    for draft in drafts:
        lengths = list(range(min(SWEEP, len(draft.tokens) - 1) + 1))
        times = [time_per_token(draft.tokens[n], n, draft.c, draft.verify_cost) for n in lengths]
        curves.append(Curve(draft.name, times, None, lengths))
        seen = [n for n in lengths if n == draft.best.n]
        rings.append(Curve("", [times[n] for n in seen], None, seen))
    labels = Labels("Time a token; the ring is the best N", "guesses a call, N", "plain steps")
    draw_curves(folder / "theory_time.png", labels, curves, rings)


def keep(path: Path, figures: Any) -> None:
    write_atomically(path, json.dumps(plain(figures), indent=2, ensure_ascii=False) + "\n")
