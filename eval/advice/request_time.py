"""How long a request takes, plain and with drafts, from the report's own seconds."""

import math
from dataclasses import dataclass

from eval.advice.candidates import Candidate
from eval.advice.evidence import Evidence, speeds_at
from eval.advice.question import Question, Target
from eval.report import EvalReport
from eval.speed_report import Baselines, Latency


@dataclass(frozen=True)
class RequestTime:
    plain_p50: float  # seconds
    plain_p95: float
    p50: float  # as advised: with drafts, or plain again where they are off
    p95: float
    speedup_end_to_end: float
    target: Target | None
    met: bool | None  # None: no target
    worked: str


def request_time(
    question: Question, evidence: Evidence, pick: Candidate | None, expected: float
) -> RequestTime | None:
    """prefill + (answer - 1) steps, a step divided by the speed-up; None without the seconds.

    ``pick`` None: plain decoding. The first token comes with prefill. Prefill is that of the
    report's prompts: it does not record their length. p95 / p50 is the timed requests' own, of the
    pick where that was timed.
    """
    report = evidence.report
    if report is None or question.answer_length is None:
        return None
    base = baselines_at(report, question.batch)
    step = base.plain_step_seconds
    if math.isfinite(evidence.table.plain_step_seconds):
        step = evidence.table.plain_step_seconds
    steps = question.answer_length - 1
    gain = expected if pick else 1.0
    plain = base.prefill_seconds + steps * step
    p50 = base.prefill_seconds + steps * step / gain
    timed = speeds_at(report, question.batch).get(pick.shape) if pick else None
    spread = tail(timed.latency if timed else base.latency)
    p95 = p50 * spread
    target = question.target
    divided = f" / {gain:.3f}" if pick else ""
    return RequestTime(
        plain_p50=plain,
        plain_p95=plain * tail(base.latency),
        p50=p50,
        p95=p95,
        speedup_end_to_end=plain / p50,
        target=target,
        met=(p95 if target.percentile == "p95" else p50) <= target.seconds if target else None,
        worked=f"{base.prefill_seconds:.3f} s prefill + {steps} x {step:.4f} s{divided} = "
        f"{p50:.3f} s; p95 = {spread:.2f} x p50",
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
