"""The evaluation stage: exact runs for acceptance and losslessness, timed runs for speed, a report.

python -m eval.main run.name=demo [eval.max_prompts=null]
"""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from conf.compose import entry
from conf.runtime import (
    RankInfo,
    cache_dir,
    provenance,
    run_dir,
    say,
    write_atomically,
)
from conf.schema import ConfigError, Precision, RunConfig, Stage
from conf.settings import refuse_other_settings
from data.distributed import pick_device, use_threads
from data.eval_prompts import EvalPrompt, read_prompts, take
from data.origin import data_facts
from data.prepare import find_prepared
from data.records import PreparedData, Skipped
from data.split import prompt_digest
from eval.acceptance import NgramTable
from eval.decode import DecodeSettings
from eval.measure import ExactRuns, run_exact, training_answers
from eval.page import render_page, terminal_lines
from eval.plots import Curve, draw_acceptance, draw_speed, draw_training
from eval.report import DataOrigin, EvalReport, EvalSettings, to_json
from eval.speed import SpeedReport, measure_speed
from eval.summary import build_report, read_held_out_tau
from eval.verify import AcceptRule
from models.draft_file import load_draft
from models.generate import end_ids
from models.sampling import Sampling
from models.token_strings import refuse_other_tokens
from models.verifier import Verifier, load_facts

NGRAM_ORDER = 4
UNSEEN_SHARE = 4  # with max_prompts, one unseen pattern for so many seen ones: minutes count


@dataclass(frozen=True)
class ChosenPrompts:
    top: list[EvalPrompt]  # the report's top level
    unseen: list[EvalPrompt]  # an entry of their own
    skipped: Skipped


def evaluate(cfg: RunConfig, draft_folder: Path) -> EvalReport:
    """Measure the head in ``draft_folder`` and write the report into the run's eval/ folder.

    Raises ConfigError when prompts, prepared data, verifier or head cannot be had.
    """
    chosen = choose_prompts(cfg)
    data = find_prepared(cfg)
    answers = training_answers(data.samples)
    table = NgramTable(NGRAM_ORDER).fit(answers)
    device = pick_device(cfg.run.device, RankInfo.from_env().local_rank)

    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, torch.float32)
    draft = load_draft(draft_folder, device, torch.float32, verifier.embedding)
    refuse_other_tokens(draft_folder, verifier.tokenizer)
    settings = decode_settings(cfg, verifier)
    say(f"eval: {len(chosen.top)} prompts, {len(chosen.unseen)} of unseen patterns, float32")
    exact = run_exact(
        verifier, draft, [*chosen.top, *chosen.unseen], settings, cfg.data.template_kwargs
    )
    if not exact.top:
        why = ", ".join(f"{reason} ({count})" for reason, count in exact.skipped.items())
        raise ConfigError(
            f"eval.prompts={cfg.eval.prompts}: no prompt could be answered: {why}; give others"
        )
    del verifier, draft  # the timed runs load their own precision
    gc.collect()  # hooks refer back to the verifier
    if device.type == "cuda":
        torch.cuda.empty_cache()

    speed = time_runs(cfg, draft_folder, exact, device)
    described = describe_settings(cfg, draft_folder, settings, device, speed.best_n)
    origin = describe_data(cfg, chosen, data, exact, draft_folder)
    report = build_report(exact, speed, table, described, origin, provenance())
    write_report(report, run_dir(cfg))
    return report


