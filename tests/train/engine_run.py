"""Run under torchrun by test_engine.py: a few steps on made-up states, the curve as JSON.

argv: steps out_file stage:precision ...
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.runtime import RankInfo
from conf.schema import EngineSection, LossKind, OptimSection, Precision, RunConfig, TTTSection
from data.distributed import setup, shutdown
from data.loader import on_device
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from train.engine import Engine
from train.loop import row_weights
from train.loss import Distillation
from train.metrics import Interval
from train.ttt import TrainingTimeTest

WIDTH, VOCAB, ROWS, SAMPLES = 32, 40, 24, 6


def sample(step: int, i: int) -> tuple[torch.Tensor, ...]:
    """The i-th sample of a step, the same whatever rank asks."""
    generator = torch.Generator().manual_seed(1000 * step + i)
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[3 + i : 12 + 2 * i] = True
    last = torch.randn(ROWS, WIDTH, generator=generator)
    ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return ids, mask, torch.randn(ROWS, 3 * WIDTH, generator=generator), last


def windows(step: int, head: torch.Tensor, micro: int, ranks: RankInfo) -> list[TTTBatch]:
    """The last step is partial: half the samples, and ranks that run dry get empty batches."""
    count = SAMPLES // 2 if step == 3 else SAMPLES
    mine = list(range(ranks.rank, count, ranks.world_size))
    laps = math.ceil(math.ceil(count / ranks.world_size) / micro)
    batches = []
    for lap in range(laps):
        chosen = mine[lap * micro : (lap + 1) * micro]
        parts = [sample(step, i) for i in chosen] or [sample(step, 0)]
        ids, mask, aux, last = (torch.stack(column) for column in zip(*parts, strict=True))
        logits = last @ head.T
        batches.append(
            TTTBatch(
                input_ids=ids,
                loss_mask=mask & bool(chosen),
                lengths=torch.full((len(parts),), ROWS),
                aux=aux,
                last=last,
                argmax=logits.argmax(-1),
                lse=logits.logsumexp(-1),
            )
        )
    return batches


def build(stage: int, precision: str, ranks: RankInfo) -> tuple[RunConfig, Engine, torch.Tensor]:
    cfg = RunConfig(
        ttt=TTTSection(depth=3),
        optim=OptimSection(lr=1e-2, batch_size=SAMPLES, micro_batch_size=2, clip=0.5),
        engine=EngineSection(zero_stage=stage, precision=Precision(precision)),
    )
    torch.manual_seed(0)
    head = torch.randn(VOCAB, WIDTH)
    config = DraftConfig(
        hidden_size=WIDTH, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
        vocab_size=VOCAB, draft_vocab_size=VOCAB, aux_layers=[1, 2, 3], rms_norm_eps=1e-5,
        max_positions=64, rope={"rope_type": "default", "rope_theta": 1e4},
        norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=False,
    )  # fmt: skip
    draft = Eagle3Draft(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
    draft.t2d.fill_(True)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    teacher = Distillation(LossKind.kl, head.to(dtype), LlamaConfig())
    return cfg, Engine(cfg, TrainingTimeTest(draft, teacher, cfg.ttt), ranks), head


@dataclass
class Job:
    cfg: RunConfig
    engine: Engine
    head: torch.Tensor
    ranks: RankInfo

    def batches(self, step: int) -> list[TTTBatch]:
        made = windows(step, self.head, self.cfg.optim.micro_batch_size, self.ranks)
        return [on_device(batch, self.engine.device, self.engine.dtype) for batch in made]

    def train(self, steps: range) -> list[float]:
        interval = Interval(self.cfg.ttt.depth, self.engine.device)
        curve = []
        for step in steps:
            batches = self.batches(step)
            weights = row_weights(self.cfg, batches)
            for i, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
                output = self.engine(batch, weight)
                self.engine.backward(output.loss, last=i == len(batches) - 1)
                interval.add(output, batch.lengths)
            self.engine.step(1e-2)
            curve.append(interval.close(self.cfg.ttt.decay)["loss"])
        return curve

    def proposals(self) -> list[int]:
        return self.engine.propose(self.batches(0)[0], 3).flatten().tolist()


def run(stage: int, precision: str, steps: int, ranks: RankInfo, folder: Path) -> dict:
    """Train; then load what was saved half-way into a new engine and train the rest again."""
    job = Job(*build(stage, precision, ranks), ranks)
    curve = job.train(range(steps // 2))
    job.engine.save(folder)
    curve += job.train(range(steps // 2, steps))
    state = job.engine.draft_state()
    checksum = float(sum(tensor.double().abs().sum() for tensor in state.values()))
    again = Job(*build(stage, precision, ranks), ranks)
    again.engine.load(folder)
    resumed = again.train(range(steps // 2, steps))
    same = job.proposals() == again.proposals()
    return {"curve": curve, "checksum": checksum, "resumed": resumed, "same_proposals": same}


def main(steps: int, out: Path, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    setup(torch.device("cpu"))
    ranks = RankInfo.from_env()
    results = {}
    for job in jobs:
        stage, precision = job.split(":")
        folder = out.parent / f"{ranks.world_size}-{stage}-{precision}"
        results[job] = run(int(stage), precision, steps, ranks, folder)
    if ranks.is_main:
        out.write_text(json.dumps(results))
    shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
