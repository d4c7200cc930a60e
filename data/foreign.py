"""Streams that another engine computed: packed as the verifier's own, and compared with them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from conf.schema import JobError
from data.records import SampleStates, TokenizedSample
from data.state_check import PROBE_SAMPLES, probe_of
from data.states import BatchStates, batches, padded
from models.layerwise import finish
from models.verifier import Verifier, VerifierStates

# Two engines round differently in every layer, which in bfloat16 adds up to some percent; another
# layer's stream is some tens of percent away, another verifier's more than 1.
TOLERANCE = 0.1

Streams = Callable[[list[TokenizedSample]], list[Tensor]]  # [T, A+1, D] of each sample


def states_from(
    verifier: Verifier,
    samples: list[TokenizedSample],
    streams: list[Tensor],
    dtype: torch.dtype,
    batch_tokens: int,
) -> list[SampleStates]:
    """``streams`` [T, A+1, D] a sample: after the aux layers, and after the last one, unnormed.

    The final norm and the head are applied here, to batches of ``batch_tokens``; the decoder
    layers are not run.
    """
    found: dict[int, SampleStates] = {}
    for places in batches([len(sample.input_ids) for sample in samples], batch_tokens):
        some, theirs = [samples[i] for i in places], [streams[i] for i in places]
        states = BatchStates.of(verifier, some, as_batch(verifier, some, theirs), dtype)
        found.update(zip(places, states.arrived(), strict=True))
    return [found[place] for place in range(len(samples))]


def as_batch(
    verifier: Verifier, samples: list[TokenizedSample], streams: list[Tensor]
) -> VerifierStates:
    """As one right-padded batch: aux [B, T, A*D] and the last state after the final norm."""
    both = torch.nn.utils.rnn.pad_sequence(streams, batch_first=True)  # [B, T, A+1, D]
    both = both.to(verifier.device, verifier.dtype)
    ids = padded(samples)[0].to(verifier.device)
    return VerifierStates(both[:, :, :-1].flatten(2), finish(verifier, ids, both[:, :, -1]))


@torch.no_grad()
def check_streams(
    verifier: Verifier,
    streams: Streams,
    samples: Sequence[TokenizedSample],
    tolerance: float | None,
    source: str,
) -> None:
    """Compare what ``streams`` gives for a few samples with the library's own forward.

    Each aux stream must be nearer to the library's hidden_states[n] than to any other of them, and
    logits from the last one must be the library's, both within ``tolerance``. Raises JobError that
    begins with ``source``, the knob and value that named these streams.
    """
    step = -(-len(samples) // PROBE_SAMPLES)  # from everywhere, should some have been mixed up
    samples = list(samples[::step])
    probe = probe_of(samples)
    lengths = [len(sample.input_ids) for sample in probe]
    tolerance = tolerance or TOLERANCE
    ids, real = padded(probe)
    ids, real = ids.to(verifier.device), real.to(verifier.device)
    cut = [rows[: len(p.input_ids)] for rows, p in zip(streams(samples), probe, strict=True)]
    ours = as_batch(verifier, probe, cut)
    theirs = verifier.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    facts = verifier.facts
    known = [rows[real].float() for rows in theirs.hidden_states[:-1]]  # [N, D], n = 0..L-1
    aux = ours.aux[real].float().chunk(len(facts.aux_layers), -1)
    for n, rows in zip(facts.aux_layers, aux, strict=True):
        if n < facts.num_layers:  # the library shows the last one normed only
            refuse_other_layer(source, n, [worst(rows, one, lengths) for one in known], tolerance)
    found, wanted = verifier.logits_from(ours.last[real]).float(), theirs.logits[real].float()
    apart = worst(found, wanted, lengths)
    if not apart <= tolerance:
        raise JobError(
            f"{source}: logits from its last state are {apart:.3g} away from those of "
            f"{facts.path}, in units of their norm, and {tolerance:.3g} is allowed; it "
            f"must be this verifier's stream after all {facts.num_layers} layers, before the final "
            "norm, or capture.tolerance must allow more"
        )


def worst(rows: Tensor, known: Tensor, lengths: list[int]) -> float:
    """How far ``rows`` [N, D] are from ``known``, in units of its norm: of the worst sample.

    The mean over a sample's rows of what each row is off, because the first row of many models is
    a thousand times larger than the rest.
    """
    off = (rows - known).norm(dim=-1) / known.norm(dim=-1).clamp_min(1e-12)
    return max(float(part.mean()) for part in off.split(lengths))


def refuse_other_layer(source: str, n: int, apart: list[float], tolerance: float) -> None:
    nearest = min(range(len(apart)), key=lambda m: (not apart[m] >= 0, apart[m]))  # NaN is last
    if not apart[nearest] <= tolerance:
        raise JobError(
            f"{source}: the stream after {n} layers is {apart[n]:.3g} away from the verifier's "
            f"own, in units of its norm, and {tolerance:.3g} is allowed; give states of this "
            "verifier and of these very tokens, or let capture.tolerance allow more"
        )
    if nearest != n:
        raise JobError(
            f"{source}: what should be the stream after {n} layers is the one after {nearest} "
            f"({apart[nearest]:.3g} away from it, {apart[n]:.3g} from {n}); states must come from "
            "verifier.aux_layers, ascending: name the layers that they are from, or make them anew"
        )
