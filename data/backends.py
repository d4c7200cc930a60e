"""Where the states of a capture come from: one source for each capture.backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from conf.runtime import cache_dir
from conf.schema import RunConfig, StateBackend
from data.records import TokenizedSample
from data.shards import SampleStates
from data.states import check_states, states_of, states_of_chunk
from models.layerwise import states_by_layer
from models.placement import Placement
from models.verifier import Verifier


@dataclass(frozen=True)
class StateSource:
    """Gives the states of a batch of samples, and checks itself on a few before it is trusted."""

    batch_tokens: int  # to ask for at a time, padding included
    of: Callable[[list[TokenizedSample]], list[SampleStates]]  # Raises JobError
    check: Callable[[list[TokenizedSample]], None]  # Raises JobError


@contextmanager
def state_source(cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> Iterator[StateSource]:
    """Open the source that ``cfg.capture.backend`` names; ``dtype`` is that of the stored states.

    Raises ConfigError: no verifier, files, or vLLM of this kind.
    """
    if cfg.capture.backend is StateBackend.layers:
        yield by_layer(cfg, device, dtype)
    else:
        yield whole(cfg, device, dtype)


def whole(cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> StateSource:
    """The verifier in memory, this rank's own or, split, all ranks' together."""
    split = cfg.capture.tensor_parallel
    verifier = load(cfg, device, Placement.ranks if split else Placement.whole)
    return StateSource(
        cfg.capture.batch_tokens,
        of=lambda samples: states_of(verifier, samples, dtype),
        check=lambda samples: check_states(
            verifier, verifier.states, samples, dtype, cfg.capture.tolerance
        ),
    )


def by_layer(cfg: RunConfig, device: torch.device, dtype: torch.dtype) -> StateSource:
    verifier, batch_tokens = load(cfg, device, Placement.layers), cfg.capture.batch_tokens
    return StateSource(
        max(cfg.capture.chunk_tokens, batch_tokens),
        of=lambda samples: states_of_chunk(verifier, samples, dtype, batch_tokens),
        check=lambda samples: check_states(
            verifier,
            lambda ids: states_by_layer(verifier, [ids])[0],
            samples,
            dtype,
            cfg.capture.tolerance,
        ),
    )


def load(cfg: RunConfig, device: torch.device, placement: Placement) -> Verifier:
    dtype = getattr(torch, cfg.verifier.dtype.value)
    return Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype, placement)
