"""How fast: plain decoding, speculative decoding at several chain lengths, and the library, timed.

Every prompt is run by every method before the next prompt, and the order rotates from prompt to
prompt, so that a machine that slows down slows all methods alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from conf.runtime import progress
from conf.schema import ConfigError
from eval.acceptance import Interval
from eval.decode import DecodeSettings, Generation, decode_plain, decode_speculative, now
from models.eagle3 import Eagle3Draft
from models.sampling import Sampling
from models.verifier import Verifier

PLAIN, LIBRARY = "plain", "generate"
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Timing:
    """One method on one prompt."""

    tokens: int  # emitted, the first one (from prefill) included, nothing beyond the end
    prefill_seconds: float  # both models; 0 for the library, which does not tell
    decode_seconds: float
    draft_seconds: float = 0.0  # part of decode_seconds
    verify_seconds: float = 0.0  # part of decode_seconds
    rounds: int = 0
    accepted: int = 0  # drafts accepted in all rounds, before any cut at the end

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True)
class SpeedAtN:
    """Speculative decoding with chains of ``n`` drafts, against plain decoding."""

    n: int
    tau: float  # tokens a round in these very runs
    v: float  # time to verify n + 1 tokens / time of one plain step
    d: float  # draft time a round / time of one plain step
    c: float  # d / n
    predicted_speedup: float  # tau / (v + d)
    speedup_decode: float
    speedup_decode_interval: Interval
    speedup_end_to_end: float
    speedup_end_to_end_interval: Interval
    tokens_per_second_decode: float
    tokens_per_second_end_to_end: float


@dataclass(frozen=True)
class Baselines:
    """What the speed-ups are relative to."""

    prompts: int  # timed, each with every method
    tokens: int  # emitted by the plain runs
    plain_step_seconds: float
    plain_tokens_per_second_decode: float
    plain_tokens_per_second_end_to_end: float
    generate_tokens_per_second: float  # the library's generate, prefill included


@dataclass(frozen=True)
class SpeedReport:
    baselines: Baselines
    best_n: int  # the n with the highest speedup_decode
    speedup_vs_generate: float  # at best_n, prefill included on both sides
    speedup_vs_generate_interval: Interval
    by_n: dict[int, SpeedAtN]

    @property
    def best(self) -> SpeedAtN:
        return self.by_n[self.best_n]


Method = Callable[[list[int]], Timing]


def measure_speed(
    verifier: Verifier,
    draft: Eagle3Draft,
    prompts: list[list[int]],
    settings: DecodeSettings,
    chain_lengths: list[int],
    resamples: int,
) -> SpeedReport:
    """Time every method on every prompt (token ids). Raises ConfigError when no answer is timed."""
    short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
    for method in methods(verifier, draft, short, chain_lengths).values():
        method(prompts[0])
    timings = interleave(methods(verifier, draft, settings, chain_lengths), prompts)
    return summarise(timings, resamples, settings.seed)


def methods(
    verifier: Verifier, draft: Eagle3Draft, settings: DecodeSettings, chain_lengths: list[int]
) -> dict[str, Method]:
    """Name -> a function from prompt ids to a timing; chain lengths are named by their digits."""

    def speculative(n: int) -> Method:
        at_n = replace(settings, n_draft=n, measure_overlap=False)
        return lambda ids: timing_of(decode_speculative(verifier, draft, ids, at_n))

    return {
        PLAIN: lambda ids: timing_of(decode_plain(verifier, ids, settings)),
        **{str(n): speculative(n) for n in chain_lengths},
        LIBRARY: lambda ids: run_library(verifier, ids, settings),
    }


def interleave(methods: dict[str, Method], prompts: list[list[int]]) -> dict[str, list[Timing]]:
    """Run each prompt through all methods, each time beginning one method later."""
    names = list(methods)
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    runs = [
        (names[(start + i) % len(names)], ids)
        for start, ids in enumerate(prompts)
        for i in range(len(names))
    ]
    for name, ids in progress(runs, len(runs), "speed", "run"):
        timings[name].append(methods[name](ids))
    return timings


def timing_of(generation: Generation) -> Timing:
    return Timing(
        tokens=len(generation.tokens),
        prefill_seconds=generation.prefill_seconds,
        decode_seconds=generation.decode_seconds,
        draft_seconds=generation.draft_seconds,
        verify_seconds=generation.verify_seconds,
        rounds=len(generation.rounds),
        accepted=sum(one.accepted for one in generation.rounds),
    )


def run_library(verifier: Verifier, ids: list[int], settings: DecodeSettings) -> Timing:
    """The library's own ``generate`` with its cache, under the same limits and sampling."""
    prompt = torch.tensor([ids], device=verifier.device)
    ends = settings.eos_ids or None
    start = now(verifier.device)
    generate: Any = verifier.model.generate  # a mixin's method, which the library types loosely
    output = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=settings.max_new_tokens,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=ends[0] if ends else 0,
        **library_sampling(settings.sampling),
    )
    return Timing(output.shape[1] - len(ids), 0.0, now(verifier.device) - start)


