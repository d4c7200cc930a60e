"""What a configuration must satisfy; each rule names the knob, the value and the way out."""

import os
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf.schema import HUB, Attention, CaptureMode, ConfigError, RunConfig, Stage, StateBackend

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
    for rules in (positive_numbers, shares, choices, combinations):
        for message in rules(cfg):
            raise ConfigError(message)
    for rules in (flash_for_capture_alone, places, state_backends):
        for message in rules(cfg, running):
            raise ConfigError(message)
    return cfg


AT_LEAST_ONE = {  # knob: a value that works
    "ttt.depth": "7",
    "draft.vocab_size": "32000",
    "draft.intermediate_size": "null",
    "draft.max_positions": "null",
    "data.max_samples": "null",
    "regenerate.max_new_tokens": "512",
    "regenerate.batch_size": "64",
    "capture.batch_tokens": "4096",
    "capture.shard_mib": "1024",
    "capture.chunk_tokens": "65536",
    "optim.packs_per_step": "8",
    "optim.micro_batch_tokens": "8192",
    "optim.max_steps": "null",
    "engine.threads": "null",
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
}
ABOVE_ZERO = {
    "optim.lr": "1e-4",
    "optim.eps": "1e-8",
    "optim.clip": "0.5",
    "optim.epochs": "2",
    "capture.tolerance": "null",
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
    for knob, remedy in ABOVE_ZERO.items():
        value = value_of(cfg, knob)
        if value is not None and not 0 < value < float("inf"):
            yield f"{knob}={value}: must be a finite number above 0; try {knob}={remedy}"


def shares(cfg: RunConfig) -> Iterator[str]:
    bounds = {
        "ttt.decay": (cfg.ttt.decay, 1.0, 0.8),
        "data.valid_share": (cfg.data.valid_share, 0.5, 0.05),
        "regenerate.top_p": (cfg.regenerate.top_p, 1.0, 0.95),
    }
    for knob, (value, top, remedy) in bounds.items():
        if not 0 < value <= top:
            yield f"{knob}={value}: must be above 0 and at most {top}; try {knob}={remedy}"
    from_zero = {
        "optim.warmup_share": (cfg.optim.warmup_share, 0.04),
        "optim.min_lr_share": (cfg.optim.min_lr_share, 0.1),
    }
    for knob, (value, remedy) in from_zero.items():
        if not 0 <= value < 1:
            yield f"{knob}={value}: must be at least 0 and below 1; try {knob}={remedy}"
    for knob, value in (
        ("eval.temperature", cfg.eval.temperature),
        ("regenerate.temperature", cfg.regenerate.temperature),
        ("optim.weight_decay", cfg.optim.weight_decay),
    ):
        if not 0 <= value < float("inf"):
            yield f"{knob}={value}: must be a finite number, at least 0; try {knob}=0"


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
    if not cfg.eval.n_sweep or min(cfg.eval.n_sweep) < 1:
        yield f"eval.n_sweep={list(cfg.eval.n_sweep)}: chain lengths from 1; try [1,2,3,4,5]"


def combinations(cfg: RunConfig) -> Iterator[str]:
    if cfg.draft.fc_norm and cfg.draft.norm_before_fc:
        yield (
            "draft.norm_before_fc=true: excludes draft.fc_norm=true, engines read one of the two; "
            "set one of them to false"
        )
    if cfg.regenerate.samples < 0:
        yield f"regenerate.samples={cfg.regenerate.samples}: must not be negative; try 0"
    if cfg.log.breakdown < 0:
        yield f"log.breakdown={cfg.log.breakdown}: must not be negative; try log.breakdown=10"
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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if Stage.train in cfg.stages and cfg.optim.packs_per_step < world:
        yield (
            f"optim.packs_per_step={cfg.optim.packs_per_step}: smaller than the {world} ranks, "
            f"some would idle; try optim.packs_per_step={world}"
        )


def flash_for_capture_alone(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """Decoding hands the verifier masks of its own, which flash_attention_2 does not take."""
    if cfg.verifier.attention is Attention.flash_attention_2 and Stage.eval in running:
        yield (
            "verifier.attention=flash_attention_2: works for stages=[prepare,capture,train] and "
            "not for decoding; evaluate with verifier.attention=sdpa"
        )


def places(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    if not str(cfg.verifier.path):
        yield "verifier.path=: is empty; give a folder or a hub name, as in verifier=qwen3_8b"
    local = cfg.verifier.path.startswith(("/", "./", "../", "~"))
    if local and not (Path(cfg.verifier.path).expanduser() / "config.json").is_file():
        yield (
            f"verifier.path={cfg.verifier.path}: no folder with a config.json; "
            "give one, or a hub name"
        )
    needed = []
    if Stage.prepare in running:
        needed.append(("data.path", cfg.data.path, "make it with python -m data.regenerate"))
    if Stage.eval in running:
        needed.append(("eval.prompts", cfg.eval.prompts, "give a .jsonl file of prompts"))
    for knob, paths, remedy in needed:
        if not paths:
            yield f"{knob}=[]: is empty; {remedy}, then {knob}=FILE"
        for path in paths:
            if knob == "data.path" and path.startswith(HUB):
                continue  # only the hub knows
            place = Path(path).expanduser()
            if not place.exists() or (knob == "eval.prompts" and not place.is_file()):
                yield f"{knob}={path}: no such file; {remedy}"


def state_backends(cfg: RunConfig, running: Sequence[Stage]) -> Iterator[str]:
    """What the chosen capture.backend needs, and knobs that it would not heed."""
    capture, backend = cfg.capture, cfg.capture.backend
    if capture.tensor_parallel and backend is not StateBackend.transformers:
        yield (
            f"capture.tensor_parallel=true: has no effect with capture.backend={backend.value}; "
            "take capture.backend=transformers (vLLM splits by capture.vllm_args)"
        )
    computes = backend is StateBackend.transformers and not capture.tensor_parallel
    if capture.mode is CaptureMode.online and not computes:
        yield (
            "capture.mode=online: each rank computes with a whole verifier of its own; take "
            "capture.backend=transformers without capture.tensor_parallel, or capture.mode=cache"
        )
    if capture.tensor_parallel and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield (
            "capture.tensor_parallel=true: one process cannot split a verifier; start with "
            "torchrun --nproc-per-node=GPUS"
        )
    if (capture.dumped is not None) != (backend is StateBackend.dumped):
        yield (
            f"capture.dumped={capture.dumped}: goes with capture.backend=dumped, and that is "
            f"{backend.value}; give both or neither"
        )
    if Stage.capture not in running:
        return
    if capture.dumped is not None and not Path(capture.dumped).expanduser().is_dir():
        yield (
            f"capture.dumped={capture.dumped}: no such folder; give the one that holds the "
            ".safetensors files with token_ids and hidden_states"
        )
    if backend is StateBackend.vllm and not has_vllm(capture.vllm_python):
        yield (
            f"capture.vllm_python={capture.vllm_python or 'null'}: no Python with vLLM there; "
            "name the interpreter of an environment with vllm >= 0.18, or take "
            "capture.backend=transformers"
        )


def has_vllm(python: str | None) -> bool:
    """Whether there is one; another interpreter is not asked, which would take seconds."""
    if python is None:
        return find_spec("vllm") is not None
    return Path(python).expanduser().is_file()
