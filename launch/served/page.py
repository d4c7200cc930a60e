"""What serve_check prints, and the same as a file: positions, τ, speed, answers, causes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.runtime import plain
from eval.report import EvalReport
from eval.tables import Row, aligned, shown, span
from launch.served.cause import Cause
from launch.served.compare import Comparison, Difference
from launch.served.identity import Identity
from launch.served.run import Served

FEW = 20  # prompts; of fewer the intervals say little
HEAD = ("position", "report", "95 %", "server", "difference", "95 %", "")


@dataclass(frozen=True)
class Outcome:
    run: Path
    report: EvalReport
    comparison: Comparison
    served: Served
    plain: Served | None  # without the head; None: not run
    identity: Identity | None
    tokens: int  # of an answer, at most
    dtype: str | None  # the server's, where it is known
    causes: list[Cause]

    @property
    def broken(self) -> bool:
        """The head changes answers, rounding aside; outside float32 that cannot be told apart."""
        exact = self.dtype == "float32" and self.identity is not None
        return exact and bool(self.identity and self.identity.changed(self.dtype))

    @property
    def code(self) -> int:
        return int(self.comparison.large or self.broken)

    @property
    def named(self) -> list[Cause]:
        """Faults always, what is not wrong by itself where acceptance lies apart alone."""
        return [one for one in self.causes if one.fault or self.comparison.large]


def page(outcome: Outcome) -> list[str]:
    """Lines for a terminal."""
    return [
        *acceptance(outcome.comparison),
        "",
        *speed(outcome),
        *answers(outcome),
        *cautions(outcome),
        "",
        *verdict(outcome),
        "",
        f"next: {following(outcome)}",
    ]


def acceptance(found: Comparison) -> list[str]:
    rows: list[Row] = []
    for k, ours in enumerate(found.ours.survival_by_depth):
        known = found.survival[k] if k < found.depth else None
        rows.append(row_of(str(k + 1), ours, span(found.our_survival[k]), known))
    theirs = found.theirs.survival_by_depth
    for k in range(len(rows), len(theirs)):
        rows.append((str(k + 1), "n/a", "", shown(theirs[k]), "", "", ""))
    if found.depth:
        name = "τ" if found.same_chain else f"τ to {found.depth}"
        rows.append(row_of(name, found.tau.ours, "", found.tau))
    counts = (
        f"rounds: {found.ours.rounds} in the report, {found.theirs.rounds} on the server; "
        "survival is accepted / rounds, τ is 1 + its sum"
    )
    return [*aligned(HEAD, rows), counts]


def row_of(name: str, ours: float, interval: str, found: Difference | None) -> Row:
    if found is None:
        return (name, shown(ours), interval, "n/a", "", "", "")
    apart = f"{found.value:+.3f}"
    mark = "LARGE" if found.large else ""
    return (name, shown(ours), interval, shown(found.theirs), apart, span(found.interval), mark)


def speed(outcome: Outcome) -> list[str]:
    guided = outcome.served.tokens_per_second
    if outcome.plain is None:
        return [f"tokens/s: {guided:.1f} with the head; without it not measured"]
    bare = outcome.plain.tokens_per_second
    report = outcome.report
    return [
        f"tokens/s, one request at a time, prefill included: {bare:.1f} without the head, "
        f"{guided:.1f} with it: {guided / bare:.2f}x (the report, in our own loop with "
        f"N={report.settings.best_n}: {shown(report.speedup_end_to_end)}x)"
    ]


def answers(outcome: Outcome) -> list[str]:
    found, dtype = outcome.identity, outcome.dtype
    if found is None:
        return ["identical answers: not checked, there was no server without the head"]
    line = f"identical answers: {found.identical} of {found.checked}"
    if not found.parted:
        return [line]
    ties = sum(one.tie(dtype) for one in found.parted)
    graded = [one for one in found.parted if one.gap is not None]
    first = (found.changed(dtype) or found.parted)[0]
    return [
        f"{line}; {ties} of {len(graded)} others looked at part at a near tie, which rounding "
        f"decides ({dtype or 'precision not known'})",
        f"  {first.id}, answer {first.answer}: parts at token {first.token}, two tokens "
        f"{shown(first.gap)} nats apart",
    ]


def cautions(outcome: Outcome) -> list[str]:
    lines = []
    talks = len(outcome.served.talks)
    if talks < FEW:
        lines.append(f"note: {talks} prompts are few, so the intervals say little")
    foreign = outcome.served.foreign
    spare = sum(len(talk.exchanges) for talk in outcome.served.talks) * outcome.served.positions
    if foreign > spare:  # the last round of an answer may be cut
        lines.append(
            f"note: the server made {foreign} tokens for others meanwhile, and its counters hold "
            "them: run this while nobody else asks"
        )
    if outcome.tokens < outcome.report.settings.eval.max_new_tokens:
        lines.append(
            f"note: answers end at {outcome.tokens} tokens, the report's at "
            f"{outcome.report.settings.eval.max_new_tokens}: figures may part for that alone"
        )
    return lines


def verdict(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.comparison.large:
        lines.append("The server accepts other shares than the report counts. Likely cause:")
    elif outcome.broken:
        lines.append("Acceptance is the report's, but the head changes answers.")
    else:
        lines.append("Acceptance is the report's, as far as these prompts tell.")
        if outcome.named:
            lines.append("All the same:")
    for cause in outcome.named:
        lines.append(f"- {cause.text}")
    return lines


def following(outcome: Outcome) -> str:
    if outcome.named:
        return outcome.named[0].mend
    if outcome.broken:
        return "report it to vLLM with the prompt, the exported folder and this command"
    return f"python -m eval.tune {outcome.run} --stack vllm, for N and the batch"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Every figure that is printed."""
    found = outcome.comparison
    return plain(
        {
            "large": found.large,
            "n_draft": {
                "report": len(found.ours.accepted_by_depth),
                "server": outcome.served.positions,
            },
            "positions": [described(one) for one in found.survival],
            "tau": described(found.tau) if found.depth else None,
            "counters": {"report": found.ours, "server": found.theirs},
            "tokens_per_second": outcome.served.tokens_per_second,
            "plain_tokens_per_second": outcome.plain and outcome.plain.tokens_per_second,
            "identical": outcome.identity,
            "dtype": outcome.dtype,
            "causes": [one.text for one in outcome.named],
        }
    )


def described(one: Difference) -> dict[str, Any]:
    return {
        "report": one.ours,
        "server": one.theirs,
        "difference": one.value,
        "interval": [one.interval.low, one.interval.high],
        "large": one.large,
    }
