"""The capture stage: the verifier reads the prepared samples and its states become shards.

torchrun --nproc-per-node=N -m data.capture [overrides]
"""

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from conf.compose import entry
from conf.runtime import RankInfo, cache_dir, progress, say
from conf.schema import ConfigError, RunConfig
from data.capture_job import CaptureJob, begin, claim
from data.corpus import load_prepared
from data.distributed import (
    barrier,
    broadcast_object,
    gather_objects,
    pick_device,
    setup,
    shutdown,
    use_threads,
)
from data.manifest import Manifest, ShardEntry, shard_folder, write_manifest
from data.prepare import prepare
from data.records import PreparedData, TokenizedSample
from data.shards import HiddenStateShard, SampleStates
from data.states import BatchStates, check_states
from data.writer import ShardWriter
from models.verifier import Verifier


def capture(cfg: RunConfig, prepared: PreparedData, ranks: RankInfo) -> Path:
    """Make sure that the states of ``prepared`` lie in the cache, and return their folder.

    Whole shards of an earlier run are kept; each rank writes every world_size-th missing one.
    Raises ConfigError when the disk is too small or becomes full (whole shards stay), and
    JobError when the states do not reproduce the verifier's own logits.
    """
    with ExitStack() as held, full_disk_named(cfg):
        job = begin(cfg, prepared, ranks)
        if job.complete:
            say(f"capture: already in {job.folder}")
        else:
            if ranks.is_main:
                claim(cfg, job, held)
            barrier()
            job = finish(job, write_missing(cfg, prepared, job, ranks), ranks)
        say(summary(job.manifest))
        return job.folder


@contextmanager
def full_disk_named(cfg: RunConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"run.cache={cfg.run.cache}: the disk became full during the capture; make room and "
            "run the same command again, which keeps the whole shards"
        ) from error


def write_missing(
    cfg: RunConfig, prepared: PreparedData, job: CaptureJob, ranks: RankInfo
) -> list[ShardEntry]:
    """Write this rank's share of the missing shards; each was read back when this returns."""
    mine = job.todo[ranks.rank :: ranks.world_size]
    if not mine:
        return []
    device = pick_device(cfg.run.device, ranks.local_rank)
    dtype = getattr(torch, cfg.verifier.dtype.value)
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
    stored = getattr(torch, job.manifest.dtype)
    first = prepared.samples[mine[0].first : mine[0].first + mine[0].count]
    check_states(verifier, first, stored, cfg.capture.tolerance)
    of_all = f" (rank 0 of {ranks.world_size})" if ranks.world_size > 1 else ""
    tokens = sum(span.tokens for span in mine)
    bar = cast(tqdm, progress((), tokens, "capture" + of_all, "token"))
    with closing(bar), ShardWriter(job.folder, job.manifest.fingerprint) as writer:
        for span in mine:
            samples = prepared.samples[span.first : span.first + span.count]
            shard = HiddenStateShard.empty(samples, span.first, job.manifest)
            fill(shard, samples, verifier, cfg.capture.batch_tokens, bar.update)
            writer.put(span, shard)
        written = writer.finish()
    del verifier
    gc.collect()  # its hooks refer back to it; training needs the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return written


def fill(
    shard: HiddenStateShard,
    samples: list[TokenizedSample],
    verifier: Verifier,
    batch_tokens: int,
    count: Callable[[int], object],
) -> None:
    """Run the verifier over the samples of one shard; ``count`` hears the tokens of each batch.

    A batch is stored after the next one has been started: a GPU then computes meanwhile.
    """

    def store(places: list[int], states: list[SampleStates]) -> None:
        for place, one in zip(places, states, strict=True):
            shard.put(place, one)
        count(sum(lengths[place] for place in places))

    lengths = [len(sample.input_ids) for sample in samples]
    before: tuple[list[int], BatchStates] | None = None
    for places in batches(lengths, batch_tokens):
        started = BatchStates.of(verifier, [samples[i] for i in places], shard.last.dtype)
        if before is not None:
            store(before[0], before[1].arrived())
        before = places, started
    if before is not None:
        store(before[0], before[1].arrived())


def batches(lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Group samples of like length, longest first, to at most ``limit`` tokens with padding.

    A sample longer than ``limit`` goes alone. The grouping depends on the shard only, so a shard
    that is written again has the same bytes.
    """
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > limit:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def finish(job: CaptureJob, written: list[ShardEntry], ranks: RankInfo) -> CaptureJob:
    """Write the manifest of the shards that were there and those of all ranks."""
    shards = job.manifest.shards + [entry for part in gather_objects(written) for entry in part]
    manifest = replace(job.manifest, shards=sorted(shards, key=lambda entry: entry.name))
    if ranks.is_main:
        names = {entry.name for entry in manifest.shards}
        for path in shard_folder(job.folder).iterdir():
            if path.name not in names:
                path.unlink()  # cut for another capture.shard_mib
        write_manifest(job.folder, manifest)
    barrier()
    return replace(job, manifest=manifest)


def summary(manifest: Manifest) -> str:
    """One line: sizes, and whether the answers are the verifier's own (high) or foreign (low)."""
    tokens = sum(shard.tokens for shard in manifest.shards)
    supervised = sum(shard.supervised for shard in manifest.shards)
    agreed = sum(shard.agreed for shard in manifest.shards)
    size = sum(shard.bytes for shard in manifest.shards)
    return (
        f"capture: {tokens:,} tokens in {size / 1e9:.3g} GB, {supervised / tokens:.1%} supervised; "
        f"the verifier's top choice agrees with {agreed / max(supervised, 1):.1%} of them"
    )


def main(cfg: RunConfig) -> None:
    ranks = RankInfo.from_env()
    use_threads(cfg.engine.threads)
    setup(pick_device(cfg.run.device, ranks.local_rank))
    folder = broadcast_object(prepare(cfg).folder if ranks.is_main else None)
    assert folder is not None
    capture(cfg, load_prepared(folder), ranks)
    shutdown()


if __name__ == "__main__":
    entry(main)
