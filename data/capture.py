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
from conf.runtime import RankInfo, progress, say
from conf.schema import CaptureMode, ConfigError, RunConfig, Stage
from data.backends import Job, StateSource, Waiting, state_source
from data.capture_job import CaptureJob, take
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
from data.origin import agreement_of
from data.prepare import prepare
from data.publish import publish, send, withdraw
from data.records import Part, PreparedData, SampleStates, TokenizedSample
from data.shards import HiddenStateShard
from data.staging import Staging
from data.watch import Watch
from data.writer import ShardWriter


def capture(cfg: RunConfig, prepared: PreparedData, ranks: RankInfo) -> Path:
    """Make sure that the states of ``prepared`` lie in the cache, and return their folder.

    Whole shards of an earlier run are kept; each rank writes every world_size-th missing one. A
    part writes its shards and no manifest: the capture of the whole finds them and writes it.
    Raises ConfigError when the disk is too small or becomes full (whole shards stay), and
    JobError when the states do not reproduce the verifier's own logits.
    """
    with ExitStack() as held, full_disk_named(cfg):
        job = take(cfg, prepared, ranks, held)
        if job.complete:
            say(f"capture: already in {job.folder}")
        elif cfg.capture.parts > 1:
            write_missing(cfg, prepared, job, ranks, None)
            barrier()  # the parts' locks are rank 0's, which must not go before the others' shards
            say(part_summary(cfg, job))
            return job.folder
        else:
            stage = Staging.of(cfg, job.folder)
            if stage is not None:
                send_found(job, ranks, stage)
            job = finish(job, write_missing(cfg, prepared, job, ranks, stage), ranks, stage)
        if cfg.capture.store is not None:
            spread(job, ranks)
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


def send_found(job: CaptureJob, ranks: RankInfo, stage: Staging) -> None:
    """Send what an earlier capture has left on this rank's disk and the store has not.

    Each rank found the shards of its own share. What is complete there does not stay so.
    """
    if ranks.is_main:
        withdraw(stage)
    barrier()
    whole = {entry.name: entry for entry in job.manifest.shards}
    for span in job.spans[ranks.rank :: ranks.world_size]:
        if span.name in whole:
            send(stage, whole[span.name], span, job.manifest.source)


def spread(job: CaptureJob, ranks: RankInfo) -> None:
    """Write the manifest on each machine: with a store they need not have a disk in common."""
    if ranks.local_rank == 0:
        write_manifest(job.folder, job.manifest)
    barrier()


def write_missing(
    cfg: RunConfig, prepared: PreparedData, job: CaptureJob, ranks: RankInfo, stage: Staging | None
) -> list[ShardEntry]:
    """Write this rank's share of the missing shards; each was read back when this returns, and is
    in the store where there is one.

    Ranks that hold one verifier together compute all shards together, and rank 0 writes them.
    """
    together = cfg.capture.tensor_parallel
    mine = job.todo if together else job.todo[ranks.rank :: ranks.world_size]
    if not mine:
        return []
    device, stored = pick_device(cfg.run.device, ranks.local_rank), job.manifest.dtype
    places = [i for span in mine for i in range(span.first, span.first + span.count)]
    longest = int(prepared.samples.lengths[places].max())
    wanted = Job(cfg, device, getattr(torch, stored), Part(prepared.samples, places), longest)
    alone = together or ranks.world_size == 1
    of_all = "" if alone else f" (rank 0 of {ranks.world_size})"
    tokens = sum(span.tokens for span in mine)
    with (
        state_source(wanted) as source,
        ShardWriter(job.folder, job.manifest.source, stage) as writer,
    ):
        bar = cast(tqdm, progress((), tokens, "capture" + of_all, "token"))
        with closing(bar):
            for span in mine:
                samples = prepared.samples[span.first : span.first + span.count]
                shard = HiddenStateShard.empty(samples, span.first, job.manifest)
                fill(shard, samples, source, bar.update)
                if ranks.is_main or not together:
                    writer.put(span, shard)
        written = writer.finish()
    del source
    gc.collect()  # the hooks of a verifier refer back to it; training needs the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return written


def fill(
    shard: HiddenStateShard,
    samples: list[TokenizedSample],
    source: StateSource,
    count: Callable[[int], object],
) -> None:
    """Fetch the states of the samples of one shard; ``count`` hears the tokens of each batch.

    A batch is stored after the next one has been started: a GPU then computes meanwhile.
    """

    def store(places: list[int], states: list[SampleStates]) -> None:
        for place, one in zip(places, states, strict=True):
            shard.put(place, one)
        count(sum(lengths[place] for place in places))

    lengths = [len(sample.input_ids) for sample in samples]
    before: tuple[list[int], Waiting] | None = None
    for places in source.cut(lengths):
        started = source.of([samples[i] for i in places])
        if before is not None:
            store(before[0], before[1]())
        before = places, started
    if before is not None:
        store(before[0], before[1]())


def finish(
    job: CaptureJob, written: list[ShardEntry], ranks: RankInfo, stage: Staging | None = None
) -> CaptureJob:
    """Write the manifest of the shards that were there and those of all ranks; the store's last."""
    shards = job.manifest.shards + [entry for part in gather_objects(written) for entry in part]
    manifest = replace(job.manifest, shards=sorted(shards, key=lambda entry: entry.number))
    if ranks.is_main:
        names = {entry.name for entry in manifest.shards}
        for path in shard_folder(job.folder).iterdir():
            if path.name not in names:
                path.unlink()  # cut for another capture.shard_mib
        write_manifest(job.folder, manifest)
        if stage is not None:
            publish(stage, manifest)
    barrier()
    return replace(job, manifest=manifest)


def summary(manifest: Manifest) -> str:
    """One line: sizes, and whether the answers are the verifier's own (high) or foreign (low)."""
    size = sum(shard.bytes for shard in manifest.shards)
    return f"capture: {size / 1e9:.3g} GB; {agreement_of(manifest)}"


def part_summary(cfg: RunConfig, job: CaptureJob) -> str:
    part, parts = cfg.capture.part, cfg.capture.parts
    return (
        f"capture: part {part} of {parts}, {len(job.spans)} shards, is in {job.folder}; when all "
        "parts are, the command without capture.part and capture.parts closes the cache"
    )


def main(cfg: RunConfig) -> None:
    if cfg.capture.mode is CaptureMode.online:
        raise ConfigError(
            "capture.mode=online: writes no states, and data.capture does nothing else; take "
            "capture.mode=cache, or train without this command"
        )
    ranks = RankInfo.from_env()
    use_threads(cfg.engine.threads)
    with Watch(ranks, cfg.engine.timeout_minutes):
        setup(pick_device(cfg.run.device, ranks.local_rank))
        folder = broadcast_object(prepare(cfg).folder if ranks.is_main else None)
        assert folder is not None
        capture(cfg, load_prepared(folder), ranks)
    shutdown()


if __name__ == "__main__":
    entry(main, running=(Stage.prepare, Stage.capture))
