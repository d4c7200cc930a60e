"""The evaluation's figures: one dataclass whose fields are the keys of report.json."""

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from conf.runtime import plain
from conf.schema import EvalSection
from eval.acceptance import Counters, Interval, RankHits
from eval.speed_report import Baselines, CostTable, ShapeSpeed, SpeedAtBatch, Timing


@dataclass(frozen=True)
class Lossless:
    """Token identity with plain greedy decoding, in float32."""

    checked: int  # prompts; 0 when answers are sampled
    identical: int
    differing: list["Differing"]
    note: str


@dataclass(frozen=True)
class Differing:
    prompt: str  # its id
    position: int  # index of the first token that differs
    behind: float  # of the verifier's highest logit, the worse token; NaN, infinite: one had ended


@dataclass(frozen=True)
class Floor:
    """What an n-gram table of the training answers reaches on the same text."""

    order: int
    tau: float
    counters: Counters


@dataclass(frozen=True)
class GroupFigures:
    """Acceptance of the prompts of one task, or of the patterns never seen in training."""

    prompts: int
    tau: float
    tau_interval: Interval
    alpha: float
    alpha_interval: Interval
    alpha_by_depth: list[float]
    survival_by_depth: list[float]
    alpha_tv: float
    ngram_floor_tau: float
    lossless: Lossless
    counters: Counters


@dataclass(frozen=True)
class RangeFigures:
    """Rounds whose first draft stands at these positions; tokens before any cut."""

    positions: str
    tau: float
    alpha: float
    counters: Counters


@dataclass(frozen=True)
class BeyondTraining:
    """Acceptance at absolute positions that no training sample reached, and before them."""

    first: int  # position beyond the longest training sample
    within: Counters
    beyond: Counters


@dataclass(frozen=True)
class TrainingEstimate:
    """What training foretold, beside what was measured."""

    held_out_tau: float | None  # by the walk over held-out answers, when the head was chosen
    held_out_tau_if_independent: float | None  # from the held-out alpha, as below
    tau: float  # measured here
    tau_if_independent: float  # from the alpha measured here, on the same prompts as tau
    formula: str


@dataclass(frozen=True)
class TemperatureFigures:
    """Acceptance on the same prompts, answers drawn at this temperature."""

    temperature: float
    rule: str  # of acceptance
    tau: float
    alpha: float
    alpha_interval: Interval
    alpha_tv: float
    counters: Counters


@dataclass(frozen=True)
class PromptCounts:
    """One conversation's raw counters, all its turns together. Reports are compared by them."""

    id: str
    task: str
    digest: str  # of the text of its turns
    unseen: bool  # marked as an unseen pattern, so no part of the top level
    rounds: int
    drafted: int
    tested: int
    tokens: int
    accepted_by_depth: list[int]
    reached_by_depth: list[int]
    overlap_sum: float  # of sum of min(target, draft), over overlap_count tested positions
    overlap_count: int

    @property
    def counters(self) -> Counters:
        return Counters(
            rounds=self.rounds,
            drafted=self.drafted,
            tested=self.tested,
            accepted_by_depth=self.accepted_by_depth,
            reached_by_depth=self.reached_by_depth,
            tokens=self.tokens,
        )


@dataclass(frozen=True)
class Intervals:
    """95 %, percentile bootstrap over prompts."""

    tau: Interval
    alpha: Interval
    alpha_by_depth: list[Interval]
    survival_by_depth: list[Interval]
    speedup_decode: Interval
    speedup_end_to_end: Interval
    speedup_vs_generate: Interval


@dataclass(frozen=True)
class EvalSettings:
    eval: EvalSection
    run: str
    verifier: str
    draft: str
    aux_layers: list[int]
    accept_rule: str
    counters_dtype: str
    device: str
    threads: int
    attention: str  # of the library's layers, in all loops compared
    best_n: int  # the chain length of the top level's speed figures
    best_shape: str  # the fastest of all shapes timed at that batch size, chains and trees


@dataclass(frozen=True)
class DataOrigin:
    """Which prompts were measured, and what the head and the n-gram floor had seen."""

    prompt_files: list[str]
    prompts_read: int
    prompts_skipped: dict[str, int]  # by reason
    same_pattern_prompts: int  # measured; patterns of the training prompts, new content
    unseen_pattern_prompts: int  # measured; patterns the training prompts lack
    training_files: list[str]
    training_samples: int
    held_out_samples: int
    longest_training_sample: int  # tokens
    held_out_tau: float | None  # by the walk over held-out answers, when the head was chosen
    supervised_tokens: int | None = None  # labels of the training samples
    verifier_agreement: float | None = None  # share of supervised tokens it would choose itself
    held_out_alpha: float | None = None
    held_out_depth: int | None = None  # draft tokens a round there
    trained_prompts: int = 0  # measured turns whose prompt is a training sample's, too
    other_weights: str | None = None  # the verifier's, where they are not those captured


@dataclass(frozen=True)
class EvalReport:
    """Fields are the keys of report.json. Top level: prompts not marked as unseen patterns."""

    tau: float
    alpha: float
    alpha_by_depth: list[float]
    survival_by_depth: list[float]
    alpha_tv: float
    tau_if_independent: float  # (1 - alpha**(n+1)) / (1 - alpha): an estimate, beside the measured
    ngram_floor: Floor
    c: float
    speedup_decode: float
    speedup_end_to_end: float
    speedup_vs_generate: float
    predicted_speedup: float
    by_n: dict[int, ShapeSpeed]  # chains, at the smallest batch size timed, which is 1 by default
    by_tree: dict[str, ShapeSpeed]  # trees, at that batch size
    by_batch: dict[int, SpeedAtBatch]
    costs: list[CostTable]  # one a batch size
    baselines: Baselines  # at the smallest batch size
    lossless: Lossless
    counters: Counters
    intervals: Intervals
    tasks: dict[str, GroupFigures]
    position_ranges: list[RangeFigures]  # generated positions
    absolute_ranges: list[RangeFigures]  # positions with the prompt's tokens counted
    beyond_training: BeyondTraining | None  # None: no round went that far
    rank_hits: RankHits | None  # None: not recorded
    by_temperature: list[TemperatureFigures]
    training_estimate: TrainingEstimate
    prompts: int
    by_prompt: list[PromptCounts]
    timings: list[Timing]
    settings: EvalSettings
    data: DataOrigin
    provenance: dict[str, Any]
    warnings: list[str]


def to_json(report: EvalReport) -> str:
    """Intervals become [low, high]; what could not be measured (0 of 0) becomes null."""
    return json.dumps(jsonable(report), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def jsonable(value: Any) -> Any:
    if isinstance(value, Interval):
        return [jsonable(value.low), jsonable(value.high)]
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: jsonable(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return plain(value)
