"""With what a report was measured: settings, prompts, and what the head had seen in training."""

from pathlib import Path

import torch

from conf.runtime import cache_dir
from conf.schema import Precision, RunConfig
from data.origin import data_facts
from data.records import PreparedData
from data.split import prompt_digest
from eval.chosen import ChosenPrompts
from eval.decode import DecodeSettings
from eval.foretold import read_held_out
from eval.head_check import other_weights
from eval.measure import ExactRuns
from eval.report import DataOrigin, EvalSettings
from eval.speed_report import SpeedFigures
from eval.summary import best_chain, first_batch
from models.verifier import load_facts


def describe_settings(
    cfg: RunConfig,
    draft_folder: Path,
    settings: DecodeSettings,
    device: torch.device,
    speed: SpeedFigures,
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
        best_n=best_chain(speed),
        best_shape=first_batch(speed).best,
    )


def describe_data(
    cfg: RunConfig,
    chosen: ChosenPrompts,
    data: PreparedData,
    exact: ExactRuns,
    draft_folder: Path,
) -> DataOrigin:
    facts, foretold = data_facts(cfg, data), read_held_out(draft_folder)
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
        held_out_tau=foretold.tau,
        held_out_alpha=foretold.alpha,
        held_out_depth=foretold.depth,
        supervised_tokens=facts.tokens,
        verifier_agreement=facts.agreement,
        trained_prompts=count_trained_prompts(exact, data),
        other_weights=other_weights(cfg),
    )


def count_trained_prompts(exact: ExactRuns, data: PreparedData) -> int:
    """Measured turns whose prompt, token by token, begins a training sample."""
    trained = data.samples.prompts[~data.samples.held_out]
    asked = [prompt_digest(answer.prompt_ids) for one in exact.runs for answer in one.answers]
    return int(torch.isin(torch.tensor(asked, dtype=torch.int64), trained).sum())
