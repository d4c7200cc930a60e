"""A capture job: which states are wanted, which shards are missing, and whether they fit."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from conf.runtime import RankInfo, cache_dir, fingerprint, say
from conf.schema import ConfigError, JobError, RunConfig, StateBackend
from data.distributed import barrier, broadcast_object
from data.dumped import listing
from data.integrity import examine
from data.manifest import FORMAT_VERSION, Manifest, manifest_file, read_manifest, shard_folder
from data.publish import is_published, pull_manifest
from data.records import PreparedData
from data.render import ChatTemplate, tokenizer_fingerprint
from data.shard_plan import RowSizes, ShardSpan, cut_spans, plan_spans
from data.staging import GIB, Staging
from models.bundled import resolve
from models.verifier import VerifierFacts, load_facts, load_tokenizer, weights_fingerprint

MIB = 1 << 20
UNDECIDED = ("verifier_path", "backend", "dump", "shards")  # of a manifest: not in its fingerprint
RESOURCES = (  # arguments of vLLM that decide how much and how fast, not what
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
)


@dataclass(frozen=True)
class CaptureJob:
    """What is wanted and what is there, the same on every rank."""

    folder: Path
    manifest: Manifest  # its shards: those that need not be written
    spans: list[ShardSpan]  # all shards, or those of capture.part
    problem: str = ""  # with an earlier cache that was complete
    complete: bool = False

    @property
    def todo(self) -> list[ShardSpan]:
        there = {entry.name for entry in self.manifest.shards}
        return [span for span in self.spans if span.name not in there]


def take(cfg: RunConfig, prepared: PreparedData, ranks: RankInfo, held: ExitStack) -> CaptureJob:
    """Look for a complete cache; where there is none, keep other captures out and look again.

    Another capture may have ended between the two, or have left shards for this one to take over.
    """
    job = broadcast_object(plan(cfg, prepared) if ranks.is_main else None)
    assert job is not None
    if job.manifest.shards:
        job = looked_at(cfg, job, ranks)
    if job.complete:
        return job
    new = not job.folder.exists()
    if ranks.is_main:
        if new:  # nothing is made in vain
            check_space(cfg, job.folder, job.spans)
        held.enter_context(writer_of(cfg, job.folder))
    barrier()
    job = broadcast_object(plan(cfg, prepared) if ranks.is_main else None)
    assert job is not None
    job = looked_at(cfg, job, ranks)
    if ranks.is_main and not job.complete:
        if job.problem:
            say(f"capture: mending an incomplete cache ({job.problem})")
        if not new:
            check_space(cfg, job.folder, job.todo)
        for leftover in shard_folder(job.folder).glob("*.tmp"):
            if leftover.stem in {span.name for span in job.spans}:  # no other part's
                leftover.unlink()  # of a run that was killed
    barrier()
    return job


def looked_at(cfg: RunConfig, job: CaptureJob, ranks: RankInfo) -> CaptureJob:
    """Look on all ranks at the shards of an earlier capture."""
    promised = bool(job.manifest.shards)
    stage = Staging.of(cfg, job.folder)
    found = examine(job.folder, job.spans, job.manifest, cfg.capture.verify, ranks, stage)
    problem = job.problem
    if found.faults:
        more = f", and {len(found.faults) - 1} more" if len(found.faults) > 1 else ""
        problem = f"{found.faults[0]}{more}"
    job = replace(job, manifest=replace(job.manifest, shards=found.whole), problem=problem)
    stored = stage is None or (not found.unsent and is_published(stage))
    return replace(job, complete=promised and not job.todo and stored)


def plan(cfg: RunConfig, prepared: PreparedData) -> CaptureJob:
    """How the samples are cut into shards: as in the manifest that is there, else anew. Of those
    a capture in parts plans its own alone.

    With capture.store its manifest comes before the one on the disk.
    """
    facts = load_facts(cfg.verifier, cache_dir(cfg))
    dumped = cfg.capture.dumped
    dump = listing(Path(dumped).expanduser()) if dumped else ""
    manifest = replace(manifest_of(cfg, prepared, facts), dump=dump)
    problem = ""
    folder = cache_dir(cfg) / f"capture-{manifest.fingerprint}"
    lengths, asking = prepared.samples.lengths, prepared.samples.asking
    sizes = RowSizes.of(facts.hidden_size, len(facts.aux_layers), getattr(torch, manifest.dtype))
    stage = Staging.of(cfg, folder)
    if stage is not None:
        pull_manifest(stage)
    if manifest_file(folder).exists():
        try:
            found = read_manifest(folder)
            refuse_other_dump(cfg, manifest, found)
            refuse_other_facts(manifest, found, manifest_file(folder))
            manifest = replace(manifest, shards=found.shards, dump=found.dump)
        except ConfigError as error:
            problem = str(error)
    spans = plan_spans(lengths, asking, sizes, cfg.capture.shard_mib * MIB, chunk_of(cfg))
    counts = [entry.samples for entry in manifest.shards]
    if sum(counts) == len(lengths):
        spans = cut_spans(lengths, asking, sizes, counts)
    else:
        manifest = replace(manifest, shards=[])
    parts, part = cfg.capture.parts, cfg.capture.part
    own = [span for span in spans if span.number % parts == part]
    return CaptureJob(folder, manifest, own, problem)


def chunk_of(cfg: RunConfig) -> int:
    """Tokens that a shard may hold at any size: each shard costs one reading of the weights."""
    return cfg.capture.chunk_tokens if cfg.capture.backend is StateBackend.layers else 0


def refuse_other_facts(wanted: Manifest, found: Manifest, path: Path) -> None:
    """Raises ConfigError when a manifest does not say what its folder's name stands for."""
    for name in (item.name for item in fields(Manifest) if item.name not in UNDECIDED):
        theirs, ours = getattr(found, name), getattr(wanted, name)
        if theirs != ours:
            raise ConfigError(f"{path}: {name}={theirs} must be {ours}; it is written again")


