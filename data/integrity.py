"""Whether the shards of a cache still hold what was written into them: samples of it, or all."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from conf.runtime import RankInfo, progress
from conf.schema import ConfigError, Verify
from data.distributed import gather_objects
from data.manifest import Manifest, ShardEntry, misfit, shard_folder
from data.publish import settle, stored_entry
from data.shard_file import damaged_sample, describe, index_digest, is_whole
from data.shard_plan import ShardSpan
from data.staging import Staging
from models.bundled import sha256_of

SAMPLED = 256  # samples of the whole cache, evenly spaced: 16 GB of 2048 tokens at width 4096
THREADS = 8  # that read; hashing one file gives 1.4 GB/s


@dataclass(frozen=True)
class Look:
    """At one shard."""

    found: ShardEntry | str | None  # as it is whole, what is wrong with it, or nothing there
    sent: bool  # the store has it, or there is none


@dataclass(frozen=True)
class Findings:
    """Of all ranks together."""

    whole: list[ShardEntry]  # shards that need not be written
    faults: list[str]  # of files that a manifest promises, or that are there and damaged
    unsent: int  # whole shards that lie here, and not whole in the store that there is

    @classmethod
    def of(cls, looks: list[Look]) -> "Findings":
        return cls(
            whole=[one.found for one in looks if isinstance(one.found, ShardEntry)],
            faults=[one.found for one in looks if isinstance(one.found, str)],
            unsent=sum(isinstance(one.found, ShardEntry) and not one.sent for one in looks),
        )


def examine(
    folder: Path,
    spans: list[ShardSpan],
    manifest: Manifest,
    verify: Verify,
    ranks: RankInfo,
    stage: Staging | None = None,
) -> Findings:
    """Look at the files of ``spans``, each rank at its share of them, and into the store.

    A shard that ``manifest`` knows is compared with it, as far as ``verify`` says. One that no
    manifest knows, left by a capture that was killed, is read in full, which its checksum needs.
    """
    mine = spans[ranks.rank :: ranks.world_size]
    known = {entry.name: entry for entry in manifest.shards}
    step = max(1, sum(span.count for span in spans) // SAMPLED)

    def look(span: ShardSpan) -> Look:
        entry = known.get(span.name)
        if entry is None:
            here = unknown_shard(folder, span, manifest.source)
        else:
            places = range(-span.first % step, span.count, step)
            here = fault_of(folder, entry, verify, places) or entry
        if stage is None:
            return Look(here, sent=True)
        stored = stored_entry(stage, span, entry, manifest.source, verify)
        return Look(settle(stage, here, stored, span), sent=stored is not None)

    if stage is None and not shard_folder(folder).is_dir():
        mine = []
    # One torch thread each: workers of their own would fight for the cores.
    with ThreadPoolExecutor(
        min(THREADS, os.cpu_count() or 1), "checker", torch.set_num_threads, (1,)
    ) as pool:
        looked = pool.map(look, mine)
        if mine:
            looked = progress(looked, len(mine), "check shards", "shard")
        found = [one for part in gather_objects(list(looked)) for one in part]
    return Findings.of(found)


def unknown_shard(folder: Path, span: ShardSpan, capture: str) -> ShardEntry | str | None:
    """The entry of a whole shard, what is wrong with a damaged one, None for one that is cut."""
    if not is_whole(folder, span, capture):
        return None
    try:
        return describe(folder, span.name)
    except (ConfigError, SafetensorError) as error:
        return str(error)


def fault_of(folder: Path, entry: ShardEntry, verify: Verify, places: range) -> str | None:
    """What of a shard is not as the manifest says; ``sampled`` reads the samples ``places``."""
    wrong = misfit(folder, entry)
    if wrong:
        return wrong
    path = shard_folder(folder) / entry.name
    if verify is Verify.full:
        found, wanted = sha256_of(path), entry.sha256
        return None if found == wanted else f"{path}: sha256 is {found}, must be {wanted}"
    try:
        index = index_digest(path)
        if index != entry.index:
            return f"{path}: its index is {index}, must be {entry.index} by the manifest"
        wrong = damaged_sample(path, places)
    except SafetensorError as error:
        wrong = f"not a shard of this format ({error})"
    return f"{path}: {wrong}" if wrong else None
