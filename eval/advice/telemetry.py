"""What to log in the first week, by stack, and the thresholds at which to act."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eval.advice.candidates import Candidate
from eval.advice.evidence import Evidence
from eval.advice.heat import PAYS, Gate
from eval.advice.question import Question, Stack
from eval.advice.request_time import RequestTime

NORMAL = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True)
class Signal:
    watch: str  # the figure
    hook: str  # where the stack gives it
    alarm: str  # when to act, and how


HOOKS = {
    Stack.vllm: (
        "counters on /metrics, as differences over an hour: 1 + "
        "vllm:spec_decode_num_accepted_tokens_total / vllm:spec_decode_num_drafts_total; the log "
        "line 'SpecDecoding metrics: Mean acceptance length' gives it between two lines",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total by position, over "
        "vllm:spec_decode_num_drafts_total",
        "histogram vllm:e2e_request_latency_seconds; vllm:request_time_per_output_token_seconds "
        "for decoding alone",
        "vllm:num_requests_running",
        "--per-request-spec-decode-metrics summary puts metrics.speculative_decoding into each "
        "response (0.32, experimental): log it with task and temperature",
    ),
    Stack.sglang: (
        "per request meta_info of /generate: completion_tokens / spec_verify_ct, summed over an "
        "hour; gauge sglang:spec_accept_length with --enable-metrics; /server_info's "
        "avg_spec_accept_length is cumulative since the start and hides a change",
        "no counter by position is known to us: log the share of requests whose completion_tokens "
        "/ spec_verify_ct is below the round's cost",
        "histogram sglang:e2e_request_latency_seconds; sglang:inter_token_latency_seconds for "
        "decoding alone",
        "sglang:num_running_reqs",
        "log completion_tokens and spec_verify_ct of meta_info with task and temperature",
    ),
    Stack.eyrie: (
        "tau and counters of report.json, from python -m eval.main on a day's prompts",
        "survival_by_depth of report.json",
        "by_batch.B.shapes.NAME.latency of report.json",
        "settings.eval.batch_sizes of report.json",
        "tasks and by_temperature of report.json",
    ),
}


def signals(
    question: Question,
    pick: Candidate,
    evidence: Evidence,
    gate: Gate | None,
    request: RequestTime | None,
) -> list[Signal]:
    """In the order of their weight; thresholds come from the report's own intervals."""
    tau, by_depth, latency, running, labels = HOOKS[question.stack]
    return [
        Signal("tokens a round (tau), each hour", tau, tau_alarm(pick, evidence)),
        Signal("acceptance by position, each day", by_depth, depth_alarm(pick, evidence)),
        Signal("latency of a request, p50 and p95", latency, latency_alarm(request)),
        Signal(
            "sequences decoded at once",
            running,
            f"above {question.batch} for an hour: costs were taken at {question.batch}; ask again "
            "with that --batch, for more sequences shorten the chain",
        ),
        Signal("tau by task and by temperature, each day", labels, task_alarm(pick, gate)),
    ]


def tau_alarm(pick: Candidate, evidence: Evidence) -> str:
    expected = f"expected {pick.tau:.2f}"
    parts = [f"{expected}; fall back to plain decoding below {pick.cost:.2f}, where it is slower"]
    parts.append(f"look into it below {PAYS * pick.cost:.2f} (less than {PAYS}x)")
    report = evidence.report
    if report and report.tau > 0 and math.isfinite(report.intervals.tau.low):
        low = pick.tau * report.intervals.tau.low / report.tau
        parts.append(f"below {low:.2f} it has left the report's 95 % interval")
    needed = rounds_needed(pick, evidence)
    if needed:
        parts.append(f"judge by {needed:,} rounds or more")
    return "; ".join(parts)


def rounds_needed(pick: Candidate, evidence: Evidence) -> int | None:
    """Rounds after which the 95 % interval of tau is half as wide as its distance from the cost.

    Accepted guesses A of a round have E[A] = sum S_k and E[A^2] = sum (2k - 1) S_k. Rounds of one
    prompt resemble each other: the report's bootstrap tells by how much, as a factor on variance.
    """
    curve = evidence.mix.survival()[: pick.depth]
    mean = math.fsum(curve)
    variance = math.fsum((2 * k + 1) * s for k, s in enumerate(curve)) - mean**2
    distance = pick.tau - pick.cost
    if variance <= 0 or distance <= 0:
        return None
    alone = (NORMAL / (distance / 2)) ** 2 * variance
    return math.ceil(alone * likeness(evidence, variance))


def likeness(evidence: Evidence, variance: float) -> float:
    """Of rounds of one prompt: the bootstrap's variance of tau over that of independent rounds."""
    report = evidence.report
    if report is None or not report.counters.rounds:
        return 1.0
    half = (report.intervals.tau.high - report.intervals.tau.low) / 2
    found = (half / NORMAL) ** 2 * report.counters.rounds / variance
    return max(1.0, found) if math.isfinite(found) else 1.0


def depth_alarm(pick: Candidate, evidence: Evidence) -> str:
    curve = evidence.mix.survival()[: pick.depth]
    named = f"expected {listed(curve)} at positions 1 to {len(curve)}"
    report = evidence.report
    lows = report.intervals.survival_by_depth if report else []
    if report is None or not lows:
        return f"{named}; a first position that falls alone means another template or tokenizer"
    pairs = zip(curve, report.survival_by_depth, lows, strict=False)
    floor = [here * low.low / there if there else 0.0 for here, there, low in pairs]
    return (
        f"{named}; below {listed(floor)} (as much lower as the report's 95 % interval reaches) for "
        "a day: compare template, system prompt and verifier revision with those of the training"
    )


def listed(figures: Sequence[float]) -> str:
    shown = [f"{one:.2f}" for one in figures[:8]]
    return " ".join([*shown, "..."] if len(figures) > 8 else shown)


def latency_alarm(request: RequestTime | None) -> str:
    if request is None:
        return "p50 above that of the plain server on the same hour's prompts: fall back"
    if request.target:
        limit = request.target
        return (
            f"{limit.percentile} above {limit.seconds:g} s, the target; or above plain decoding's"
        )
    return f"p50 above {request.plain_p50:.2f} s, which is plain decoding's: fall back"


def task_alarm(pick: Candidate, gate: Gate | None) -> str:
    text = f"a task below {pick.cost:.2f} is slower than plain decoding: send it there"
    if gate and gate.off_above is not None:
        text += f"; so are temperatures above {gate.off_above:.2f}"
    return text
