"""The page of a plan: what is estimated, as aligned tables."""

import torch

from eval.tables import Row, aligned
from launch.planning.hardware import GB
from launch.planning.hours import (
    Hours,
    break_even,
    capture_hours,
    epoch_hours,
    needed_read_gbs,
    online_hours,
)
from launch.planning.memory import (
    Parts,
    capture_memory,
    online_fits,
    online_memory,
    training_memory,
)
from launch.planning.question import (
    Question,
    cache_bytes,
    forward_flops,
    training_flops,
)

TB = 1e12
STAGES = range(4)  # of ZeRO


def page(asked: Question) -> list[str]:
    """Everything that a plan says, line by line."""
    return [
        *heading(asked),
        "",
        *aligned(("parameters", "trained", "frozen", "of the verifier"), [parameters(asked)]),
        "",
        *memory_table(asked),
        "",
        *cache_table(asked),
        "",
        *hours_table(asked),
        "",
        *choice(asked),
    ]


def heading(asked: Question) -> list[str]:
    cfg, facts, sample = asked.cfg, asked.verifier.facts, asked.sample
    return [
        f"plan for {facts.path}: {facts.num_layers} layers of width {facts.hidden_size:,}, sizes "
        f"from {asked.verifier.source}; no weights were read",
        f"{cfg.plan.tokens:.3g} tokens in samples of {sample.tokens:,}, {sample.answer:,} of them "
        f"the answer; {asked.gpus} x {cfg.plan.gpu.value}, assumed {cfg.plan.forward_mfu:.0%} of "
        f"its peak in capture and {cfg.plan.train_mfu:.0%} in training, "
        f"{cfg.plan.read_gbs:g} GB/s a machine",
    ]


def parameters(asked: Question) -> Row:
    draft = asked.draft
    return ("", *(f"{n / 1e6:,.1f} M" for n in (draft.trainable, draft.frozen)), billions(asked))


def billions(asked: Question) -> str:
    return f"{asked.verifier.parameters / 1e9:.3g} B"


def memory_table(asked: Question) -> list[str]:
    """One row for capture, and one a ZeRO stage."""
    head = ("GB on a GPU", "weights", "frozen", "gradients", "optimizer", "states", "kept", "work")
    rows = [memory_row("capture", capture_memory(asked), asked)]
    for stage in STAGES:
        mark = " (chosen)" if stage == asked.cfg.engine.zero_stage else ""
        rows.append(memory_row(f"ZeRO-{stage}{mark}", training_memory(asked, stage), asked))
    return aligned((*head, "in all", ""), rows)


def memory_row(name: str, memory: Parts, asked: Question) -> Row:
    parts = (
        memory.weights, memory.frozen, memory.gradients, memory.optimizer,
        memory.states, memory.kept, memory.work, memory.total,
    )  # fmt: skip
    verdict = "fits" if memory.total <= asked.hardware.usable else "does not fit"
    return (name, *(f"{part / GB:.2f}" for part in parts), verdict)


def cache_table(asked: Question) -> list[str]:
    head = ("cache", "disk", "KiB a token", "read for training, all machines")
    rows: list[Row] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        size = cache_bytes(asked, dtype)
        share = size / asked.stored_bytes
        a_token = size / asked.cfg.plan.tokens / 1024
        rate = f"{share * needed_read_gbs(asked):.2f} GB/s"
        rows.append((name, f"{size / TB:.3g} TB", f"{a_token:.2f}", rate))
    return aligned(head, rows)


def hours_table(asked: Question) -> list[str]:
    epochs, price = asked.cfg.optim.epochs, asked.cfg.plan.price
    capture, epoch = capture_hours(asked), epoch_hours(asked)
    whole = capture.total + epochs * epoch.total
    head = ("hours", "FLOPs", "compute", "disk", "links", "in all", "bound by")
    flops = [asked.samples * forward_flops(asked), asked.samples * training_flops(asked).total]
    rows = [hours_row("capture", flops[0], capture), hours_row("an epoch", flops[1], epoch)]
    lines = aligned(head, rows)
    used = f"{asked.gpus * whole:,.1f} GPU hours"
    cost = "" if price is None else f", {asked.gpus * whole * price:,.0f} at {price:g} an hour"
    return [*lines, f"capture and {epochs:g} epochs: {whole:.2f} hours, {used}{cost}"]


def hours_row(name: str, flops: float, hours: Hours) -> Row:
    figures = (hours.compute, hours.disk, hours.links, hours.total)
    return (name, f"{flops:.3g}", *(f"{figure:.2f}" for figure in figures), hours.bound)


def choice(asked: Question) -> list[str]:
    """Online or cached."""
    passes, epochs = break_even(asked), asked.cfg.optim.epochs
    online = online_hours(asked) * epochs
    cached = capture_hours(asked).total + epochs * epoch_hours(asked).total
    word = "a cache never takes less time than capture.mode=online"
    if passes is not None:
        word = f"a cache takes less time than capture.mode=online from {passes:.2f} epochs on"
    if not online_fits(asked):
        word = (
            f"capture.mode=online takes {online_memory(asked) / GB:.1f} GB on a GPU, as each holds "
            f"a whole verifier, and does not fit; if it did, {word}"
        )
    return [f"{word}; for {epochs:g}: {cached:.2f} hours with a cache, {online:.2f} without"]