def library_sampling(sampling: Sampling) -> dict[str, float | bool]:
    """Spelled out, so that a model's own generation defaults do not enter the comparison."""
    neutral: dict[str, float | bool] = {"repetition_penalty": 1.0, "num_beams": 1}
    if sampling.greedy:
        return {**neutral, "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    return {
        **neutral,
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": 0,  # off
        "top_p": sampling.top_p,
    }


# ---- arithmetic: timings in, figures out -------------------------------------------------------


def summarise(timings: dict[str, list[Timing]], resamples: int, seed: int) -> SpeedReport:
    """Pool tokens and seconds over the prompts whose answers go beyond the first token.

    Raises ConfigError when there is none: nothing was decoded that could be timed.
    """
    timings = decoded_ones(timings)
    plain, library = timings[PLAIN], timings[LIBRARY]
    lengths = [int(name) for name in timings if name not in (PLAIN, LIBRARY)]
    step_seconds = 1 / rate(decode_only(plain))
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(plain), (resamples, len(plain)), generator=generator)
    by_n = {n: at_n(n, timings[str(n)], plain, step_seconds, picks) for n in lengths}
    best_n = max(by_n, key=lambda n: by_n[n].speedup_decode)
    versus = ratio(end_to_end(timings[str(best_n)]), end_to_end(library), picks)
    return SpeedReport(
        baselines=Baselines(
            prompts=len(plain),
            tokens=sum(one.tokens for one in plain),
            plain_step_seconds=step_seconds,
            plain_tokens_per_second_decode=1 / step_seconds,
            plain_tokens_per_second_end_to_end=rate(end_to_end(plain)),
            generate_tokens_per_second=rate(end_to_end(library)),
        ),
        best_n=best_n,
        speedup_vs_generate=versus.value,
        speedup_vs_generate_interval=versus.interval,
        by_n=by_n,
    )


def decoded_ones(timings: dict[str, list[Timing]]) -> dict[str, list[Timing]]:
    """Drop prompts that some method answered with one token, which is prefill's, or no round."""
    ours = {name: runs for name, runs in timings.items() if name != LIBRARY}
    count = len(timings[PLAIN])
    kept = [
        i
        for i in range(count)
        if all(
            runs[i].tokens > 1 and (name == PLAIN or runs[i].rounds) for name, runs in ours.items()
        )
    ]
    if not kept:
        raise ConfigError(
            f"eval.speed_prompts: all {count} answers end with their first token, so no round can "
            "be timed; give other eval.prompts or a larger eval.max_new_tokens"
        )
    return {name: [runs[i] for i in kept] for name, runs in timings.items()}


def at_n(
    n: int, runs: list[Timing], plain: list[Timing], step_seconds: float, picks: torch.Tensor
) -> SpeedAtN:
    rounds = sum(one.rounds for one in runs)
    tau = 1 + sum(one.accepted for one in runs) / rounds
    v = sum(one.verify_seconds for one in runs) / rounds / step_seconds
    d = sum(one.draft_seconds for one in runs) / rounds / step_seconds
    decode = ratio(decode_only(runs), decode_only(plain), picks)
    both = ratio(end_to_end(runs), end_to_end(plain), picks)
    return SpeedAtN(
        n=n,
        tau=tau,
        v=v,
        d=d,
        c=d / n,
        predicted_speedup=tau / (v + d),
        speedup_decode=decode.value,
        speedup_decode_interval=decode.interval,
        speedup_end_to_end=both.value,
        speedup_end_to_end_interval=both.interval,
        tokens_per_second_decode=rate(decode_only(runs)),
        tokens_per_second_end_to_end=rate(end_to_end(runs)),
    )


@dataclass(frozen=True)
class Ratio:
    value: float
    interval: Interval  # 95 %, bootstrap over prompts


def decode_only(runs: list[Timing]) -> torch.Tensor:
    """[prompts, 2]: tokens after the first, and the seconds they took."""
    return torch.tensor([[r.tokens - 1, r.decode_seconds] for r in runs], dtype=torch.float64)


def end_to_end(runs: list[Timing]) -> torch.Tensor:
    """[prompts, 2]: all tokens, and the seconds with prefill."""
    return torch.tensor([[r.tokens, r.seconds] for r in runs], dtype=torch.float64)


def rate(pairs: torch.Tensor) -> float:
    tokens, seconds = pairs.sum(0).tolist()
    return tokens / seconds


def ratio(new: torch.Tensor, old: torch.Tensor, picks: torch.Tensor) -> Ratio:
    """Tokens/s of ``new`` over tokens/s of ``old``; prompts are redrawn in pairs."""

    def of(pairs: torch.Tensor) -> torch.Tensor:
        sums = pairs[picks].sum(1)  # [resamples, 2]
        return sums[:, 0] / sums[:, 1]

    spread = of(new) / of(old)
    low, high = spread.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(rate(new) / rate(old), Interval(low, high))
