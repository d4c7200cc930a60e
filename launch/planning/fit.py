"""What cannot be: a job that does not fit its GPUs or its disk, and the knob that makes it fit."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from conf.schema import CaptureMode, ConfigError, RunConfig, StateBackend, StateDtype
from launch.planning.memory import Parts, capture_memory, training_memory
from launch.planning.question import Question, cache_bytes

TB = 1e12


def refuse_misfit(asked: Question) -> None:
    """Raises ConfigError with the first thing that does not fit, and a knob that mends it."""
    for fault in (packs, disk, capturing, training):
        for message in fault(asked):
            raise ConfigError(message)


def packs(asked: Question) -> Iterator[str]:
    each = asked.cfg.optim.packs_per_step
    if each < asked.gpus:
        yield (
            f"optim.packs_per_step={each}: smaller than plan.gpus={asked.gpus}, some would idle; "
            f"set optim.packs_per_step={asked.gpus}"
        )


def disk(asked: Question) -> Iterator[str]:
    there = asked.cfg.plan.disk_tb
    need = asked.stored_bytes / TB
    if there is None or need <= there or asked.cfg.capture.mode is CaptureMode.online:
        return
    small = StateDtype.fp8
    halved = cache_bytes(asked, getattr(torch, small.value)) / TB
    remedy = f"capture.dtype={small.name} takes {halved:.3g} TB"
    if halved > there:
        fewer = asked.cfg.plan.tokens * there / need
        remedy = f"capture.mode=online needs none, or take plan.tokens={fewer:.2g}"
    yield f"plan.disk_tb={there:g}: the cache takes {need:.3g} TB; {remedy}"


def capturing(asked: Question) -> Iterator[str]:
    room = asked.hardware.usable
    if capture_memory(asked).total <= room:
        return
    for words, changed in (
        ("capture.batch_tokens=1024", with_capture(asked, batch_tokens=1024)),
        ("capture.tensor_parallel=true", with_capture(asked, tensor_parallel=True)),
        ("capture.backend=layers", with_capture(asked, backend=StateBackend.layers)),
    ):
        if capture_memory(changed).total <= room:
            yield told("capture", capture_memory(asked), asked, f"set {words}")
    yield told("capture", capture_memory(asked), asked, "choose a plan.gpu with more memory")


def training(asked: Question) -> Iterator[str]:
    room, stage = asked.hardware.usable, asked.cfg.engine.zero_stage
    if training_memory(asked, stage).total <= room:
        return
    least = max(256, asked.sample.tokens)
    smaller = with_cfg(
        asked, replace(asked.cfg, optim=replace(asked.cfg.optim, micro_batch_tokens=least))
    )
    found = [
        ("engine.zero_stage=1", training_memory(asked, max(stage, 1))),
        ("engine.recompute=true", training_memory(asked, stage, recompute=True)),
        (f"optim.micro_batch_tokens={least}", training_memory(smaller, stage)),
        ("engine.zero_stage=3", training_memory(asked, 3)),
    ]
    for words, memory in found:
        if memory.total <= room:
            yield told("training", training_memory(asked, stage), asked, f"set {words}")
    yield told(
        "training", training_memory(asked, stage), asked, "choose a plan.gpu with more memory"
    )


def told(stage: str, memory: Parts, asked: Question, remedy: str) -> str:
    kind, usable = asked.cfg.plan.gpu.value, asked.hardware.usable / 1e9
    return (
        f"plan.gpu={kind}: {stage} takes {memory.total / 1e9:.3g} GB on each of "
        f"{asked.gpus}, and {usable:.3g} GB can be used; {remedy}"
    )


def with_capture(asked: Question, **changes: object) -> Question:
    return with_cfg(asked, replace(asked.cfg, capture=replace(asked.cfg.capture, **changes)))


def with_cfg(asked: Question, cfg: RunConfig) -> Question:
    return replace(asked, cfg=cfg)
