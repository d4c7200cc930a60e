"""Reports with round figures in place of measured ones, whose best shape can be found by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from conf.schema import EvalSection
from eval.acceptance import Counters, Interval, RankHits
from eval.advice.serving import Place
from eval.report import (
    DataOrigin,
    Differing,
    EvalReport,
    EvalSettings,
    Floor,
    GroupFigures,
    Intervals,
    Lossless,
    PromptCounts,
    TemperatureFigures,
    TrainingEstimate,
)
from eval.speed_report import (
    Baselines,
    CostTable,
    Latency,
    LibrarySpeed,
    ShapeSpeed,
    SpeedAtBatch,
    TimeSplit,
)

ROUNDS = 1000
STRONG = (0.8, 0.64, 0.512, 0.41, 0.328, 0.262, 0.21, 0.168)  # .8 of the rounds that got so far
WEAK = (0.1, 0.01, 0.001)
PLACE = Place("some/verifier", "runs/demo/export/vllm", "demo", None)


def counters(survival: Sequence[float]) -> Counters:
    """``ROUNDS`` rounds of a chain, of which so many got so far."""
    accepted = [round(ROUNDS * share) for share in survival]
    reached = [ROUNDS, *accepted[:-1]]
    depth = len(accepted)
    tokens = ROUNDS + sum(accepted)
    return Counters(ROUNDS, ROUNDS * depth, sum(reached), accepted, reached, tokens)


def costs(
    batch: int, verify: float, c: float = 0.2, longest: int = 8, rest: float = 0
) -> CostTable:
    """A draft forward ``c``, every guess to verify ``verify``, of a step of 20 ms."""
    sizes = range(1, longest + 2)
    table = {n: 1 + (n - 1) * verify for n in sizes}
    return CostTable(batch, 256, 0.02, table, c, {1: c, 2: c, 4: c}, rest)


def timed(shape: str, n: int, nodes: int, tau: float, speedup: float) -> ShapeSpeed:
    """Timed with v = 1.1 and d = .2 a level."""
    predicted = tau / (1.1 + 0.2 * n)
    return ShapeSpeed(
        *(shape, n, nodes, tau, 1.1, 0.2 * n, 0.2, predicted, speedup / predicted, speedup),
        speedup_decode_interval=Interval(speedup - 0.1, speedup + 0.1),
        speedup_end_to_end=speedup - 0.1,
        speedup_end_to_end_interval=Interval(speedup - 0.2, speedup),
        tokens_per_second_decode=50 * speedup,
        tokens_per_second_end_to_end=45 * speedup,
        latency=Latency(1.0, 1.5),
        split=TimeSplit(0.2, 0.7, 0.1),
    )


def at_batch(batch: int, shapes: Sequence[ShapeSpeed]) -> SpeedAtBatch:
    base = Baselines(20, 320, 0.02, 50.0 * batch, 45.0, 0.1, Latency(2.0, 2.4), "eager")
    library = {"generate": LibrarySpeed(40.0, 1.5, Interval(1.4, 1.6))}
    best = max(shapes, key=lambda one: one.speedup_decode).shape if shapes else ""
    return SpeedAtBatch(batch, base, {one.shape: one for one in shapes}, best, library)


@dataclass(frozen=True)
class Made:
    """What a synthetic report says; all else in it is the same everywhere."""

    survival: Sequence[float] = STRONG
    costs: Sequence[CostTable] = ()
    timed: dict[int, list[ShapeSpeed]] = field(default_factory=dict)  # by batch size
    temperature: float = 0.0
    rule: str = "greedy"
    # (temperature, rule) -> survival
    heat: dict[tuple[float, str], Sequence[float]] = field(default_factory=dict)
    ranks: Sequence[float] | None = None  # rates of ranks, alike at every depth
    tasks: dict[str, Sequence[float]] = field(default_factory=dict)
    gap: float | None = None  # of an answer that parts from plain decoding
    floor: Sequence[float] = (0.3, 0.1)


def report(made: Made) -> EvalReport:
    counted = counters(made.survival)
    depth = len(made.survival)
    batches = {b: at_batch(b, shapes) for b, shapes in made.timed.items()}
    first = at_batch(1, made.timed.get(1, []))
    section = EvalSection(n_draft=depth, max_new_tokens=64, temperature=made.temperature)
    settings = EvalSettings(
        *(section, "demo", "some/verifier", "runs/demo/best", [2, 4, 5], made.rule, "float32"),
        *("CPU", 2, "sdpa", 4, "4"),
    )
    hits = None
    if made.ranks:
        row = [round(ROUNDS * rate) for rate in made.ranks]
        hits = RankHits([ROUNDS] * depth + [0], [*[row] * depth, [0] * len(row)])
    differing = [] if made.gap is None else [Differing("p7", 12, made.gap)]
    none = Interval(1.0, 1.0)
    spread = [Interval(0.9 * one, min(1.0, 1.1 * one)) for one in counted.survival_by_depth]
    return EvalReport(
        *(counted.tau, counted.alpha, counted.alpha_by_depth, counted.survival_by_depth, 0.7),
        tau_if_independent=2.0,
        ngram_floor=Floor(4, 1.4, counters(made.floor)),
        **{"c": 0.2, "speedup_decode": 1.5, "speedup_end_to_end": 1.4},
        speedup_vs_generate=1.3,
        predicted_speedup=1.6,
        by_n={one.n: one for one in first.shapes.values() if one.is_chain},
        by_tree={name: one for name, one in first.shapes.items() if not one.is_chain},
        by_batch=batches,
        costs=list(made.costs),
        baselines=first.baselines,
        lossless=Lossless(20, 20 - len(differing), differing, ""),
        counters=counted,
        intervals=Intervals(
            *(Interval(0.95 * counted.tau, 1.05 * counted.tau), none, spread, spread),
            *(none, none, none),
        ),
        tasks={name: group(curve) for name, curve in made.tasks.items()},
        **{"position_ranges": [], "absolute_ranges": [], "beyond_training": None},
        rank_hits=hits,
        by_temperature=[heated(*key, curve) for key, curve in made.heat.items()],
        training_estimate=TrainingEstimate(1.7, 1.6, counted.tau, 2.0, "formula"),
        **{"prompts": 20, "by_prompt": [prompt_of(counted)], "timings": []},
        settings=settings,
        data=DataOrigin(["p"], 20, {}, 20, 0, ["t"], 90, 10, 512, 1.7),
        **{"provenance": {}, "warnings": []},
    )


def prompt_of(one: Counters) -> PromptCounts:
    """All rounds as those of one prompt."""
    return PromptCounts(
        *("p1", "json", "d1", False, one.rounds, one.drafted, one.tested, one.tokens),
        *(one.accepted_by_depth, one.reached_by_depth, 0.7 * one.tested, one.tested),
    )


def group(survival: Sequence[float]) -> GroupFigures:
    one, none = counters(survival), Interval(0.0, 1.0)
    lossless = Lossless(5, 5, [], "")
    return GroupFigures(
        *(5, one.tau, none, one.alpha, none, one.alpha_by_depth, one.survival_by_depth),
        *(0.7, 1.2, lossless, one),
    )


def heated(temperature: float, rule: str, survival: Sequence[float]) -> TemperatureFigures:
    one = counters(survival)
    return TemperatureFigures(temperature, rule, one.tau, one.alpha, Interval(0.0, 1.0), 0.7, one)


@pytest.fixture
def made() -> SimpleNamespace:
    """The makers above, as one value."""
    return SimpleNamespace(
        report=lambda **figures: report(Made(**figures)),
        costs=costs,
        timed=timed,
        strong=STRONG,
        weak=WEAK,
        place=PLACE,
    )
