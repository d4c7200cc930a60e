"""The page's sections on acceptance: by draft position, task, place, temperature, rank."""

from data.eval_prompts import UNSEEN
from eval.acceptance import Counters
from eval.report import EvalReport, GroupFigures, RangeFigures
from eval.tables import Block, Bullets, Grid, Row, Section, shown, span


def by_depth(report: EvalReport) -> list[Block]:
    counters, spread = report.counters, report.intervals
    rows = [
        (
            str(k + 1),
            shown(counters.reached_by_depth[k]),
            shown(counters.accepted_by_depth[k]),
            shown(report.alpha_by_depth[k]),
            span(spread.alpha_by_depth[k]),
            shown(report.survival_by_depth[k]),
            span(spread.survival_by_depth[k]),
        )
        for k in range(len(report.alpha_by_depth))
    ]
    head = ["position", "reached", "accepted", "α_k", "95 %", "survival_k", "95 %"]
    floor = report.ngram_floor.counters
    formulas = [
        "α_k = accepted at k / rounds that reached k: conditional on all guesses before it.",
        "survival_k = accepted at k / rounds: not conditional; vLLM's per-position counters give "
        "this one.",
        f"α = Σ accepted / tested = {counters.accepted} / {counters.tested}; guesses after the "
        "first miss are not tested, and so neither accepted nor missed.",
        f"τ = tokens a round, the verifier's own token included = 1 + Σ survival_k = "
        f"({counters.rounds} + {counters.accepted}) / {counters.rounds}. Without that token it "
        "would be 1 less; some tools give it so.",
        "All are ratios of sums over all rounds of all turns, never means of means.",
    ]
    return [
        Grid(head, rows),
        f"{sums(counters)}. The n-gram table on the same text: {sums(floor)}; accepted / reached "
        f"{fractions(floor)}.",
        Bullets(formulas),
    ]


def sums(counters: Counters) -> str:
    return (
        f"{shown(counters.rounds)} rounds, {shown(counters.drafted)} drafted, "
        f"{shown(counters.tested)} tested, {shown(counters.tokens)} tokens emitted"
    )


def by_task(report: EvalReport) -> list[Block]:
    named = {name: task for name, task in report.tasks.items() if name != UNSEEN}
    note: list[Block] = []
    if UNSEEN in report.tasks:
        named["patterns never seen in training"] = report.tasks[UNSEEN]
        note.append(
            "The last row's prompts are of patterns that the training prompts lack; no figure "
            "above contains them."
        )
    head = ["task", "prompts", "τ", "95 %", "floor τ", "α", "95 %", "α_tv", "identical"]
    raw_head = ["task", "rounds", "drafted", "tested", "tokens", "accepted / reached by position"]
    raw = [raw_row(name, task) for name, task in named.items()]
    return [
        *note,
        Grid(head, [task_row(name, task) for name, task in named.items()]),
        Grid([*raw_head, "α_k", "survival_k"], raw, fold="Counters by task"),
    ]


def task_row(name: str, task: GroupFigures) -> Row:
    return [
        name,
        shown(task.prompts),
        shown(task.tau),
        span(task.tau_interval),
        shown(task.ngram_floor_tau),
        shown(task.alpha),
        span(task.alpha_interval),
        shown(task.alpha_tv),
        f"{task.lossless.identical} of {task.lossless.checked}",
    ]


def raw_row(name: str, task: GroupFigures) -> Row:
    counters = task.counters
    return [
        name,
        shown(counters.rounds),
        shown(counters.drafted),
        shown(counters.tested),
        shown(counters.tokens),
        fractions(counters),
        " ".join(shown(value) for value in task.alpha_by_depth),
        " ".join(shown(value) for value in task.survival_by_depth),
    ]


def fractions(counters: Counters) -> str:
    pairs = zip(counters.accepted_by_depth, counters.reached_by_depth, strict=True)
    return " ".join(f"{accepted}/{reached}" for accepted, reached in pairs)


