"""Reports of hand-counted rounds and invented times, made by the functions that make real ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from conf.schema import EvalSection
from data.eval_prompts import EvalPrompt
from data.records import Turn
from eval.acceptance import Interval
from eval.measure import Answer, ExactRuns, PromptRuns
from eval.ngram import floor_config
from eval.proof.difference import Difference
from eval.report import DataOrigin, EvalReport, EvalSettings
from eval.speed_report import (
    Baselines,
    CostTable,
    Latency,
    LibrarySpeed,
    ShapeSpeed,
    SpeedAtBatch,
    SpeedFigures,
    TimeSplit,
    Timing,
)
from eval.summary import Measured, best_chain, build_report, first_batch
from eval.temperatures import TemperatureRuns
from eval.verify import AcceptRule
from models.phrases import PhraseTable

N = 2


def answer(accepted: list[int], differs: bool = False, prompt: int = 1) -> Answer:
    """Rounds that accept so many of two guesses each; the text is 1, 2, 3, ..."""
    count = 1 + sum(n + 1 for n in accepted)
    tokens = list(range(1, count + 1))
    rounds = [SimpleNamespace(proposed=[0] * N, accepted=n, tested=min(n + 1, N)) for n in accepted]
    plain: Any = SimpleNamespace(tokens=tokens, tail=[count + 1, count + 2])
    overlap = [0.5] * sum(min(n + 1, N) for n in accepted)
    ranks = [[0] * min(n + 1, N) for n in accepted]  # a rank a test
    fast: Any = SimpleNamespace(
        tokens=[*tokens[:-1], 99] if differs else tokens,
        rounds=rounds,
        overlap=overlap,
        ranks=ranks,
    )
    difference = Difference(0, count - 1, tokens[-1], 99, 1e-7, 1e-7) if differs else None
    return Answer([0] * prompt, plain, fast, difference)


def conversation(
    name: str, task: str, *answers: Answer, seen: bool | None = True, said: str = "x"
) -> PromptRuns:
    turns = (Turn("user", f"{name} {said}"),) * len(answers)
    return PromptRuns(EvalPrompt(name, task, seen, turns), list(answers))


RUNS = ExactRuns(
    [
        conversation("a", "json", answer([2, 0, 1])),
        conversation("b", "json", answer([0, 0]), seen=None),
        conversation("c", "chat", answer([2]), answer([1, 1])),
        conversation("d", "poem", answer([0, 0, 0, 0], differs=True), seen=False),
    ]
)


def spoken(runs: list[PromptRuns]) -> list[list[Any]]:
    return [[one.speculative for one in run.answers] for run in runs]


def shape(name: str, n: int, nodes: int, speedup: float) -> ShapeSpeed:
    return ShapeSpeed(
        **{"shape": name, "n": n, "nodes": nodes, "tau": 1.7, "v": 1.06, "d": 0.12 * n, "c": 0.12},
        predicted_speedup=speedup + 0.07,
        measured_over_predicted=0.941,
        speedup_decode=speedup,
        speedup_decode_interval=Interval(speedup - 0.1, speedup + 0.1),
        speedup_end_to_end=speedup - 0.03,
        speedup_end_to_end_interval=Interval(speedup - 0.13, speedup + 0.07),
        tokens_per_second_decode=50 * speedup,
        tokens_per_second_end_to_end=48 * speedup,
        latency=Latency(1.25, 2.75),
        split=TimeSplit(0.21, 0.72, 0.07),
    )


def at_batch(batch: int, shapes: list[ShapeSpeed]) -> SpeedAtBatch:
    base = Baselines(2, 32, 0.02, 50.0 * batch, 47.0 * batch, 0.11, Latency(2.5, 3.5), "eager")
    best = max(shapes, key=lambda one: one.speedup_decode).shape
    library = {"generate": LibrarySpeed(41.5, 1.625, Interval(1.5, 1.75))}
    return SpeedAtBatch(batch, base, {one.shape: one for one in shapes}, best, library)


def timings(names: list[str], factor: float = 1.0) -> list[Timing]:
    """Two methods and the plain loop; times differ from prompt to prompt."""
    found = []
    for i, name in enumerate(names):
        plain = 1.0 + 0.1 * i
        for method, seconds in (("plain", plain), ("1", plain / 1.3), ("2", plain / 1.4 / factor)):
            spent = (0.1, 0.6) if method != "plain" else (0.0, 0.0)
            rounds = (20, 22) if method != "plain" else (0, 0)
            found.append(
                Timing(1, method, [name], f"d{name}", 41, 1, 0.05, seconds, *spent, *rounds)
            )
    return found


def speed(batches: tuple[int, ...] = (1, 4), factor: float = 1.0) -> SpeedFigures:
    def shapes(loss: float) -> list[ShapeSpeed]:
        return [
            shape("1", 1, 1, 1.31 - loss),
            shape("2", 2, 2, 1.42 - loss),
            shape("2x2", 2, 6, 1.53 - 2 * loss),
        ]

    costs = [
        CostTable(1, 256, 0.02, {1: 1.0, 3: 1.045, 7: 1.125}, 0.155, {1: 0.115, 2: 0.135}, 0.025)
    ]
    by_batch = {b: at_batch(b, shapes(0.1 * (b - 1))) for b in batches}
    return SpeedFigures(by_batch, costs, timings(["a", "b", "c"], factor))


def report(
    runs: ExactRuns = RUNS,
    longest: int = 512,
    times: SpeedFigures | None = None,
    temperatures: tuple[float, ...] = (0.5, 1.0),
    **changes: Any,
) -> EvalReport:
    times = times or speed()
    section = EvalSection(**{"n_draft": N, "max_new_tokens": 64, "bootstrap": 200, **changes})
    best = first_batch(times).best
    settings = EvalSettings(
        *(section, "demo", "some/verifier", "best", [2, 4], "greedy", "float32", "CPU", 2, "sdpa"),
        best_n=best_chain(times),
        best_shape=best,
    )
    origin = DataOrigin(
        *(["p.jsonl"], 4, {"not JSON": 1}, 2, 1, ["t.jsonl"], 90, 10, longest, 1.7),
        supervised_tokens=4321,
        verifier_agreement=0.875,
        held_out_alpha=0.5,
        held_out_depth=3,
    )
    drawn = [TemperatureRuns(one, AcceptRule.rejection, spoken(runs.top)) for one in temperatures]
    measured = Measured(runs, times, PhraseTable.counted(floor_config(16), [[1, 2, 3, 9]]), drawn)
    provenance = {"git": "abc", "packages": {"torch": "2.13.0"}, "argv": ["x"]}
    return build_report(measured, settings, origin, provenance)


@pytest.fixture
def made() -> SimpleNamespace:
    """The makers above, as one value."""
    return SimpleNamespace(
        answer=answer,
        conversation=conversation,
        speed=speed,
        shape=shape,
        timings=timings,
        report=report,
        runs=RUNS,
    )
