"""What is measured of speed, as records: costs of single steps, and whole answers timed.

Every ratio is to one plain step of our own loop at the same batch size and precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.acceptance import Interval

PLAIN = "plain"  # methods that are no shape: our loop without a draft, and the library's two
LIBRARY = "generate"
ASSISTED = "assistant_model"


@dataclass(frozen=True)
class CostTable:
    """Single steps, timed on their own in turn: what predictions for other shapes are made of."""

    batch: int
    context: int  # tokens in the cache
    plain_step_seconds: float
    verify: dict[int, float]  # tokens fed to the verifier, root included -> v_n; 1 -> 1.0
    draft_first: float  # the draft's first forward of a round, with its logits
    draft_next: dict[int, float]  # nodes of a later level fed to the draft -> its time
    rest: float  # of a round: judging, bookkeeping, caches

    def round_cost(self, nodes: int, levels: Sequence[int]) -> float:
        """Plain steps that a round costs: ``nodes`` guesses, ``levels`` the sizes of the levels
        the draft is fed, which are all but the last. Between measured sizes it is interpolated.
        """
        return self.drafting(levels) + interpolate(self.verify, nodes + 1) + self.rest

    def drafting(self, levels: Sequence[int]) -> float:
        """The draft's part of it."""
        return self.draft_first + sum(interpolate(self.draft_next, n) for n in levels)


def interpolate(points: dict[int, float], at: int) -> float:
    """On the line through the measured neighbours of ``at``; beyond the ends, through the last two.

    Raises ValueError without a point.
    """
    known = sorted(points)
    if not known:
        raise ValueError("interpolate: nothing was measured")
    if len(known) == 1 or at in points:
        return points.get(at, points[known[0]])
    right = next((i for i, size in enumerate(known) if size > at), len(known) - 1)
    right = max(right, 1)
    low, high = known[right - 1], known[right]
    slope = (points[high] - points[low]) / (high - low)
    return max(0.0, points[low] + slope * (at - low))


@dataclass(frozen=True)
class Latency:
    """Seconds from a request's start to its last token, prefill included, over requests."""

    p50: float
    p95: float


@dataclass(frozen=True)
class TimeSplit:
    """Shares of the time after prefill; they sum to 1."""

    draft: float
    verify: float  # the verifier's forward and the judging
    rest: float


@dataclass(frozen=True)
class ShapeSpeed:
    """Speculative decoding with one shape of guesses, against plain decoding."""

    shape: str  # its name, see conf/shapes.py
    n: int  # levels of guesses
    nodes: int  # guesses a round
    tau: float  # tokens a round in these very runs
    v: float  # time to verify nodes + 1 tokens / time of one plain step
    d: float  # draft time a round / time of one plain step
    c: float  # d / n
    predicted_speedup: float  # tau / (v + d)
    measured_over_predicted: float  # speedup_decode / predicted_speedup: the loop's own overhead
    speedup_decode: float
    speedup_decode_interval: Interval
    speedup_end_to_end: float
    speedup_end_to_end_interval: Interval
    tokens_per_second_decode: float
    tokens_per_second_end_to_end: float
    latency: Latency
    split: TimeSplit

    @property
    def is_chain(self) -> bool:
        return self.n == self.nodes

    @property
    def label(self) -> str:
        return f"N = {self.n}" if self.is_chain else self.shape


@dataclass(frozen=True)
class LibrarySpeed:
    """One of the library's own ways to generate, prefill included on both sides."""

    tokens_per_second: float
    speedup: float  # of our best shape over it
    speedup_interval: Interval


@dataclass(frozen=True)
class Baselines:
    """What the speed-ups are relative to: our own loop without a draft."""

    prompts: int  # timed, each with every method
    tokens: int  # emitted by the plain runs
    plain_step_seconds: float  # in which every sequence of a full batch gets a token
    plain_tokens_per_second_decode: float
    plain_tokens_per_second_end_to_end: float
    prefill_seconds: float  # a prompt, the verifier alone
    latency: Latency
    step: str  # how a verifier step runs: eager, compiled, graphed


@dataclass(frozen=True)
class SpeedAtBatch:
    batch: int
    baselines: Baselines
    shapes: dict[str, ShapeSpeed]  # by the name of the shape
    best: str  # the shape with the highest speedup_decode
    library: dict[str, LibrarySpeed]  # generate; assistant_model at batch 1, if one is given


@dataclass(frozen=True)
class Timing:
    """One method on one batch of prompts, the median of its repeats: what speeds are made of."""

    batch: int
    method: str  # plain, generate, assistant_model, or the name of a shape
    prompts: list[str]  # ids of the prompts side by side; a later turn is ID#2, ID#3, ...
    digest: str  # of all their tokens
    tokens: int  # emitted, the first ones (from prefill) included, nothing beyond an end
    first_tokens: int  # of those, how many prefill gave: one a prompt
    prefill_seconds: float  # both models; 0 for the library, which does not tell
    decode_seconds: float
    draft_seconds: float = 0.0  # part of decode_seconds
    verify_seconds: float = 0.0  # part of decode_seconds
    rounds: int = 0
    accepted: int = 0  # guesses that stood, in all rounds, before any cut at the end


@dataclass(frozen=True)
class SpeedFigures:
    """All that was timed."""

    by_batch: dict[int, SpeedAtBatch]  # by batch size
    costs: list[CostTable]  # one a batch size
    timings: list[Timing]  # of the prompts that every method answered with a round
