"""Arithmetic of speed: timings in, figures out.

Batches shrink as their sequences end, and plain decoding and rounds shrink at different steps. So
time is shared out by sequence: a plain step is ``batch`` times the seconds after prefill over the
tokens they gave, in which each sequence of a full batch would get one token; and a round's parts
are ``batch`` times their seconds over the rounds of all sequences. At batch 1 these are the time
of a step and of a round. Whatever the batch, tau / (v + d) is then the speed-up that a loop would
have whose rounds cost nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor

from conf.schema import ConfigError
from conf.shapes import Shape
from eval.acceptance import Interval
from eval.speed_report import (
    ASSISTED,
    LIBRARY,
    PLAIN,
    Baselines,
    CostTable,
    Latency,
    LibrarySpeed,
    ShapeSpeed,
    SpeedAtBatch,
    TimeSplit,
    Timing,
)
from eval.timed import Run

NO_INTERVAL = Interval(float("nan"), float("nan"))


@dataclass(frozen=True)
class Timed:
    """One batch size: every method's runs, group by group, and which groups a resample draws."""

    runs: Mapping[str, Sequence[Run]]
    picks: Tensor  # [resamples, groups]

    def timings(self, method: str) -> list[Timing]:
        return [one.timing for one in self.runs[method]]


def summarise(
    runs: Mapping[str, Sequence[Run]],
    shapes: Sequence[Shape],
    resamples: int,
    seed: int,
    step: str,
) -> tuple[SpeedAtBatch, list[Timing]]:
    """Figures of one batch size, and the timings that they are made of.

    Tokens and seconds are pooled over the groups whose answers go beyond their first tokens.
    Raises ConfigError when there is none: nothing was decoded that could be timed.
    """
    runs = decoded_ones(runs)
    groups = len(runs[PLAIN])
    generator = torch.Generator().manual_seed(seed)
    timed = Timed(runs, torch.randint(groups, (resamples, groups), generator=generator))
    base = baselines(timed, step)
    by_shape = {shape.name: speed_of(shape, timed, base) for shape in shapes}
    best = max(by_shape, key=lambda name: by_shape[name].speedup_decode)
    library = {
        name: library_speed(timed, name, best) for name in (LIBRARY, ASSISTED) if name in runs
    }
    at = SpeedAtBatch(runs[PLAIN][0].timing.batch, base, by_shape, best, library)
    return at, [one.timing for of in runs.values() for one in of]


