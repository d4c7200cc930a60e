"""Run under torchrun by test_engine.py: a few steps on made-up states, the curve as JSON.

argv: steps out_file job ...
A job is stage:precision[:samples a pack[:samples a step,...[:word]]]; with other sizes than the
usual ones it runs six steps. The word ``other`` gives it qk_norm, two layers, own tokens and
weights as reached, ``muon`` that optimizer, and ``average`` an average of the weights.
"""

import json
import math
import os
import pickle
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.runtime import RankInfo
from conf.schema import (
    ConfigError,
    EngineSection,
    Feed,
    LossKind,
    OptimKind,
    OptimSection,
    Precision,
    RunConfig,
    StepWeights,
    Supervise,
    TTTSection,
)
from data.chains import Chains
from data.distributed import setup, shutdown
from data.loader import on_device
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from models.kernels import choose_kernel
from train.engine import Engine
from train.loop import row_weights
from train.loss import Distillation
from train.metrics import Interval
from train.ttt import TrainingTimeTest

DEVICE = torch.device(os.environ["DS_ACCELERATOR"])
WIDTH, VOCAB, ROWS = 32, 40, 24
DEPTH = 3
OTHER = TTTSection(depth=DEPTH, feed=Feed.own, weights=StepWeights.reached)
SMALL_TOO = {"stage3_param_persistence_threshold": 0}  # or stage 3 keeps such small weights whole
SIZES = (6, 6, 6, 3, *[6] * 16)  # samples a step: one window is partial


@dataclass(frozen=True)
class Spec:
    """What one job trains with; windows cycle through ``sizes``."""

    stage: int
    precision: str
    micro: int = 2
    sizes: tuple[int, ...] = SIZES
    word: str = ""

    @classmethod
    def of(cls, word: str) -> "Spec":
        stage, precision, *more = word.split(":")
        sizes = tuple(map(int, more[1].split(","))) if more[1:] else SIZES
        micro = int(more[0]) if more else 2
        return cls(int(stage), precision, micro, sizes, word="".join(more[2:]))


def sample(step: int, i: int) -> tuple[torch.Tensor, ...]:
    """The i-th sample of a step, the same whatever rank asks."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[3 + i : 12 + 2 * i] = True
    last = torch.randn(ROWS, WIDTH, generator=generator)
    ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return ids, mask, torch.randn(ROWS, 3 * WIDTH, generator=generator), last


def window(step: int, head: torch.Tensor, spec: Spec, ranks: RankInfo) -> list[TTTBatch]:
    """This rank's packs of a step; ranks that run dry get packs without supervision."""
    count = spec.sizes[step % len(spec.sizes)]
    mine = list(range(ranks.rank, count, ranks.world_size))
    laps = math.ceil(math.ceil(count / ranks.world_size) / spec.micro)
    chosen = [mine[lap * spec.micro : (lap + 1) * spec.micro] for lap in range(laps)]
    return [packed(step, samples, head) for samples in chosen]


def packed(step: int, chosen: list[int], head: torch.Tensor) -> TTTBatch:
    parts = [sample(step, i) for i in chosen] or [sample(step, 0)]
    ids, mask, aux, last = (torch.cat(column) for column in zip(*parts, strict=True))
    starts = torch.arange(len(parts) + 1) * ROWS
    logits = last @ head.T
    return TTTBatch(
        input_ids=ids,
        positions=torch.arange(ROWS).repeat(len(parts)),
        aux=aux,
        last=last,
        argmax=logits.argmax(-1),
        lse=logits.logsumexp(-1),
        samples=len(parts),
        chains=Chains.of(mask & bool(chosen), starts, DEPTH, Supervise.span),
    )