def manifest_of(cfg: RunConfig, prepared: PreparedData, facts: VerifierFacts) -> Manifest:
    """Describe the cache to be. Its fingerprint covers what decides the states, and no more.

    The library's states are the same whole, layer by layer or split over ranks, but for the last
    bits, as they are in other batches; another engine's are not, nor are those of other files.
    """
    cache = cache_dir(cfg)
    weights = weights_fingerprint(resolve(cfg.verifier.path, cache))
    tokenizer = load_tokenizer(cfg.verifier, cache)
    dtype, computed_in = cfg.capture.dtype, cfg.verifier.dtype
    return Manifest(
        format_version=FORMAT_VERSION,
        fingerprint=fingerprint(
            FORMAT_VERSION,
            weights,
            facts.aux_layers,
            dtype,
            computed_in,
            prepared.fingerprint,
            *engine_of(cfg),
        ),
        verifier=weights,
        verifier_path=cfg.verifier.path,
        verifier_dtype=computed_in.value,
        prepared=prepared.fingerprint,
        tokenizer=tokenizer_fingerprint(tokenizer),
        template=ChatTemplate(tokenizer, cfg.data.template_kwargs).fingerprint(),
        dtype=dtype.value,
        hidden_size=facts.hidden_size,
        aux_layers=facts.aux_layers,
        backend=cfg.capture.backend.value,
        dump="",  # only a capture reads the files
    )


def engine_of(cfg: RunConfig) -> list[object]:
    """What else decides states that are not the library's own; nothing for those that are.

    Dumped files count by their folder, so that they may be deleted once they are packed.
    """
    backend, dumped = cfg.capture.backend, cfg.capture.dumped
    if backend is StateBackend.vllm:
        chosen = {k: v for k, v in cfg.capture.vllm_args.items() if k not in RESOURCES}
        return [backend, chosen]
    return [backend, str(Path(dumped).expanduser().resolve())] if dumped else []


def refuse_other_dump(cfg: RunConfig, wanted: Manifest, found: Manifest) -> None:
    """Raises JobError when the dumped files are there and are not those that were packed."""
    there = cfg.capture.dumped and Path(cfg.capture.dumped).expanduser().is_dir()
    if there and wanted.dump != found.dump:
        raise JobError(
            f"capture.dumped={cfg.capture.dumped}: its files give {wanted.dump} and "
            f"the cache was packed from {found.dump}; put the new files into another folder, "
            "or set another run.cache"
        )


def check_space(cfg: RunConfig, folder: Path, todo: list[ShardSpan]) -> None:
    """Print what the missing shards need. Raises ConfigError before anything is written."""
    need = sum(span.bytes for span in todo)
    need += need // 100 + MIB  # headers and the manifest
    if cfg.capture.stage_gib is not None:  # what was sent to the store may go
        need = min(need, int(cfg.capture.stage_gib * GIB))
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    tokens = sum(span.tokens for span in todo)
    say(
        f"capture: {len(todo)} shards with {tokens:,} tokens need {need / 1e9:.3g} GB of "
        f"{free / 1e9:.3g} GB free, into {folder}"
    )
    if need > free:
        raise ConfigError(
            f"run.cache={cfg.run.cache}: the hidden states need {need / 1e9:.3g} GB and "
            f"{free / 1e9:.3g} GB are free; make room or set run.cache to a larger disk"
        )


def writer_of(cfg: RunConfig, folder: Path) -> AbstractContextManager[None]:
    """The right to write what this capture plans: all, or its part beside the other parts."""
    capture = cfg.capture
    if capture.parts == 1:
        return sole_writer(folder)
    return writer_beside(folder, f".part-{capture.part}-of-{capture.parts}.lock")


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep every other capture out of ``folder``."""
    with locked(folder, ".lock", fcntl.LOCK_EX):
        yield


@contextmanager
def writer_beside(folder: Path, own: str) -> Iterator[None]:
    """Keep out whole captures, and the same part once more; other parts may write meanwhile."""
    with locked(folder, ".lock", fcntl.LOCK_SH), locked(folder, own, fcntl.LOCK_EX):
        yield


@contextmanager
def locked(folder: Path, name: str, kind: int) -> Iterator[None]:
    """The system frees the lock however this process ends."""
    shard_folder(folder).mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+") as file:  # NFS shares no lock on a file open for writing alone
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is capturing into it; wait for its end and run the "
                "same command again, or set another run.cache"
            ) from None
        yield
