"""The report as sections that a colleague understands, and as a Markdown page of them."""

from eval.acceptance import Interval
from eval.pages.acceptance_page import (
    by_depth,
    by_range,
    by_rank,
    by_task,
    by_temperature,
    foretold,
)
from eval.pages.prose import how, limits, reproduce
from eval.pages.report_plots import Plot
from eval.pages.speed_page import speed_sections
from eval.report import EvalReport
from eval.tables import Grid, Row, Section, markdown, shown, span


def render_page(report: EvalReport, plots: list[Plot]) -> str:
    """Markdown with every figure of report.json but the raw ones by prompt."""
    parts = [
        f"# {title(report)}",
        summary_sentence(report),
        *[f"> {warning}" for warning in report.warnings],
        markdown(headline_grid(report)),
        "\n".join(f"![{one.says}]({one.file})" for one in plots),
    ]
    for section in sections(report):
        parts += [f"## {section.title}", *map(markdown, section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(report: EvalReport) -> str:
    return f"{report.settings.run}: draft head for {report.settings.verifier}"


def headline_grid(report: EvalReport) -> Grid:
    return Grid(["", "value", "95 % interval", "means"], headline(report))


def sections(report: EvalReport) -> list[Section]:
    """All below the headline, in the order of reading."""
    return [
        Section("By draft position", by_depth(report)),
        *speed_sections(report),
        Section("By task", by_task(report)),
        Section("By position", by_range(report)),
        *([by_temperature(report)] if report.by_temperature else []),
        *([by_rank(report)] if report.rank_hits else []),
        Section("What training foretold", foretold(report)),
        Section("How it was measured", [how(report)]),
        Section("What these figures do not say", [limits(report)]),
        Section("How to reproduce it, and what comes next", reproduce(report)),
    ]


def summary_sentence(report: EvalReport) -> str:
    kept = report.lossless
    best = report.by_tree.get(report.settings.best_shape)
    tree = (
        "" if best is None else f", with the tree {best.shape} {shown(best.speedup_decode)} times"
    )
    same = f"{kept.identical} of {kept.checked} answers are identical to plain greedy decoding"
    return (
        f"A round yields τ = {shown(report.tau)} tokens on {report.prompts} prompts "
        f"(an order-{report.ngram_floor.order} n-gram table of the training answers: "
        f"{shown(report.ngram_floor.tau)}). With N = {report.settings.best_n} the head decodes "
        f"{shown(report.speedup_decode)} times as fast as the same loop without it{tree}; "
        f"{same if kept.checked else kept.note}."
    )


def headline(report: EvalReport) -> list[Row]:
    kept = report.lossless
    identical = f"{kept.identical} of {kept.checked}"
    return [
        *acceptance_rows(report),
        *speed_rows(report),
        ("identical answers", identical, "", kept.note),
    ]


def acceptance_rows(report: EvalReport) -> list[Row]:
    spread, n = report.intervals, report.settings.eval.n_draft
    independent = f"(1 - α^{n + 1}) / (1 - α): an estimate"
    return [
        row("τ", report.tau, spread.tau, "tokens a round, the verifier's own included"),
        row("α", report.alpha, spread.alpha, "accepted / tested drafts; none tested after a miss"),
        row("α_tv", report.alpha_tv, None, "mean Σ min(target, draft) over tested positions"),
        row("n-gram floor τ", report.ngram_floor.tau, None, "not above it: nothing learnt"),
        row("τ if independent", report.tau_if_independent, None, independent),
    ]


def speed_rows(report: EvalReport) -> list[Row]:
    spread, best = report.intervals, report.settings.best_n
    decode = f"tokens/s with the draft / without, prefill apart, N = {best}"
    fastest = min(report.by_batch.items())[1]
    shape = fastest.shapes[fastest.best].label
    versus = f"tokens/s with {shape} / the library's generate, prefills included"
    both = "the same with both prefills"
    return [
        row("speed-up, decode", report.speedup_decode, spread.speedup_decode, decode),
        row("speed-up, end to end", report.speedup_end_to_end, spread.speedup_end_to_end, both),
        row(
            "speed-up over generate", report.speedup_vs_generate, spread.speedup_vs_generate, versus
        ),
        row("predicted speed-up", report.predicted_speedup, None, "τ / (v + d), all measured at N"),
        row("c", report.c, None, "time of one draft token / time of one plain verifier step"),
    ]


def row(name: str, value: float, interval: Interval | None, means: str) -> Row:
    return [name, shown(value), span(interval), means]
