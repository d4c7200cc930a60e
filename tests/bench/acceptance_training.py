"""What the peers' training scripts share: a budget, one schedule, the loop, and its figures.

A head is trained for a number of updates or of CPU-seconds. Counted are the CPU-seconds of this
process (all its threads, user and system) from a batch's samples in memory to the end of the
update: padding or packing, forward, backward, clipping and the optimizer's step. Not counted are
imports, building the model, reading the feed file and saving the head.

The rate rises linearly over the first WARMUP of the budget and falls on a cosine to FLOOR of its
peak. It loads in the peers' environments, so it imports torch and the standard library alone.
"""

import argparse
import json
import math
import time
from collections import deque
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch
from acceptance_feed import Ends, Facts, Feed, FeedSample
from safetensors.torch import save_file
from torch import Tensor, nn

WARMUP = 0.04
FLOOR = 0.1
BETAS = (0.9, 0.95)  # of AdamW, for every contender
RECENT = 50  # updates that the final losses are means of
INTERVAL = 20.0  # seconds between two lines
PROBED = 3  # steps whose logits a probe holds


@dataclass(frozen=True)
class Losses:
    total: Tensor  # [] what is minimised
    by_depth: list[Tensor]  # as the peer reports them


class Peer(Protocol):
    packages: tuple[str, ...]  # whose versions are reported
    trained: nn.Module
    optimizers: list[torch.optim.Optimizer]
    clip: float  # norm that gradients are scaled down to

    def losses(self, samples: list[FeedSample]) -> Losses:
        """Collate as the peer's own loader does, and run its forward."""
        ...

    def probe(self, sample: FeedSample) -> dict[str, Tensor]:
        """``logits`` [PROBED, T', Vd] in fp32: row t, step k guesses x[t+2+k]; and what else the
        peer's own forward shows."""
        ...

    def save(self, folder: Path) -> None:
        """In the peer's published format."""
        ...


class Budget:
    """``steps`` updates or ``cpu_seconds``, whichever is given; enter it to be counted."""

    def __init__(self, steps: int | None, cpu_seconds: float | None):
        self.steps = steps
        self.cpu_seconds = cpu_seconds
        self.updates = 0
        self.used = 0.0

    def __enter__(self) -> None:
        self.begin = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.used += time.process_time() - self.begin
        self.updates += 1

    @property
    def progress(self) -> float:
        """The share that is spent; the update at hand has not been."""
        if self.steps is not None:
            return self.updates / self.steps
        assert self.cpu_seconds is not None
        return self.used / self.cpu_seconds


def share_of_peak(progress: float) -> float:
    """Of the peak learning rate. The first update is not at 0, where it would be for nothing."""
    if progress < WARMUP:
        return max(progress, WARMUP / 10) / WARMUP
    done = min(1.0, (progress - WARMUP) / (1 - WARMUP))
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def options(description: str, depth: int) -> argparse.ArgumentParser:
    """What every peer can be told; ``depth``: its default K."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--feed", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained head")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--depth", type=int, default=depth, help="K, steps of the unroll")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int)
    budget.add_argument("--cpu-seconds", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--probe", type=Path, help="file for its own forward on the first sample")
    return parser


def train(peer: Peer, feed: Feed, args: argparse.Namespace) -> None:
    """Train, save, and print the figures as one JSON line, the last of the output."""
    budget, recent = Budget(args.steps, args.cpu_seconds), deque(maxlen=RECENT)
    parameters = [p for p in peer.trained.parameters() if p.requires_grad]
    peaks = [[group["lr"] for group in one.param_groups] for one in peer.optimizers]
    batches, supervised, samples_seen = feed.batches(args.seed), 0, 0
    begin = said = time.monotonic()
    peer.trained.train()
    while budget.progress < 1:
        samples = [feed[index] for index in next(batches)]
        with budget:
            set_rates(peer.optimizers, peaks, share_of_peak(budget.progress))
            with torch.autocast("cpu", torch.bfloat16):
                losses = peer.losses(samples)
            losses.total.backward()
            torch.nn.utils.clip_grad_norm_(parameters, peer.clip)
            for optimizer in peer.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        recent.append([losses.total.item(), *(float(one) for one in losses.by_depth)])
        if not math.isfinite(recent[-1][0]):
            raise SystemExit(f"update {budget.updates}: the loss is {recent[-1][0]}")
        samples_seen += len(samples)
        supervised += sum(int(sample.loss_mask.sum()) for sample in samples)
        if time.monotonic() - said >= INTERVAL:
            said = time.monotonic()
            print(line_of(budget, mean_of(recent)[0]), flush=True)
    peer.trained.eval()
    args.out.mkdir(parents=True, exist_ok=True)
    peer.save(args.out)
    if args.probe:
        with torch.no_grad():
            save_file(peer.probe(feed[0]), args.probe)
    total, *by_depth = mean_of(recent)
    figures = {
        "updates": budget.updates,
        "cpu_seconds": budget.used,
        "wall_seconds": time.monotonic() - begin,
        "samples": samples_seen,
        "supervised": supervised,
        "loss": total,
        "losses": by_depth,
        "trained_parameters": sum(p.numel() for p in parameters),
        "versions": {name: metadata.version(name) for name in ("torch", *peer.packages)},
        "options": {name: value for name, value in vars(args).items() if plain(value)},
    }
    print(json.dumps(figures), flush=True)


def set_rates(
    optimizers: list[torch.optim.Optimizer], peaks: list[list[float]], share: float
) -> None:
    for optimizer, rates in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * share


def mean_of(rows: deque[list[float]]) -> list[float]:
    return torch.tensor(list(rows), dtype=torch.float64).mean(0).tolist()


def line_of(budget: Budget, loss: float) -> str:
    done = f"{budget.progress:.0%}, {budget.updates} updates, {budget.used:.0f} CPU-seconds"
    return f"{done}, loss {loss:.4f}"


def plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)


def llama_settings(facts: Facts) -> dict:
    """What both peers tell transformers' LlamaConfig of the draft's layer: as their own tools do,
    the verifier's sizes."""
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.max_positions,
        "rms_norm_eps": facts.rms_norm_eps,
        "rope_parameters": facts.rope,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def head_rows(ends: Ends) -> Tensor:
    """[Vd, D] fp32: the verifier's output matrix for the draft vocabulary."""
    return ends.head[ends.target_ids].float()
