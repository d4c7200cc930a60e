"""How long a request takes, plain and with drafts, from the report's own seconds."""

import math
from dataclasses import dataclass

from eval.candidates import Candidate
from eval.evidence import Evidence, speeds_at
from eval.question import Question, Target
from eval.report import EvalReport
from eval.speed_report import Baselines, Latency


@dataclass(frozen=True)
class RequestTime:
    plain_p50: float  # seconds
    plain_p95: float
    p50: float
    p95: float
    speedup_end_to_end: float
    target: Target | None
    met: bool | None  # None: no target
    worked: str


def request_time(
    question: Question, evidence: Evidence, pick: Candidate, expected: float
) -> RequestTime | None:
    """prefill + (answer - 1) steps, a step divided by the speed-up; None without the seconds.

    The first token comes with prefill. Prefill is that of the report's prompts: it does not record
    their length. p95 / p50 is the timed requests' own, of the pick where that was timed.
    """
    report = evidence.report
    if report is None or question.answer_length is None:
        return None
    base = baselines_at(report, question.batch)
    step = base.plain_step_seconds
    if math.isfinite(evidence.table.plain_step_seconds):
        step = evidence.table.plain_step_seconds
    steps = question.answer_length - 1
    plain, drafted = (
        base.prefill_seconds + steps * step,
        base.prefill_seconds + steps * step / expected,
    )
    timed = speeds_at(report, question.batch).get(pick.shape)
    plain_tail = tail(base.latency)
    drafted_tail = tail(timed.latency) if timed else plain_tail
    p50, p95 = drafted, drafted * drafted_tail
    target = question.target
    met = None
    if target:
        met = (p95 if target.percentile == "p95" else p50) <= target.seconds
    return RequestTime(
        plain_p50=plain,
        plain_p95=plain * plain_tail,
        p50=p50,
        p95=p95,
        speedup_end_to_end=plain / drafted,
        target=target,
        met=met,
        worked=f"{base.prefill_seconds:.3f} s prefill + {steps} x {step:.4f} s / {expected:.3f} = "
        f"{drafted:.3f} s; p95 = {drafted_tail:.2f} x p50",
    )


def baselines_at(report: EvalReport, batch: int) -> Baselines:
    """Of the measured batch size that is nearest."""
    if not report.by_batch:
        return report.baselines
    nearest = min(report.by_batch, key=lambda size: (abs(size - batch), size))
    return report.by_batch[nearest].baselines


def tail(latency: Latency) -> float:
    """p95 / p50, at least 1."""
    ratio = latency.p95 / latency.p50 if latency.p50 else 1.0
    return ratio if ratio > 1 else 1.0