def build(spec: Spec, ranks: RankInfo) -> "Job":
    cfg = RunConfig(
        ttt=OTHER if spec.word == "other" else TTTSection(depth=DEPTH),
        optim=OptimSection(
            OptimKind.muon if spec.word == "muon" else OptimKind.adamw,
            clip=0.5,
            average=0.9 if spec.word == "average" else None,
        ),
        engine=EngineSection(
            zero_stage=spec.stage,
            precision=Precision(spec.precision),
            deepspeed={"zero_optimization": SMALL_TOO},
        ),
    )
    torch.manual_seed(0)
    head = torch.randn(VOCAB, WIDTH)
    config = DraftConfig(
        hidden_size=WIDTH, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, aux_layers=[1, 2, 3], rms_norm_eps=1e-5,
        max_positions=64, rope={"rope_type": "default", "rope_theta": 1e4},
        norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=False,
        qk_norm=spec.word == "other",
        layers=2 if spec.word == "other" else 1,
    )  # fmt: skip
    draft = Eagle3Draft(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    draft.t2d.fill_(True)
    dtype = torch.bfloat16 if spec.precision == "bfloat16" else torch.float32
    teacher = Distillation(LossKind.kl, head.to(DEVICE, dtype), LlamaConfig())
    test = TrainingTimeTest(
        draft, teacher, cfg.ttt, choose_kernel(cfg.engine.attention, DEVICE, dtype, 8)
    )
    engine = Engine(cfg, test, ranks)
    return Job(spec, cfg, engine, head, ranks)


@dataclass
class Job:
    spec: Spec
    cfg: RunConfig
    engine: Engine
    head: torch.Tensor
    ranks: RankInfo

    def batches(self, step: int) -> list[TTTBatch]:
        made = window(step, self.head, self.spec, self.ranks)
        return [on_device(batch, self.engine.device, self.engine.dtype) for batch in made]

    def train(self, steps: range) -> list[list[float]]:
        """Loss and gradient norm of each step."""
        return [self.step(self.batches(step)) for step in steps]

    def step(self, batches: list[TTTBatch]) -> list[float]:
        interval = Interval(self.cfg.ttt.depth, self.engine.device)
        shares = row_weights(self.cfg, batches)
        for i, (batch, weight) in enumerate(zip(batches, shares.weights, strict=True)):
            output = self.engine(batch, weight)
            self.engine.backward(output.loss, last=i == len(batches) - 1)
            interval.add(output, len(batch.input_ids))
        norm = self.engine.step(1e-2, shares.total)
        return [interval.close(self.cfg.ttt.decay)["loss"], norm]

    def checksum(self) -> float:
        with self.engine.averaged():
            state = self.engine.draft_state()
        return float(sum(tensor.double().abs().sum() for tensor in state.values()))

    def step_on_nothing(self) -> dict:
        """A window whose mask is all zero, after real ones: Adam has momentum by now."""
        before = self.engine.draft_state()
        made = [packed(0, [], self.head) for _ in range(2)]
        made = [on_device(batch, self.engine.device, self.engine.dtype) for batch in made]
        loss, norm = self.step(made)
        after = self.engine.draft_state()
        kept = all(torch.equal(before[name], after[name]) for name in before)
        return {"loss": loss, "norm": norm, "kept": kept}

    def counts(self) -> dict:
        """Elements by who holds them, and what got a gradient (plain at stage 0 alone)."""
        named = dict(self.engine.module.named_parameters())
        groups = self.engine.optimizer.param_groups
        output = self.engine(self.batches(0)[0], row_weights(self.cfg, self.batches(0)).weights[0])
        if self.spec.stage == 0:
            self.engine.backward(output.loss, last=False)
        return {
            "optimizer": sum(p.numel() for group in groups for p in group["params"]),
            "trainable": self.engine.trainable,
            "all": self.engine.trainable + self.engine.frozen,
            "embedding": VOCAB * WIDTH,
            "names": sorted(named),
            "with_gradient": sorted(n for n, p in named.items() if p.grad is not None),
            "frozen": sorted(n for n, p in named.items() if not p.requires_grad),
        }

    def proposals(self) -> list[int]:
        return self.engine.propose(self.batches(0)[0], 3).flatten().tolist()


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def tampered(job: Job, folder: Path) -> dict:
    """Load copies of a checkpoint in which one kind of file is zeroed, or would run code."""
    marker, said = folder.with_name(f"{folder.name}-ran"), {}
    for kind in ("model", "optim"):
        for trick in ("code", "pickle", "zeros"):
            copy = folder.with_name(f"{folder.name}-{trick}")
            shutil.copytree(folder, copy)
            for file in copy.glob(f"engine/*{kind}_states.pt"):
                if trick == "zeros":
                    file.write_bytes(bytes(file.stat().st_size))
                elif trick == "code":
                    torch.save({"module": Evil(marker)}, file)
                else:
                    file.write_bytes(pickle.dumps(Evil(marker)))
                try:
                    job.engine.load(copy, 1)
                except ConfigError as error:
                    said[f"{kind} {trick}"] = str(error)
            shutil.rmtree(copy)
    ran = marker.exists()
    pickle.loads(pickle.dumps(Evil(marker)))  # the trap is one
    return {"said": said, "ran": ran, "trap": marker.exists()}


def run(spec: Spec, steps: int, ranks: RankInfo, folder: Path) -> dict:
    """Train; then load what was saved half-way into a new engine and train the rest again."""
    job = build(spec, ranks)
    done = job.train(range(steps // 2))
    job.engine.save(folder)
    done += job.train(range(steps // 2, steps))
    checksum = job.checksum()
    again = build(spec, ranks)
    again.engine.load(folder, ranks.world_size)
    resumed = again.train(range(steps // 2, steps))
    tampers = ranks.world_size == 1 and spec == Spec(spec.stage, "float32")
    same = job.proposals() == again.proposals() and again.checksum() == checksum
    return {
        "curve": [loss for loss, _ in done],
        "norms": [norm for _, norm in done],
        "checksum": checksum,
        "resumed": [loss for loss, _ in resumed],
        "same_weights": same,
        "nothing": again.step_on_nothing(),
        "counts": job.counts(),
        "tampered": tampered(again, folder) if tampers else None,
    }


def main(steps: int, out: Path, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    setup(DEVICE)
    ranks = RankInfo.from_env()
    results = {}
    for job in jobs:
        folder = out.parent / f"{ranks.world_size}-{job.replace(':', '-')}"
        spec = Spec.of(job)
        results[job] = run(spec, steps if spec.sizes == SIZES else 6, ranks, folder)
    if ranks.is_main:
        out.write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
