"""The evaluation stage: exact runs for acceptance and losslessness, timed runs for speed, a report.

python -m eval.main run.name=demo [eval.max_prompts=null]
python -m eval.main run.name=theirs eval.head=FOLDER [data.path=... eval.prompts=...]
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from conf.compose import entry
from conf.runtime import RankInfo, cache_dir, provenance, run_dir, say
from conf.schema import ConfigError, EvalSection, RunConfig, Stage
from conf.settings import refuse_other_settings
from conf.shapes import Shape, chain, parse_shape
from data.distributed import pick_device, use_threads
from data.prepare import find_prepared
from eval.chosen import ChosenPrompts, choose_prompts
from eval.decode import DecodeSettings
from eval.described import describe_data, describe_settings
from eval.drafters.choose import refuse_shapes
from eval.head_check import is_eagle3
from eval.library import load_assistant
from eval.measure import Asking, ExactRuns, run_exact, training_answers
from eval.ngram import floor_config
from eval.output import StopStrings
from eval.pages.publish import publish
from eval.report import EvalReport
from eval.round_plan import rule_of
from eval.speed import SpeedPlan, measure_speed
from eval.speed_report import SpeedFigures
from eval.summary import Measured, build_report
from eval.temperatures import TemperatureRuns, run_at_temperatures
from eval.timed import Question
from models.draft_file import CONFIG
from models.drafts import Draft
from models.generate import end_ids
from models.heads import load_head
from models.phrases import PhraseTable
from models.sampling import Sampling
from models.steps import refuse
from models.token_strings import refuse_other_tokens
from models.verifier import Verifier, load_facts


@dataclass(frozen=True)
class Counted:
    """What the float32 runs gave."""

    settings: DecodeSettings
    exact: ExactRuns
    at_temperatures: list[TemperatureRuns]


def evaluate(cfg: RunConfig, draft_folder: Path) -> EvalReport:
    """Measure the head in ``draft_folder`` and write the report into the run's eval/ folder.

    Raises ConfigError when prompts, prepared data, verifier, head or assistant cannot be had.
    """
    chosen, plan = choose_prompts(cfg), speed_plan(cfg.eval)
    data = find_prepared(cfg)
    config = floor_config(load_facts(cfg.verifier, cache_dir(cfg)).vocab_size)
    table = PhraseTable.counted(config, training_answers(data.samples))
    device = pick_device(cfg.run.device, RankInfo.from_env().local_rank)
    refuse(cfg.eval.step, device)
    counted = count_runs(cfg, draft_folder, chosen, device)
    gc.collect()  # hooks refer back to the verifier; the timed runs load their own precision
    if device.type == "cuda":
        torch.cuda.empty_cache()
    speed = time_runs(cfg, draft_folder, counted.exact, plan, device)
    measured = Measured(counted.exact, speed, table, counted.at_temperatures)
    described = describe_settings(cfg, draft_folder, counted.settings, device, speed)
    origin = describe_data(cfg, chosen, data, counted.exact, draft_folder)
    report = build_report(measured, described, origin, provenance())
    publish(report, run_dir(cfg))
    if is_eagle3(draft_folder):
        say("\nnext, advice on N, tree, batch and the server's settings: python -m eval.tune")
    return report


def count_runs(
    cfg: RunConfig, draft_folder: Path, chosen: ChosenPrompts, device: torch.device
) -> Counted:
    """Every prompt in float32, and those of the top level at each of ``eval.temperatures``."""
    verifier, draft = load_pair(cfg, draft_folder, device, torch.float32)
    refuse_shapes(draft, [chain(cfg.eval.n_draft), *speed_plan(cfg.eval).shapes], device)
    refuse_other_tokens(draft_folder, verifier.tokenizer)
    if cfg.eval.assistant is not None:  # refused before the long part, loaded again to be timed
        load_assistant(cfg.eval.assistant, cfg.verifier, cache_dir(cfg), verifier)
    settings = decode_settings(cfg, verifier)
    say(f"eval: {len(chosen.top)} prompts, {len(chosen.unseen)} of unseen patterns, float32")
    asking = Asking(cfg.data.template_kwargs, cfg.eval.batch)
    exact = run_exact(verifier, draft, [*chosen.top, *chosen.unseen], settings, asking)
    if not exact.top:
        why = ", ".join(f"{reason} ({count})" for reason, count in exact.skipped.items())
        raise ConfigError(
            f"eval.prompts={cfg.eval.prompts}: no prompt could be answered: {why}; give others"
        )
    drawn = run_at_temperatures(verifier, draft, exact.top, settings, cfg.eval)
    return Counted(settings, exact, drawn)


def load_pair(
    cfg: RunConfig, draft_folder: Path, device: torch.device, dtype: torch.dtype
) -> tuple[Verifier, Draft]:
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
    return verifier, load_head(draft_folder, verifier.facts, verifier.ends)


def decode_settings(cfg: RunConfig, verifier: Verifier) -> DecodeSettings:
    """Of the counted runs: chains of ``eval.n_draft``."""
    section, shape = cfg.eval, chain(cfg.eval.n_draft)
    sampling = sampling_of(section)
    return DecodeSettings(
        max_new_tokens=section.max_new_tokens,
        eos_ids=end_ids(verifier),
        shape=shape,
        stop=StopStrings(tuple(section.stop), verifier.tokenizer) if section.stop else None,
        sampling=sampling,
        rule=rule_of(section.rule, shape, sampling),
        seed=cfg.run.seed,
    )


def sampling_of(section: EvalSection) -> Sampling:
    return Sampling(section.temperature, section.top_k, section.top_p, section.min_p)


def speed_plan(section: EvalSection) -> SpeedPlan:
    """Raises ConfigError for a shape that is none, or that ``eval.rule`` does not suit."""
    shapes = timed_shapes(section.n_sweep, section.trees)
    for shape in shapes:
        rule_of(section.rule, shape, sampling_of(section))
    return SpeedPlan(
        shapes=shapes,
        batch_sizes=section.batch_sizes,
        repeats=section.repeats,
        resamples=section.bootstrap,
        choice=section.rule,
        step=section.step,
    )


def time_runs(
    cfg: RunConfig, draft_folder: Path, exact: ExactRuns, plan: SpeedPlan, device: torch.device
) -> SpeedFigures:
    """Time the first ``eval.speed_prompts`` conversations of the top level, every turn of them."""
    questions = questions_of(exact, cfg.eval.speed_prompts)
    dtype = getattr(torch, cfg.eval.speed_dtype.value)
    say(f"eval: {len(questions)} answers timed, {cfg.eval.speed_dtype.value}")
    verifier, draft = load_pair(cfg, draft_folder, device, dtype)
    if cfg.eval.assistant is not None:
        small = load_assistant(cfg.eval.assistant, cfg.verifier, cache_dir(cfg), verifier)
        plan = replace(plan, assistant=small)
    return measure_speed(verifier, draft, questions, decode_settings(cfg, verifier), plan)


def questions_of(exact: ExactRuns, conversations: int) -> list[Question]:
    """Every turn of the first conversations; the first is named as the conversation."""
    return [
        Question(one.prompt.id if turn == 1 else f"{one.prompt.id}#{turn}", answer.prompt_ids)
        for one in exact.top[:conversations]
        for turn, answer in enumerate(one.answers, 1)
    ]


def timed_shapes(lengths: Sequence[int], trees: Sequence[str]) -> list[Shape]:
    """Chains by length, then trees as they are named; each once, a tree that is a chain as that."""
    found: list[Shape] = [chain(length) for length in sorted(set(lengths))]
    for name in trees:
        shape = parse_shape(name, "eval.trees")
        found.append(chain(shape.depth) if shape.is_chain else shape)
    return list({one.name: one for one in found}.values())


def head_to_measure(cfg: RunConfig) -> Path:
    """The run's best, or the folder in eval.head; a run with a head has its report about that."""
    own = run_dir(cfg) / "best"
    if cfg.eval.head is None:
        return own
    if (own / CONFIG).is_file():
        raise ConfigError(
            f"eval.head={cfg.eval.head}: run.name={cfg.run.name} has a head of its own, whose "
            "report this would replace; give another run.name"
        )
    return Path(cfg.eval.head)


def main(cfg: RunConfig) -> None:
    """Evaluate the run's best head, or the one in eval.head, whose report is all its run holds.

    Raises ConfigError when the run has other settings, or a head of its own beside eval.head.
    """
    if cfg.eval.head is None and not run_dir(cfg).is_dir():
        raise ConfigError(
            f"run.name={cfg.run.name}: no such run in {cfg.run.root}; train it with train/main.py"
        )
    refuse_other_settings(cfg)
    use_threads(cfg.engine.threads)
    evaluate(cfg, head_to_measure(cfg))


if __name__ == "__main__":
    entry(main, running=(Stage.prepare, Stage.eval))
