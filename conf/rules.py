"""What a configuration must satisfy; each rule names the knob, the value and the way out."""

import os
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from conf.draft_rules import decoder_layers, draft, linear_start
from conf.eagle1_rules import eagle1
from conf.eval_rules import TEMPERATURES, evaluation, evaluation_inputs, is_temperature
from conf.family_rules import families
from conf.medusa_rules import medusa
from conf.model_rules import model
from conf.recipe_rules import recipe
from conf.schema import FULL, AnswerBackend, ConfigError, RunConfig, Stage
from conf.stage_rules import (
    enough_packs,
    flash_for_capture_alone,
    heads,
    places,
    state_backends,
    stores,
)

FILLED_BY_ENGINE = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "bf16",
    "fp16",
    "steps_per_print",
    "zero_allow_untested_optimizer",
}


def validate(cfg: RunConfig, running: Sequence[Stage]) -> RunConfig:
    """Return ``cfg`` if every rule holds, else raise ConfigError with the first broken one.

    ``running``: the stages whose input files must be there.
    """
    for rules in (
        positive_numbers,
        shares,
        choices,
        data_and_vocabulary,
        draft,
        decoder_layers,
        combinations,
        recipe,
        families,
        eagle1,
        medusa,
        model,
        linear_start,
        answers,
        evaluation,
    ):
        for message in rules(cfg):
            raise ConfigError(message)
    for rules in (
        flash_for_capture_alone,
        enough_packs,
        places,
        heads,
        state_backends,
        stores,
        evaluation_inputs,
    ):
        for message in rules(cfg, running):
            raise ConfigError(message)
    return cfg


AT_LEAST_ONE = {  # knob: a value that works
    "ttt.depth": "7",
    "draft.intermediate_size": "null",
    "draft.max_positions": "null",
    "data.max_samples": "null",
    "data.workers": "null",
    "regenerate.max_new_tokens": "512",
    "regenerate.batch_size": "64",
    "regenerate.concurrency": "64",
    "regenerate.breaker": "5",
    "preview.samples": "200",
    "capture.batch_tokens": "4096",
    "capture.shard_mib": "1024",
    "capture.chunk_tokens": "65536",
    "capture.parts": "1",
    "optim.packs_per_step": "8",
    "optim.micro_batch_tokens": "8192",
    "optim.max_steps": "null",
    "engine.threads": "null",
    "plan.tokens": "1e9",
    "plan.gpus": "8",
    "plan.node_gpus": "8",
    "log.every": "10",
    "log.valid_every": "100",
    "log.save_every": "200",
    "log.keep": "2",
    "eval.max_prompts": "null",
    "eval.speed_prompts": "12",
    "eval.max_new_tokens": "64",
    "eval.n_draft": "4",
    "eval.valid_depth": "5",
    "eval.bootstrap": "2000",
    "eval.batch": "1",
    "eval.repeats": "1",
}
ABOVE_ZERO = {
    "engine.timeout_minutes": "60",
    "optim.lr": "1e-4",
    "optim.eps": "1e-8",
    "optim.clip": "0.5",
    "optim.epochs": "2",
    "optim.flops": "null",
    "regenerate.timeout": "600",
    "capture.tolerance": "null",
    "plan.tokens": "1e9",
    "plan.price": "null",
    "plan.read_gbs": "4",
    "plan.disk_tb": "null",
}


def value_of(cfg: RunConfig, knob: str) -> Any:
    return reduce(getattr, knob.split("."), cfg)


def positive_numbers(cfg: RunConfig) -> Iterator[str]:
    for knob, remedy in AT_LEAST_ONE.items():
        value = value_of(cfg, knob)
        if value is not None and value < 1:
            yield f"{knob}={value}: must be at least 1; try {knob}={remedy}"
    if cfg.data.max_length < 4:
        yield f"data.max_length={cfg.data.max_length}: must be at least 4; try data.max_length=2048"
    if cfg.plan.sample_tokens < 4:
        got = f"plan.sample_tokens={cfg.plan.sample_tokens}"
        yield f"{got}: must be at least 4; try plan.sample_tokens=1024"
    for knob, remedy in ABOVE_ZERO.items():
        value = value_of(cfg, knob)
        if value is not None and not 0 < value < float("inf"):
            yield f"{knob}={value}: must be a finite number above 0; try {knob}={remedy}"


def shares(cfg: RunConfig) -> Iterator[str]:
    bounds = {
        "ttt.decay": (cfg.ttt.decay, 1.0, 0.8),
        "data.valid_share": (cfg.data.valid_share, 0.5, 0.05),
        "regenerate.top_p": (cfg.regenerate.top_p, 1.0, 0.95),
        "plan.supervised_share": (cfg.plan.supervised_share, 1.0, 0.5),
        "plan.train_mfu": (cfg.plan.train_mfu, 1.0, 0.4),
        "plan.forward_mfu": (cfg.plan.forward_mfu, 1.0, 0.5),
    }
    for knob, (value, top, remedy) in bounds.items():
        if not 0 < value <= top:
            yield f"{knob}={value}: must be above 0 and at most {top}; try {knob}={remedy}"
    from_zero = {
        "optim.warmup_share": (cfg.optim.warmup_share, 0.04),
        "optim.min_lr_share": (cfg.optim.min_lr_share, 0.1),
        "capture.min_agreement": (cfg.capture.min_agreement, 0.15),
    }
    for knob, (value, remedy) in from_zero.items():
        if not 0 <= value < 1:
            yield f"{knob}={value}: must be at least 0 and below 1; try {knob}={remedy}"
    for knob, value in (
        ("eval.temperature", cfg.eval.temperature),
        ("regenerate.temperature", cfg.regenerate.temperature),
    ):
        if not is_temperature(value):
            yield f"{knob}={value}: must be a finite number, {TEMPERATURES}; try {knob}=0"
    if not 0 <= cfg.optim.weight_decay < float("inf"):
        got = f"optim.weight_decay={cfg.optim.weight_decay}"
        yield f"{got}: must be a finite number, at least 0; try optim.weight_decay=0"