def decoded_ones(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """Drop groups that one of our methods answered with prefill's tokens alone, or no round."""

    def decoded(name: str, one: Timing) -> bool:
        return one.tokens > one.first_tokens and (name == PLAIN or one.rounds > 0)

    ours = {name: of for name, of in runs.items() if name not in (LIBRARY, ASSISTED)}
    count = len(runs[PLAIN])
    kept = [
        i for i in range(count) if all(decoded(name, of[i].timing) for name, of in ours.items())
    ]
    if not kept:
        raise ConfigError(
            f"eval.speed_prompts: all {count} answers end with their first token, so no round can "
            "be timed; give other eval.prompts or a larger eval.max_new_tokens"
        )
    return {name: [of[i] for i in kept] for name, of in runs.items()}


def baselines(timed: Timed, step: str) -> Baselines:
    plain = timed.timings(PLAIN)
    prompts = sum(len(one.prompts) for one in plain)
    return Baselines(
        prompts=prompts,
        tokens=sum(one.tokens for one in plain),
        plain_step_seconds=plain[0].batch / rate(decode_only(plain)),
        plain_tokens_per_second_decode=rate(decode_only(plain)),
        plain_tokens_per_second_end_to_end=rate(end_to_end(plain)),
        prefill_seconds=sum(one.prefill_seconds for one in plain) / prompts,
        latency=latency_of(timed.runs[PLAIN]),
        step=step,
    )


def speed_of(shape: Shape, timed: Timed, base: Baselines) -> ShapeSpeed:
    runs, plain = timed.timings(shape.name), timed.timings(PLAIN)
    rounds = sum(one.rounds for one in runs)
    share = runs[0].batch / rounds / base.plain_step_seconds  # of one second, in steps a round
    tau = 1 + sum(one.accepted for one in runs) / rounds
    v = share * sum(one.verify_seconds for one in runs)
    d = share * sum(one.draft_seconds for one in runs)
    decode = ratio(decode_only(runs), decode_only(plain), timed.picks)
    both = ratio(end_to_end(runs), end_to_end(plain), timed.picks)
    predicted = tau / (v + d)
    return ShapeSpeed(
        shape=shape.name,
        n=shape.depth,
        nodes=shape.nodes,
        tau=tau,
        v=v,
        d=d,
        c=d / shape.depth,
        predicted_speedup=predicted,
        measured_over_predicted=decode.value / predicted,
        speedup_decode=decode.value,
        speedup_decode_interval=decode.interval,
        speedup_end_to_end=both.value,
        speedup_end_to_end_interval=both.interval,
        tokens_per_second_decode=rate(decode_only(runs)),
        tokens_per_second_end_to_end=rate(end_to_end(runs)),
        latency=latency_of(timed.runs[shape.name]),
        split=split_of(runs),
    )


def split_of(runs: Sequence[Timing]) -> TimeSplit:
    """Steps that the verifier makes without guesses, near a position limit, count as rest."""
    whole = sum(one.decode_seconds for one in runs)
    draft = sum(one.draft_seconds for one in runs) / whole
    verify = sum(one.verify_seconds for one in runs) / whole
    return TimeSplit(draft, verify, 1 - draft - verify)


def latency_of(runs: Sequence[Run]) -> Latency:
    seconds = [value for one in runs for value in one.requests]
    p50, p95 = np.quantile(seconds, [0.5, 0.95])
    return Latency(float(p50), float(p95))


def library_speed(timed: Timed, name: str, best: str) -> LibrarySpeed:
    theirs, ours = end_to_end(timed.timings(name)), end_to_end(timed.timings(best))
    versus = ratio(ours, theirs, timed.picks)
    return LibrarySpeed(rate(theirs), versus.value, versus.interval)


def with_rest(table: CostTable, at: SpeedAtBatch, shapes: Sequence[Shape]) -> CostTable:
    """``table`` with what a round in the loop costs beyond its single steps: judging, bookkeeping.

    The median over the shapes, at least 0.
    """
    beyond: list[float] = []
    for shape in shapes:
        speed = at.shapes[shape.name]
        whole = (speed.v + speed.d) / (1 - speed.split.rest)
        beyond.append(whole - replace(table, rest=0.0).round_cost(shape.nodes, shape.fed))
    return replace(table, rest=max(0.0, median(beyond)))


@dataclass(frozen=True)
class Ratio:
    value: float
    interval: Interval  # 95 %, bootstrap over groups; NaN for a single one


def decode_only(runs: Sequence[Timing]) -> Tensor:
    """[groups, 2]: tokens after the first ones, and the seconds they took."""
    pairs = [[one.tokens - one.first_tokens, one.decode_seconds] for one in runs]
    return torch.tensor(pairs, dtype=torch.float64)


def end_to_end(runs: Sequence[Timing]) -> Tensor:
    """[groups, 2]: all tokens, and the seconds with prefill."""
    pairs = [[one.tokens, one.prefill_seconds + one.decode_seconds] for one in runs]
    return torch.tensor(pairs, dtype=torch.float64)


def rate(pairs: Tensor) -> float:
    tokens, seconds = pairs.sum(0).tolist()
    return tokens / seconds


def ratio(new: Tensor, old: Tensor, picks: Tensor) -> Ratio:
    """Tokens/s of ``new`` over tokens/s of ``old``; groups are redrawn in pairs."""

    def of(pairs: Tensor) -> Tensor:
        sums = pairs[picks].sum(1)  # [resamples, 2]
        return sums[:, 0] / sums[:, 1]

    value = rate(new) / rate(old)
    if len(new) < 2:
        return Ratio(value, NO_INTERVAL)
    spread = of(new) / of(old)
    low, high = spread.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(value, Interval(low, high))