def choose_prompts(cfg: RunConfig) -> ChosenPrompts:
    """``eval.max_prompts`` prompts and a quarter as many of unseen patterns; null: all of both."""
    found = read_prompts(cfg.eval.prompts)
    count = cfg.eval.max_prompts
    top = take([prompt for prompt in found.prompts if prompt.seen is not False], count)
    rest = [prompt for prompt in found.prompts if prompt.seen is False]
    if not top:
        raise ConfigError(
            f"eval.prompts={cfg.eval.prompts}: every prompt is marked unseen_pattern and the "
            "report's top level would be empty; mark some seen_pattern, or drop the split"
        )
    unseen = take(rest, None if count is None else -(-count // UNSEEN_SHARE))
    return ChosenPrompts(top, unseen, found.skipped)


def decode_settings(cfg: RunConfig, verifier: Verifier) -> DecodeSettings:
    rule = AcceptRule.greedy if cfg.eval.temperature == 0 else AcceptRule.rejection
    return DecodeSettings(
        n_draft=cfg.eval.n_draft,
        max_new_tokens=cfg.eval.max_new_tokens,
        eos_ids=end_ids(verifier),
        sampling=Sampling(cfg.eval.temperature),
        rule=rule,
        seed=cfg.run.seed,
    )


def time_runs(
    cfg: RunConfig, draft_folder: Path, exact: ExactRuns, device: torch.device
) -> SpeedReport:
    """Time the first ``eval.speed_prompts`` conversations of the top level, every turn of them."""
    timed = exact.top[: cfg.eval.speed_prompts]
    prompts = [answer.prompt_ids for one in timed for answer in one.answers]
    dtype = getattr(torch, cfg.eval.speed_dtype.value)
    say(f"eval: {len(prompts)} answers timed, {cfg.eval.speed_dtype.value}")
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
    draft = load_draft(draft_folder, device, dtype, verifier.embedding)
    settings = decode_settings(cfg, verifier)
    lengths = sorted(set(cfg.eval.n_sweep))
    return measure_speed(verifier, draft, prompts, settings, lengths, cfg.eval.bootstrap)


def describe_settings(
    cfg: RunConfig,
    draft_folder: Path,
    settings: DecodeSettings,
    device: torch.device,
    best_n: int,
) -> EvalSettings:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return EvalSettings(
        eval=cfg.eval,
        run=cfg.run.name,
        verifier=cfg.verifier.path,
        draft=str(draft_folder),
        aux_layers=load_facts(cfg.verifier, cache_dir(cfg)).aux_layers,
        accept_rule=settings.rule.value,
        counters_dtype=Precision.float32.value,
        device=name,
        threads=torch.get_num_threads(),
        attention=cfg.verifier.attention.value,
        best_n=best_n,
    )


def describe_data(
    cfg: RunConfig,
    chosen: ChosenPrompts,
    data: PreparedData,
    exact: ExactRuns,
    draft_folder: Path,
) -> DataOrigin:
    facts = data_facts(cfg, data)
    held_out = int(data.samples.held_out.sum())
    return DataOrigin(
        prompt_files=list(cfg.eval.prompts),
        prompts_read=chosen.skipped.rows_out,
        prompts_skipped=chosen.skipped.reasons,
        same_pattern_prompts=sum(prompt.seen is True for prompt in chosen.top),
        unseen_pattern_prompts=len(chosen.unseen),
        training_files=list(cfg.data.path),
        training_samples=len(data.samples) - held_out,
        held_out_samples=held_out,
        longest_training_sample=int(data.samples.lengths.max()),
        held_out_tau=read_held_out_tau(draft_folder),
        supervised_tokens=facts.tokens,
        verifier_agreement=facts.agreement,
        trained_prompts=count_trained_prompts(exact, data),
    )


def count_trained_prompts(exact: ExactRuns, data: PreparedData) -> int:
    """Measured turns whose prompt, token by token, begins a training sample."""
    trained = data.samples.prompts[~data.samples.held_out]
    asked = [prompt_digest(answer.prompt_ids) for one in exact.runs for answer in one.answers]
    return int(torch.isin(torch.tensor(asked, dtype=torch.int64), trained).sum())


def write_report(report: EvalReport, run: Path) -> None:
    """report.json, report.md and the plots below ``run``/eval, then the table on the screen."""
    folder = run / "eval"
    spread = report.intervals
    draw_acceptance(
        folder / "acceptance.png",
        Curve("of the rounds that reached it (α)", report.alpha_by_depth, spread.alpha_by_depth),
        Curve("of all rounds (survival)", report.survival_by_depth, spread.survival_by_depth),
    )
    lengths, at = list(report.by_n), list(report.by_n.values())
    measured = Curve(
        "measured",
        [one.speedup_decode for one in at],
        [o.speedup_decode_interval for o in at],
        lengths,
    )
    predicted = Curve("predicted, τ / (v + d)", [o.predicted_speedup for o in at], None, lengths)
    draw_speed(folder / "speed.png", measured, predicted, report.settings.best_n)
    plots = ["acceptance.png", "speed.png"]
    metrics = run / "metrics.jsonl"
    if metrics.is_file() and draw_training(folder / "training.png", metrics):
        plots.append("training.png")
    write_atomically(folder / "report.md", render_page(report, plots))
    write_atomically(folder / "report.json", to_json(report))  # last: where it is, all is there
    say()
    for line in terminal_lines(report):
        say(line)
    say(f"\n{folder / 'report.md'}")


def main(cfg: RunConfig) -> None:
    """Evaluate the run's best head. Raises ConfigError when the run has other settings."""
    if not run_dir(cfg).is_dir():
        raise ConfigError(
            f"run.name={cfg.run.name}: no such run in {cfg.run.root}; train it with train/main.py"
        )
    refuse_other_settings(cfg)
    use_threads(cfg.engine.threads)
    evaluate(cfg, run_dir(cfg) / "best")


if __name__ == "__main__":
    entry(main, running=(Stage.prepare, Stage.eval))
