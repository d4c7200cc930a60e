"""The report as a page that a colleague understands, and as the table a terminal ends with."""

from eval.acceptance import Counters, Interval
from eval.report import UNSEEN, DataOrigin, EvalReport, GroupFigures
from eval.tables import Row, aligned, shown, span, table


def render_page(report: EvalReport, plots: list[str]) -> str:
    """Markdown with every figure of report.json; ``plots`` are file names beside it."""
    parts = [
        f"# {report.settings.run}: draft head for {report.settings.verifier}",
        summary_sentence(report),
        *[f"> {warning}" for warning in report.warnings],
        table(["", "value", "95 % interval", "means"], headline(report)),
        "\n".join(f"![{name.partition('.')[0]}]({name})" for name in plots),
        "## By draft position\n\n" + by_depth(report),
        "## By draft tokens a round (N)\n\n" + by_n(report),
        "## By task\n\n" + by_task(report),
        "## By position in the answer\n\n" + by_range(report),
        "## How it was measured\n\n" + how(report),
        "## What these figures do not say\n\n" + limits(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_sentence(report: EvalReport) -> str:
    kept = report.lossless
    same = f"{kept.identical} of {kept.checked} answers are identical to plain greedy decoding"
    return (
        f"A round yields τ = {shown(report.tau)} tokens on {report.prompts} prompts "
        f"(an order-{report.ngram_floor.order} n-gram table of the training answers: "
        f"{shown(report.ngram_floor.tau)}). With N = {report.settings.best_n} the head decodes "
        f"{shown(report.speedup_decode)} times as fast as the same loop without it; "
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
    versus = "tokens/s with the draft / the library's generate, prefills included"
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


def by_depth(report: EvalReport) -> str:
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
    return (
        f"{table(head, rows)}\n\n{sums(counters)}. α_k: accepted / reached. survival_k: accepted / "
        "rounds (what vLLM's per-position counters give). τ = 1 + Σ survival_k. The n-gram table "
        f"on the same text: {sums(floor)}; accepted / reached {fractions(floor)}."
    )


def sums(counters: Counters) -> str:
    return (
        f"{shown(counters.rounds)} rounds, {shown(counters.drafted)} drafted, "
        f"{shown(counters.tested)} tested, {shown(counters.tokens)} tokens emitted"
    )


def by_n(report: EvalReport) -> str:
    rows = [
        (
            str(at.n) + (" (best)" if at.n == report.settings.best_n else ""),
            shown(at.tau),
            shown(at.v),
            shown(at.d),
            shown(at.c),
            shown(at.predicted_speedup),
            f"{shown(at.speedup_decode)} {span(at.speedup_decode_interval)}",
            f"{shown(at.speedup_end_to_end)} {span(at.speedup_end_to_end_interval)}",
            shown(at.tokens_per_second_decode),
            shown(at.tokens_per_second_end_to_end),
        )
        for at in report.by_n.values()
    ]
    head = ["N", "τ", "v", "d", "c", "predicted", "decode", "end to end", "tok/s decode", "tok/s"]
    base = report.baselines
    return (
        table(head, rows)
        + "\n\nv: time to verify N + 1 tokens, d: draft time a round, both in plain verifier steps "
        f"of {shown(base.plain_step_seconds)} s; c = d / N. Without a draft: "
        f"{shown(base.plain_tokens_per_second_decode)} tok/s decode only, "
        f"{shown(base.plain_tokens_per_second_end_to_end)} with prefill; the library's generate: "
        f"{shown(base.generate_tokens_per_second)}. {shown(base.prompts)} prompts, "
        f"{shown(base.tokens)} tokens each way, {report.settings.eval.speed_dtype.value}, all "
        "methods interleaved; τ here is of these runs."
    )


def by_task(report: EvalReport) -> str:
    named = {name: task for name, task in report.tasks.items() if name != UNSEEN}
    note = ""
    if UNSEEN in report.tasks:
        named["**patterns never seen in training**"] = report.tasks[UNSEEN]
        note = "The last row's prompts are of patterns that the training prompts lack; no figure "
        note += "above contains them.\n\n"
    head = ["task", "prompts", "τ", "95 %", "floor τ", "α", "95 %", "α_tv", "identical"]
    figures = [task_row(name, task) for name, task in named.items()]
    raw_head = ["task", "rounds", "drafted", "tested", "tokens", "accepted / reached by position"]
    raw_head += ["α_k", "survival_k"]
    raw = table(raw_head, [raw_row(name, task) for name, task in named.items()])
    fold = f"<details><summary>Counters by task</summary>\n\n{raw}\n\n</details>"
    return f"{note}{table(head, figures)}\n\n{fold}"


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


def by_range(report: EvalReport) -> str:
    rows = [
        (
            one.positions,
            shown(one.tau),
            shown(one.alpha),
            shown(one.counters.rounds),
            fractions(one.counters),
            shown(one.counters.drafted),
            shown(one.counters.tested),
            shown(one.counters.tokens),
        )
        for one in report.position_ranges
    ]
    head = ["generated tokens", "τ", "α", "rounds that begin there", "accepted / reached"]
    return table([*head, "drafted", "tested", "tokens"], rows)


def how(report: EvalReport) -> str:
    settings, data, section = report.settings, report.data, report.settings.eval
    answers = "greedy" if section.temperature == 0 else f"temperature {section.temperature:g}"
    lines = [
        f"Accept rule `{settings.accept_rule}`, {answers}, chains of {section.n_draft} drafts, up "
        f"to {section.max_new_tokens} new tokens, batch 1. τ, α and counters: "
        f"{settings.counters_dtype}. Speed: {section.speed_dtype.value}.",
        "A round is one verifier forward over drafts; prefill and the token it gives belong to "
        "none. Counters are taken before the cut at the end of an answer. Later turns of a "
        "conversation follow the verifier's own answers; all turns count.",
        f"Head {settings.draft}, verifier {settings.verifier} (states after "
        f"{', '.join(map(str, settings.aux_layers))} layers, attention {settings.attention}), "
        f"{settings.device}, threads: {settings.threads}.",
        f"Prompts: {', '.join(data.prompt_files)}, {data.prompts_read} read; of those measured "
        f"{data.same_pattern_prompts} use patterns of the training prompts with new content, "
        f"{data.unseen_pattern_prompts} use patterns never seen. The answers are the verifier's.",
        f"Head and n-gram table trained on {data.training_samples} samples of "
        f"{', '.join(data.training_files)}, the longest of {data.longest_training_sample} tokens; "
        f"{data.held_out_samples} held out, τ there {shown(data.held_out_tau)}. "
        + learnt_from(data),
        f"Intervals: bootstrap over prompts, {section.bootstrap} resamples.",
        f"Code {report.provenance.get('git')}, torch "
        f"{report.provenance.get('packages', {}).get('torch')}.",
    ]
    return "\n".join(f"- {line}" for line in lines) + differing(report)


def learnt_from(data: DataOrigin) -> str:
    """How much was supervised, and whether the answers are the verifier's (near 1) or foreign."""
    tokens, share = data.supervised_tokens, data.verifier_agreement
    many = "not recorded" if tokens is None else tokens
    agreed = "not recorded" if share is None else shown(share)
    return f"Supervised tokens: {many}; share that is the verifier's own top choice: {agreed}."


def differing(report: EvalReport) -> str:
    groups = [report.lossless, *([report.tasks[UNSEEN].lossless] if UNSEEN in report.tasks else [])]
    found = [one for kept in groups for one in kept.differing]
    return "".join(
        f"\n- {one.prompt} differs from plain decoding at token {one.position}; the verifier's two "
        f"highest logits are {one.gap:.2e} apart there"
        for one in found
    )


def limits(report: EvalReport) -> str:
    lines = [
        f"They hold for batch 1 on this machine ({report.settings.device}). On a busy server a "
        "step is bound by arithmetic, verifying N + 1 tokens costs more than one, and the speed-up "
        "shrinks; on a GPU c and v differ.",
        "They hold for prompts like these. Other patterns, other languages and longer answers "
        "are accepted less often.",
        f"Best N = {report.settings.best_n} was chosen on the same runs whose speed-up is quoted.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def terminal_lines(report: EvalReport) -> list[str]:
    """Headline and by-N tables, columns aligned."""
    base = report.baselines
    head = ["N", "τ", "v", "d", "c", "predicted", "decode", "end to end", "tok/s"]
    without = f"{base.plain_tokens_per_second_decode:.1f}"
    rows = [["none", "1.000", "", "", "", "", "1.000", "1.000", without]]
    for at in report.by_n.values():
        figures = [at.tau, at.v, at.d, at.c, at.predicted_speedup, at.speedup_decode]
        cells = [shown(value) for value in [*figures, at.speedup_end_to_end]]
        rows.append([str(at.n), *cells, f"{at.tokens_per_second_decode:.1f}"])
    return [
        *aligned(["", "value", "95 %"], [line[:3] for line in headline(report)]),
        "",
        *aligned(head, rows),
        *([""] if report.warnings else []),
        *[f"note: {warning}" for warning in report.warnings],
    ]
