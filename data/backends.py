"""Where the states of a capture come from: one source for each capture.backend."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from conf.runtime import cache_dir, say
from conf.schema import ConfigError, MissingStates, RunConfig, StateBackend
from data.dumped import Dump, read_streams
from data.foreign import check_streams, states_from
from data.records import Part, SampleStates, TokenizedSample
from data.state_check import check_states
from data.states import BatchStates, batches, chunks, padded, states_of_chunk
from data.vllm_engine import VllmEngine, vllm_engine
from models.layerwise import states_by_layer
from models.placement import Placement
from models.verifier import Verifier

Waiting = Callable[[], list[SampleStates]]  # raises JobError


@dataclass(frozen=True)
class StateSource:
    """Gives the states of a batch of samples. What ``of`` returns gives them when it is called; a
    GPU is at work meanwhile."""

    cut: Callable[[list[int]], Iterable[list[int]]]  # lengths of samples -> places, by batch
    of: Callable[[list[TokenizedSample]], Waiting]  # raises JobError


@dataclass(frozen=True)
class Job:
    """What a source is opened for."""

    cfg: RunConfig
    device: torch.device
    dtype: torch.dtype  # of the stored states
    samples: Sequence[TokenizedSample]  # all that it will be asked for
    longest: int  # tokens of the longest of them

    def verifier(self, placement: Placement) -> Verifier:
        dtype = getattr(torch, self.cfg.verifier.dtype.value)
        return Verifier.load(self.cfg.verifier, cache_dir(self.cfg), self.device, dtype, placement)


@contextmanager
def state_source(job: Job) -> Iterator[StateSource]:
    """Open the source that capture.backend names; it is compared with the library on a few samples.

    Raises ConfigError for a source that cannot be had, JobError for one whose states are wrong.
    """
    backend = job.cfg.capture.backend
    if backend is StateBackend.layers:
        yield by_layer(job)
    elif backend is StateBackend.dumped:
        yield from_dump(job)
    elif backend is StateBackend.vllm:
        verifier = job.verifier(Placement.layers)
        with vllm_engine(job.cfg, verifier.facts, job.device, job.longest) as engine:
            yield from_vllm(job, verifier, engine)
    else:
        yield whole(job)


def whole(job: Job) -> StateSource:
    """The verifier in memory, this rank's own or, split, all ranks' together."""
    capture = job.cfg.capture
    verifier = job.verifier(Placement.ranks if capture.tensor_parallel else Placement.whole)
    check_states(verifier, verifier.states, job.samples, job.dtype, capture.tolerance)

    def start(samples: list[TokenizedSample]) -> Waiting:
        ids = padded(samples)[0].to(verifier.device)
        return BatchStates.of(verifier, samples, verifier.states(ids), job.dtype).arrived

    return StateSource(partial(batches, limit=capture.batch_tokens), start)


def by_layer(job: Job) -> StateSource:
    """A chunk at a time: as large as memory allows, since each costs one reading of the weights."""
    capture, verifier = job.cfg.capture, job.verifier(Placement.layers)

    def run(ids: Tensor):
        return states_by_layer(verifier, [ids])[0]

    check_states(verifier, run, job.samples, job.dtype, capture.tolerance)
    return StateSource(
        partial(chunks, limit=max(capture.chunk_tokens, capture.batch_tokens)),
        lambda samples: partial(
            states_of_chunk, verifier, samples, job.dtype, capture.batch_tokens
        ),
    )


def from_vllm(job: Job, verifier: Verifier, engine: VllmEngine) -> StateSource:
    """vLLM runs the layers; of ``verifier`` only final norm and head are used, and all to check."""
    capture = job.cfg.capture
    check_streams(verifier, engine.streams, job.samples, capture.tolerance, "capture.backend=vllm")
    return StateSource(
        partial(chunks, limit=max(capture.chunk_tokens, capture.batch_tokens)),
        lambda samples: partial(
            states_from,
            verifier,
            samples,
            engine.streams(samples),
            job.dtype,
            capture.batch_tokens,
        ),
    )


def from_dump(job: Job) -> StateSource:
    """Files of another program. Only embedding, final norm and head of the verifier are loaded.

    A sample without a usable file stops the capture before it begins, or is computed layer by
    layer: capture.missing decides. It is never left out.
    """
    capture, verifier = job.cfg.capture, job.verifier(Placement.layers)
    dump = Dump.open(Path(capture.dumped or "").expanduser(), verifier.facts, verifier.dtype)
    there = Part(job.samples, [i for i, one in enumerate(job.samples) if dump.find(one)])
    tell_missing(job, dump, there)

    def streams(samples: list[TokenizedSample]) -> list[Tensor]:
        return [read_streams(dump.find(sample) or dump.folder, sample) for sample in samples]

    def of(samples: list[TokenizedSample]) -> list[SampleStates]:
        found: dict[int, SampleStates] = {}
        for known in (True, False):
            places = [i for i, s in enumerate(samples) if (dump.find(s) is not None) is known]
            some = [samples[place] for place in places]
            if not some:
                continue
            if known:
                states = states_from(verifier, some, streams(some), job.dtype, capture.batch_tokens)
            else:
                states = states_of_chunk(verifier, some, job.dtype, capture.batch_tokens)
            found.update(zip(places, states, strict=True))
        return [found[place] for place in range(len(samples))]

    if there:
        source = f"capture.dumped={capture.dumped}"
        check_streams(verifier, streams, there, capture.tolerance, source)
    computes = capture.missing is MissingStates.compute
    limit = capture.chunk_tokens if computes else capture.batch_tokens
    cut = partial(chunks, limit=max(limit, capture.batch_tokens))
    return StateSource(cut, lambda samples: partial(of, samples))


def tell_missing(job: Job, dump: Dump, there: Sequence[TokenizedSample]) -> None:
    """Say how many samples have states; raise ConfigError if some have none and must have."""
    lacking = len(job.samples) - len(there)
    say(
        f"capture: {len(dump.files):,} sequences in {dump.folder}; {len(there):,} samples have "
        f"states there, {lacking:,} have none{dump.reasons()}"
    )
    if lacking and job.cfg.capture.missing is MissingStates.refuse:
        first = next(sample for sample in job.samples if dump.find(sample) is None)
        raise ConfigError(
            f"capture.dumped={dump.folder}: {lacking:,} of {len(job.samples):,} samples have no "
            f"usable states there, the first is {first.id} with {len(first.input_ids)} tokens"
            f"{dump.reasons()}; dump them with this template and data.max_length, or take "
            "capture.missing=compute"
        )
