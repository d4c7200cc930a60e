"""The page's sections on speed: shapes of guesses, batch sizes, costs of single steps."""

from eval.report import EvalReport
from eval.speed_report import Baselines, CostTable, ShapeSpeed, SpeedAtBatch
from eval.tables import Block, Grid, Section, shown, span

BEST = "best"


def speed_sections(report: EvalReport) -> list[Section]:
    sections = [by_shape(report, size) for size in sorted(report.by_batch)]
    if report.costs:
        sections.append(costs(report.costs))
    return sections


def by_shape(report: EvalReport, batch: int) -> Section:
    at = report.by_batch[batch]
    shapes = list(at.shapes.values())
    head = ["guesses", "levels", "nodes", "τ", "v", "d", "c", "predicted", "decode", "95 %"]
    head += ["end to end", "95 %", "measured / predicted"]
    rows = [speed_row(one, one.shape == at.best) for one in shapes]
    times = ["guesses", "tok/s decode", "tok/s end to end", "p50 s", "p95 s", "draft", "verify"]
    blocks: list[Block] = [
        Grid(head, rows),
        Grid([*times, "rest"], [time_row(one) for one in shapes]),
        baseline_sentence(at.baselines, report.settings.eval.speed_dtype.value),
        library(at),
    ]
    return Section(f"By shape of guesses, batch {batch}", blocks)


def speed_row(one: ShapeSpeed, best: bool) -> list[str]:
    return [
        f"{one.label}{f' ({BEST})' if best else ''}",
        shown(one.n),
        shown(one.nodes),
        *(shown(value) for value in (one.tau, one.v, one.d, one.c, one.predicted_speedup)),
        shown(one.speedup_decode),
        span(one.speedup_decode_interval),
        shown(one.speedup_end_to_end),
        span(one.speedup_end_to_end_interval),
        shown(one.measured_over_predicted),
    ]


def time_row(one: ShapeSpeed) -> list[str]:
    figures = [one.tokens_per_second_decode, one.tokens_per_second_end_to_end]
    figures += [one.latency.p50, one.latency.p95]
    figures += [one.split.draft, one.split.verify, one.split.rest]
    return [one.label, *map(shown, figures)]


def baseline_sentence(base: Baselines, dtype: str) -> str:
    return (
        "v: time to verify all guesses and the root, d: draft time a round, both in plain verifier "
        f"steps of {shown(base.plain_step_seconds)} s; c = d / levels; predicted = τ / (v + d). "
        f"Without a draft: {shown(base.plain_tokens_per_second_decode)} tok/s decode only, "
        f"{shown(base.plain_tokens_per_second_end_to_end)} with prefill; prefill "
        f"{shown(base.prefill_seconds)} s a prompt; a request takes {shown(base.latency.p50)} s "
        f"(p50), {shown(base.latency.p95)} s (p95). {shown(base.prompts)} prompts, "
        f"{shown(base.tokens)} tokens each way, {dtype}, verifier steps {base.step}, all methods "
        "interleaved; τ here is of these runs. draft, verify, rest: shares of the time after "
        "prefill."
    )


def library(at: SpeedAtBatch) -> Grid:
    rows = [
        (name, shown(one.tokens_per_second), shown(one.speedup), span(one.speedup_interval))
        for name, one in at.library.items()
    ]
    return Grid(["the library's", "tok/s", f"speed-up of {at.best} over it", "95 %"], rows)


def costs(tables: list[CostTable]) -> Section:
    blocks: list[Block] = [
        "Single steps timed on their own, in plain verifier steps of the same batch size: what "
        "predictions for other shapes are made of. A round costs its draft's first forward, a "
        "forward a later level, the verifier's over all nodes, and the rest."
    ]
    for one in tables:
        rows = [
            *[(f"verify {n} tokens", shown(cost)) for n, cost in sorted(one.verify.items())],
            ("draft, first forward", shown(one.draft_first)),
            *[
                (f"draft, a level of {n} nodes", shown(cost))
                for n, cost in sorted(one.draft_next.items())
            ],
            ("rest of a round", shown(one.rest)),
        ]
        blocks += [
            f"Batch {one.batch}, {one.context} tokens in the cache, plain step "
            f"{shown(one.plain_step_seconds)} s:",
            Grid(["step", "cost"], rows),
        ]
    return Section("Costs of single steps", blocks)
