"""Acceptance against temperature: the same questions, answered again with draws."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from conf.runtime import progress
from conf.schema import EvalSection
from eval.decode import DecodeSettings, decode
from eval.generation import Generation
from eval.measure import PromptRuns
from eval.round_plan import rule_of
from eval.verify import AcceptRule
from models.drafts import Draft
from models.sampling import Sampling
from models.verifier import Verifier


@dataclass(frozen=True)
class TemperatureRuns:
    """One temperature."""

    temperature: float
    rule: AcceptRule
    conversations: list[list[Generation]]  # an answer a turn


def run_at_temperatures(
    verifier: Verifier,
    draft: Draft,
    runs: Sequence[PromptRuns],
    settings: DecodeSettings,
    section: EvalSection,
) -> list[TemperatureRuns]:
    """Answer the questions of ``runs`` with the draft at each temperature, no filter on top.

    A later turn asks what it asked in ``runs``, after the answers given there: the texts differ by
    the temperature of the answer alone.
    """
    assert settings.shape is not None
    found: list[TemperatureRuns] = []
    for temperature in sorted(set(section.temperatures)):
        sampling = Sampling(temperature)
        rule = rule_of(section.rule, settings.shape, sampling)
        drawn = replace(settings, sampling=sampling, rule=rule, measure_overlap=True)
        found.append(
            TemperatureRuns(temperature, rule, answer(verifier, draft, runs, drawn, section.batch))
        )
    return found


def answer(
    verifier: Verifier,
    draft: Draft,
    runs: Sequence[PromptRuns],
    settings: DecodeSettings,
    batch: int,
) -> list[list[Generation]]:
    """An answer a turn of each conversation; every turn has its own random numbers."""
    asked = [one.prompt_ids for run in runs for one in run.answers]
    groups = [range(i, min(i + batch, len(asked))) for i in range(0, len(asked), batch)]
    stage = f"temperature {settings.sampling.temperature:g}"
    answers: list[Generation] = []
    for group in progress(groups, len(groups), stage, "batch"):
        seeds = [settings.seed + i for i in group]
        answers += decode(verifier, draft, [asked[i] for i in group], settings, seeds).generations
    turns = iter(answers)
    return [[next(turns) for _ in run.answers] for run in runs]
