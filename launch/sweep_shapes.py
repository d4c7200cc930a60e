"""What the report of one point says of each shape of guesses: rows that families share a table by.

A family is its weights and its shape: EAGLE-1's weights with the dynamic tree are EAGLE-2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conf.choices import Phrases
from conf.shapes import DynamicShape, parse_shape
from eval.acceptance import Interval, percentile_interval
from eval.report import EvalReport
from eval.speed_report import ShapeSpeed, Timing
from models.draft_file import read_config
from models.drafts import AnyConfig
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.medusa import MedusaConfig
from models.phrases import PhraseConfig
from models.small_model import ModelConfig

SEED = 0  # of the bootstrap
OF_PHRASES = {
    Phrases.context: "prompt lookup",
    Phrases.table: "n-gram table",
    Phrases.both: "n-gram table + prompt lookup",
}


@dataclass(frozen=True)
class ShapeFigures:
    """One draft with one shape. ``tau`` and what stands with it is of chains of eval.n_draft alone:
    counted in float32 over all prompts; the rest is of the prompts timed. Not measured: NaN."""

    draft: str  # as people call it
    shape: str
    tau: float
    tau_interval: Interval
    alpha_by_depth: list[float]
    alpha_intervals: list[Interval]
    checked: int  # prompts whose answers were compared with plain greedy decoding
    identical: int
    timed_tau: float
    timed_tau_interval: Interval
    v: float
    c: float
    speedup: float  # after prefill
    speedup_interval: Interval


def figures_of(report: EvalReport, head: Path) -> list[ShapeFigures]:
    """The chain that was counted, the fastest chain where that is another one, and every tree.

    ``head``: the folder of the draft. Raises ConfigError when it holds none.
    """
    config = read_config(head)
    counted, fastest = report.settings.eval.n_draft, report.settings.best_n
    lengths = [counted] if fastest == counted else [counted, fastest]
    chains = [report.by_n[n] for n in lengths if n in report.by_n]
    return [row_of(report, config, speed) for speed in [*chains, *report.by_tree.values()]]


def row_of(report: EvalReport, config: AnyConfig, speed: ShapeSpeed) -> ShapeFigures:
    counted = speed.is_chain and speed.n == report.settings.eval.n_draft
    none, spread = Interval(math.nan, math.nan), report.intervals
    timings = [one for one in report.timings if one.method == speed.shape]
    return ShapeFigures(
        draft=name_of(config, speed),
        shape=speed.label,
        tau=report.tau if counted else math.nan,
        tau_interval=spread.tau if counted else none,
        alpha_by_depth=report.alpha_by_depth if counted else [],
        alpha_intervals=spread.alpha_by_depth if counted else [],
        checked=report.lossless.checked if counted else 0,
        identical=report.lossless.identical if counted else 0,
        timed_tau=speed.tau,
        timed_tau_interval=tau_interval(timings, report.settings.eval.bootstrap),
        v=speed.v,
        c=speed.c,
        speedup=speed.speedup_decode,
        speedup_interval=speed.speedup_decode_interval,
    )


def name_of(config: AnyConfig, speed: ShapeSpeed) -> str:
    match config:
        case DraftConfig():
            return "EAGLE-3"
        case Eagle1Config():
            dynamic = isinstance(parse_shape(speed.shape, "shape"), DynamicShape)
            return "EAGLE-2" if dynamic else "EAGLE-1"
        case MedusaConfig():
            return "Medusa"
        case ModelConfig():
            return "small model"
        case PhraseConfig():
            return OF_PHRASES[Phrases(config.source)]


def tau_interval(timings: Sequence[Timing], resamples: int) -> Interval:
    """Of tokens a round, over groups of prompts; the smallest batch, as the report's top level."""
    smallest = min((one.batch for one in timings), default=0)
    of = [one for one in timings if one.batch == smallest]
    if not of:
        return Interval(math.nan, math.nan)
    rounds = np.array([one.rounds for one in of])
    tokens = rounds + np.array([one.accepted for one in of])
    draws = np.random.default_rng(SEED).integers(len(of), size=(resamples, len(of)))
    return percentile_interval(tokens[draws].sum(1), rounds[draws].sum(1))
