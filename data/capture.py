"""The capture stage: the verifier reads the prepared samples and its states become shards.

torchrun --nproc-per-node=N -m data.capture [overrides]
"""

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from tqdm import tqdm

from conf.compose import entry
from conf.runtime import RankInfo, progress, say
from conf.schema import CaptureMode, ConfigError, RunConfig
from data.backends import Job, StateSource, state_source
from data.capture_job import CaptureJob, begin
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
from data.shard_file import describe, write_shard
from data.shards import HiddenStateShard
from data.states import batches


def capture(cfg: RunConfig, prepared: PreparedData, ranks: RankInfo) -> Path:
    """Make sure that the states of ``prepared`` lie in the cache, and return their folder.

    Whole shards of an earlier run are kept; each rank writes every world_size-th missing one.
    Raises ConfigError when the disk is too small or becomes full (whole shards stay), and
    JobError when the states do not reproduce the verifier's own logits.
    """
    with ExitStack() as held, full_disk_named(cfg):
        job = broadcast_object(begin(cfg, prepared, held) if ranks.is_main else None)
        assert job is not None
        if job.complete:
            say(f"capture: already in {job.folder}")
        else:
            written = write_missing(cfg, prepared, job, ranks)
            job = finish(job, written, ranks)
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
) -> dict[str, str]:
    """Write this rank's share of the missing shards -> name and sha256 of each.

    Ranks that hold one verifier together compute all shards together, and rank 0 writes them.
    """
    together = cfg.capture.tensor_parallel
    mine = job.todo if together else job.todo[ranks.rank :: ranks.world_size]
    if not mine:
        return {}
    device = pick_device(cfg.run.device, ranks.local_rank)
    written = {}
    alone = together or ranks.world_size == 1
    of_all = "" if alone else f" (rank 0 of {ranks.world_size})"
    tokens = sum(span.tokens for span in mine)
    wanted = [one for s in mine for one in prepared.samples[s.first : s.first + s.count]]
    with state_source(Job(cfg, device, getattr(torch, job.manifest.dtype), wanted)) as source:
        bar = cast(tqdm, progress((), tokens, "capture" + of_all, "token"))
        for span in mine:
            samples = prepared.samples[span.first : span.first + span.count]
            shard = HiddenStateShard.empty(samples, span.first, job.manifest)
            fill(shard, samples, source, bar.update)
            if ranks.is_main or not together:
                written[span.name] = write_shard(job.folder, span, shard, job.manifest.fingerprint)
        bar.close()
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
    """Fetch the states of the samples of one shard; ``count`` hears the tokens of each batch."""
    lengths = [len(sample.input_ids) for sample in samples]
    for places in batches(lengths, source.batch_tokens):
        states = source.of([samples[place] for place in places])
        for place, one in zip(places, states, strict=True):
            shard.put(place, one)
        count(sum(lengths[place] for place in places))


def finish(job: CaptureJob, written: dict[str, str], ranks: RankInfo) -> CaptureJob:
    """Read every shard back, compare its checksum with what was written, write the manifest."""
    barrier()
    own = job.spans[ranks.rank :: ranks.world_size]
    spans = progress(own, len(own), "check shards", "shard")
    entries = [describe(job.folder, span.name) for span in spans]
    gathered = [entry for part in gather_objects(entries) for entry in part]
    sums = {name: digest for part in gather_objects(written) for name, digest in part.items()}
    manifest = replace(job.manifest, shards=sorted(gathered, key=lambda entry: entry.name))
    if ranks.is_main:
        check_sums(job.folder, manifest.shards, sums)
        names = {entry.name for entry in manifest.shards}
        for path in shard_folder(job.folder).iterdir():
            if path.name not in names:
                path.unlink()  # cut for another capture.shard_mib
        write_manifest(job.folder, manifest)
    barrier()
    return replace(job, manifest=manifest)


def check_sums(folder: Path, entries: list[ShardEntry], sums: dict[str, str]) -> None:
    for shard in entries:
        expected = sums.get(shard.name, shard.sha256)  # kept ones were checked when written
        if shard.sha256 != expected:
            raise ConfigError(
                f"{shard_folder(folder) / shard.name}: reads back with sha256 {shard.sha256}, must "
                f"be {expected} as written; delete the file, check the disk and capture again"
            )


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
    if cfg.capture.mode is CaptureMode.online:
        raise ConfigError(
            "capture.mode=online: writes no states, and data.capture does nothing else; take "
            "capture.mode=cache, or train without this command"
        )
    ranks = RankInfo.from_env()
    use_threads(cfg.engine.threads)
    setup(pick_device(cfg.run.device, ranks.local_rank))
    folder = broadcast_object(prepare(cfg).folder if ranks.is_main else None)
    assert folder is not None
    capture(cfg, load_prepared(folder), ranks)
    shutdown()


if __name__ == "__main__":
    entry(main)