def choices(cfg: RunConfig) -> Iterator[str]:
    if not cfg.stages or cfg.stages != sorted(set(cfg.stages), key=list(Stage).index):
        names = ",".join(stage.value for stage in Stage)
        got = ",".join(stage.value for stage in cfg.stages)
        yield f"stages=[{got}]: each stage at most once and in order; try stages=[{names}]"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", cfg.run.name) or ".." in cfg.run.name:
        yield f"run.name={cfg.run.name}: letters, digits and ._-/ only; try run.name=demo"
    if cfg.engine.zero_stage not in range(4):
        yield f"engine.zero_stage={cfg.engine.zero_stage}: must be 0, 1, 2 or 3; try 1"
    taken = FILLED_BY_ENGINE & set(cfg.engine.deepspeed)
    if taken:
        yield (
            f"engine.deepspeed.{min(taken)}: Eyrie fills it from optim and engine; "
            "remove it and set those knobs"
        )
    if "load_universal" in (cfg.engine.deepspeed.get("checkpoint") or {}):
        yield (
            "engine.deepspeed.checkpoint.load_universal: unpickles whatever a checkpoint holds; "
            "remove it, a run resumes with the number of ranks that it was started with"
        )
    if "stage" in (cfg.engine.deepspeed.get("zero_optimization") or {}):
        yield (
            "engine.deepspeed.zero_optimization.stage: Eyrie fills it from engine.zero_stage; "
            f"remove it and set that, now engine.zero_stage={cfg.engine.zero_stage}"
        )
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        yield f"optim.betas={list(cfg.optim.betas)}: two numbers in [0, 1); try [0.9,0.95]"


def data_and_vocabulary(cfg: RunConfig) -> Iterator[str]:
    size = cfg.draft.vocab_size
    if size != FULL and (isinstance(size, str) or size < 1):
        yield (
            f"draft.vocab_size={size}: must be a number of tokens, at least 1, or {FULL}; "
            "try draft.vocab_size=32000"
        )
    weights, paths = cfg.data.weights, cfg.data.path
    if weights is not None and len(weights) != len(paths):
        yield (
            f"data.weights={list(weights)}: one for each of the {len(paths)} entries of data.path; "
            "give as many, or null"
        )
    for weight in weights or []:
        if not 0 < weight <= 1:
            yield (
                f"data.weights={list(weights or [])}: {weight} must be above 0 and at most 1, as "
                "no conversation is stored twice; divide all of them by the largest"
            )


RESERVED = {  # what Eyrie itself tells the template
    "messages",
    "conversation",
    "conversations",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
}


def combinations(cfg: RunConfig) -> Iterator[str]:
    if taken := RESERVED & set(cfg.data.template_kwargs):
        yield (
            f"data.template_kwargs.{min(taken)}: Eyrie sets it; remove it and give the template's "
            "own arguments, such as enable_thinking"
        )
    if fault := licence_fault(cfg.export.licence):
        yield f"export.{fault}"
    if cfg.log.breakdown < 0:
        yield f"log.breakdown={cfg.log.breakdown}: must not be negative; try log.breakdown=10"


def licence_fault(licence: str | None) -> str | None:
    """Why a licence cannot stand in a card's front matter; None: it can."""
    if licence is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", licence):
        return None
    return f"licence={licence!r}: must be one word as hubs spell it, such as apache-2.0; give that"


def answers(cfg: RunConfig) -> Iterator[str]:
    """Rules on data.regenerate."""
    if cfg.regenerate.samples < 0:
        yield f"regenerate.samples={cfg.regenerate.samples}: must not be negative; try 0"
    if cfg.regenerate.samples and cfg.regenerate.temperature == 0:
        yield (
            "regenerate.temperature=0: samples at temperature 0 are copies of the greedy answer; "
            "try regenerate.temperature=0.7, or regenerate.samples=0"
        )
    if not cfg.regenerate.greedy and cfg.regenerate.samples < 1:
        yield (
            f"regenerate.samples={cfg.regenerate.samples}: with regenerate.greedy=false no answer "
            "is left to make; try regenerate.samples=1"
        )
    section = cfg.regenerate
    if section.retries < 0:
        yield f"regenerate.retries={section.retries}: must not be negative; try 5"
    if section.backend is AnswerBackend.builtin:
        for knob in ("base_url", "model", "api_key_env"):
            if value := getattr(section, knob):
                yield (
                    f"regenerate.{knob}={value}: is about a server, and regenerate.backend=builtin "
                    "asks none; set regenerate.backend=openai, or leave it out"
                )
        return
    if not re.match(r"https?://[^/\s]", section.base_url or ""):
        yield (
            f"regenerate.base_url={section.base_url or ''}: regenerate.backend=openai needs the "
            "address of a server; give one, as http://localhost:8000/v1"
        )
    if section.api_key_env is not None and not os.environ.get(section.api_key_env):
        yield (
            f"regenerate.api_key_env={section.api_key_env}: no such environment variable, or it is "
            "empty; export the key under that name, or set regenerate.api_key_env=null"
        )