def by_range(report: EvalReport) -> list[Block]:
    return [
        range_grid("generated tokens", report.position_ranges),
        "The same rounds by their place in the whole text, the prompt's tokens counted; the "
        f"longest training sample has {report.data.longest_training_sample} tokens.",
        range_grid("positions in the text", report.absolute_ranges),
        *([beyond_grid(report)] if report.beyond_training else []),
    ]


def range_grid(first: str, ranges: list[RangeFigures]) -> Grid:
    return counters_grid(first, {one.positions: one.counters for one in ranges})


def beyond_grid(report: EvalReport) -> Grid:
    found = report.beyond_training
    assert found is not None
    rows = {
        f"0-{found.first - 1}": found.within,
        f"{found.first} and on": found.beyond,
    }
    return counters_grid("within and beyond the trained length", rows)


def counters_grid(first: str, groups: dict[str, Counters]) -> Grid:
    head = [first, "τ", "α", "rounds that begin there", "accepted / reached"]
    rows = [
        (
            name,
            *(shown(value) for value in (one.tau, one.alpha, one.rounds)),
            fractions(one),
            *(shown(value) for value in (one.drafted, one.tested, one.tokens)),
        )
        for name, one in groups.items()
    ]
    return Grid([*head, "drafted", "tested", "tokens"], rows)


def by_temperature(report: EvalReport) -> Section:
    head = ["temperature", "rule", "τ", "α", "95 %", "α_tv", "counters", "accepted / reached"]
    rows = [
        (
            f"{one.temperature:g}",
            one.rule,
            shown(one.tau),
            shown(one.alpha),
            span(one.alpha_interval),
            shown(one.alpha_tv),
            sums(one.counters),
            fractions(one.counters),
        )
        for one in report.by_temperature
    ]
    return Section("By temperature", [Grid(head, rows)])


def by_rank(report: EvalReport) -> Section:
    """Where the verifier's token stands in the draft's order: what a second branch would catch."""
    found = report.rank_hits
    assert found is not None
    ranks = max((len(row) for row in found.hits), default=0)
    rows = [
        (str(depth + 1), shown(reached), *(share(hits, rank, reached) for rank in range(ranks)))
        for depth, (reached, hits) in enumerate(zip(found.reached, found.hits, strict=True))
    ]
    head = ["position", "reached", *(f"rank {rank + 1}" for rank in range(ranks))]
    words = (
        "Of the rounds that reached a position along the draft's first guesses: how often the "
        "verifier's token was the draft's first, second, ... guess. A tree gains what the later "
        "ranks hold."
    )
    return Section("By rank of the guess", [words, Grid(head, rows)])


def share(hits: list[int], rank: int, reached: int) -> str:
    if rank >= len(hits) or not reached:
        return "n/a"
    return f"{hits[rank]} ({hits[rank] / reached:.1%})"


def foretold(report: EvalReport) -> list[Block]:
    """The estimate that a product of accuracies gives is not what is measured (B86)."""
    found, n = report.training_estimate, report.settings.eval.n_draft
    depth = report.data.held_out_depth
    rows = [
        (
            "held-out answers of training",
            shown(depth),
            shown(report.data.held_out_alpha),
            shown(found.held_out_tau_if_independent),
            shown(found.held_out_tau),
        ),
        (
            "these prompts",
            shown(n),
            shown(report.alpha),
            shown(found.tau_if_independent),
            shown(found.tau),
        ),
    ]
    words = (
        f"τ if independent = {found.formula}: the product of accuracies that training tools print, "
        "the verifier's own token included. It takes each guess to stand with the same chance; "
        "measured τ is of rounds. The held-out one walks the rounds over the verifier's own greedy "
        "answers, which gives the loop's own counters there."
    )
    return [words, Grid(["on", "N", "α", "τ if independent", "τ measured"], rows)]
