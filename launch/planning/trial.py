"""The trial: a small capture and a few training steps, each in a process of its own, measured.

python -m launch.planning.trial capture|train FOLDER    what launch.plan starts: FOLDER holds the
configuration, gets the cache, and a JSON file with what the stage took.
"""

import json
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from conf.compose import load_saved
from conf.runtime import RankInfo, cache_dir, write_atomically
from conf.schema import Precision, RunConfig
from data.backends import Job, state_source
from data.capture import fill
from data.capture_job import manifest_of, plan
from data.distributed import setup, shutdown
from data.loader import TrainLoader, on_device
from data.manifest import shard_folder, write_manifest
from data.reader import ShardReader
from data.records import Part, PreparedData, Samples, Skipped
from data.shards import HiddenStateShard
from data.writer import ShardWriter
from launch.planning.question import Sample
from launch.planning.resident import Used, resident_bytes
from models.verifier import load_facts
from train.engine import Engine
from train.loop import build, row_weights

CONFIG, CPU = "config.yaml", torch.device("cpu")
WARM, STEPS = 1, 4  # steps before the clock runs, and on it
TRIES = 5  # products, of which the middle one counts
PRODUCT = (4096, 2048)  # rows, and width in and out


@dataclass(frozen=True)
class Taken:
    """What a stage took."""

    seconds: float  # of CPU, by all threads
    bytes: int  # resident beyond what the process had before the stage began
    rate: float  # FLOP/s of the machine's own matrix product in that precision, beside it
    disk: int = 0  # bytes of the cache's shards


def samples_of(cfg: RunConfig, vocabulary: int) -> Samples:
    """As many samples of the average size as plan.tokens has, of random tokens."""
    one = Sample.of(cfg)
    count = round(cfg.plan.tokens / one.tokens)
    generator = torch.Generator().manual_seed(cfg.run.seed)
    mask = (torch.arange(one.tokens) >= one.tokens - one.answer).to(torch.uint8)
    names = [f"sample-{i}".encode() for i in range(count)]
    none = torch.zeros(count, dtype=torch.bool)
    return Samples(
        tokens=torch.randint(vocabulary, (count * one.tokens,), generator=generator).int(),
        mask=mask.repeat(count),
        offsets=torch.arange(count + 1) * one.tokens,
        id_text=torch.tensor(list(b"".join(names)), dtype=torch.uint8),
        id_offsets=torch.tensor([0, *map(len, names)]).cumsum(0),
        greedy=none,
        held_out=none,
        prompts=torch.arange(count),
    )


def prepared_of(cfg: RunConfig) -> PreparedData:
    """In the place of prepare: what it would leave of such samples."""
    vocabulary = load_facts(cfg.verifier, cache_dir(cfg)).vocab_size
    samples = samples_of(cfg, vocabulary)
    counts = torch.bincount(samples.tokens.long(), minlength=vocabulary)
    rows = Skipped(len(samples), len(samples))
    return PreparedData(cache_dir(cfg), "trial", samples, counts, torch.zeros_like(counts), rows)


def captured(cfg: RunConfig) -> Taken:
    """The verifier is loaded before the clock runs; memory counts from before it is."""
    prepared = prepared_of(cfg)
    job, before = plan(cfg, prepared), resident_bytes()
    dtype = getattr(torch, job.manifest.dtype)
    longest = int(prepared.samples.lengths.max())
    everything = Part(prepared.samples, range(len(prepared.samples)))
    shard_folder(job.folder).mkdir(parents=True, exist_ok=True)
    with (
        state_source(Job(cfg, CPU, dtype, everything, longest)) as source,
        ShardWriter(job.folder, job.manifest.source) as writer,
        Used() as used,
    ):
        for span in job.spans:
            samples = prepared.samples[span.first : span.first + span.count]
            shard = HiddenStateShard.empty(samples, span.first, job.manifest)
            fill(shard, samples, source, lambda _tokens: None)
            writer.put(span, shard)
        shards = writer.finish()
    job.manifest.shards.extend(shards)
    write_manifest(job.folder, job.manifest)
    size = sum(path.stat().st_size for path in shard_folder(job.folder).iterdir())
    rate = product_rate(cfg.verifier.dtype)
    return Taken(used.seconds, used.peak - before, rate, size)


def trained(cfg: RunConfig) -> Taken:
    """Steps as fit() takes them, without its log, checkpoints and held-out acceptance."""
    setup(CPU)
    ranks, prepared = RankInfo.from_env(), prepared_of(cfg)
    manifest = manifest_of(cfg, prepared, load_facts(cfg.verifier, cache_dir(cfg)))
    source = ShardReader(plan(cfg, prepared).folder, manifest)
    before = resident_bytes()
    engine = Engine(cfg, build(cfg, prepared, source, CPU), ranks)
    loader = TrainLoader(source, cfg.optim, cfg.ttt, cfg.run.seed, ranks)
    windows = iter(loader.windows())
    with Used() as warm:
        take(cfg, engine, windows, WARM)
    with Used() as used:
        take(cfg, engine, windows, STEPS)
    shutdown()
    peak = max(warm.peak, used.peak)
    return Taken(used.seconds / STEPS, peak - before, product_rate(cfg.engine.precision))


def take(cfg: RunConfig, engine: Engine, windows: Any, count: int) -> None:
    for window in islice(windows, count):
        shares = row_weights(cfg, window.batches, False, CPU)
        for i, (packed, weight) in enumerate(zip(window.batches, shares.weights, strict=True)):
            output = engine(on_device(packed, CPU, engine.dtype), weight)
            engine.backward(output.loss, last=i == len(window.batches) - 1)
        engine.step(cfg.optim.lr, shares.total)


def product_rate(precision: Precision) -> float:
    """FLOPs a CPU second of torch.mm, [rows, width] x [width, width]."""
    rows, width = PRODUCT
    dtype = getattr(torch, precision.value)
    left, right = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
    out, spent = torch.empty(rows, width, dtype=dtype), []
    for _ in range(TRIES):
        with Used() as used:
            torch.mm(left, right, out=out)
        spent.append(used.seconds)
    return 2 * rows * width * width / sorted(spent)[TRIES // 2]


def main(stage: str, folder: Path) -> None:
    cfg = load_saved(folder / CONFIG)
    torch.set_num_threads(cfg.engine.threads or 1)
    taken = captured(cfg) if stage == "capture" else trained(cfg)
    write_atomically(folder / f"{stage}.json", json.dumps(asdict(taken)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
