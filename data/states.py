"""The states that a verifier gives for a batch of samples, and the check that they are right."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from conf.schema import JobError
from data.chains import asking_rows
from data.fp8 import FP8, quantise, restored
from data.records import TokenizedSample
from data.shards import SampleStates
from models.layerwise import states_by_layer
from models.verifier import Verifier, VerifierStates

HEAD_ROWS = 128  # whose logits exist at one time: 25 MB for 50,000 ids, which a CPU caches best
TOLERANCE = 0.02
FP8_TOLERANCE = 0.1
PROBE_SAMPLES = 4
PROBE_TOKENS = 64  # a wrong layer shows in every row; more would only cost time


def states_of(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype
) -> list[SampleStates]:
    """Run ``samples`` as one right-padded batch -> their states on the CPU, aux and last in dtype.

    Raises JobError naming the sample when a state or a logit is not finite.
    """
    ids = padded(samples)[0].to(verifier.device)
    return packed(verifier, samples, verifier.states(ids), dtype, device)


def states_of_chunk(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, batch_tokens: int
) -> list[SampleStates]:
    """The same, each layer over all ``samples`` before the next, in batches of ``batch_tokens``."""
    groups = list(batches([len(sample.input_ids) for sample in samples], batch_tokens))
    chosen = [[samples[place] for place in places] for places in groups]
    states = states_by_layer(verifier, [padded(some)[0] for some in chosen])
    found: dict[int, SampleStates] = {}
    for places, some in zip(groups, chosen, strict=True):
        parts = packed(verifier, some, states.pop(0), dtype)  # whose memory goes at once
        found.update(zip(places, parts, strict=True))
    return [found[place] for place in range(len(samples))]


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


def packed(
    verifier: Verifier,
    samples: list[TokenizedSample],
    states: VerifierStates,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> list[SampleStates]:
    """``states`` of ``samples`` as one right-padded batch -> what the cache keeps, on ``device``.

    argmax and lse come from the verifier's own logits, before the states are rounded to ``dtype``;
    they and last are those of the rows that ask.
    """
    real = padded(samples)[1]
    lengths = [len(sample.input_ids) for sample in samples]
    mask = torch.cat([sample.loss_mask for sample in samples])
    asks = asking_rows(mask, torch.tensor([0, *lengths]).cumsum(0))
    asked = [int(part.sum()) for part in asks.split(lengths)]
    rows = real.flatten().nonzero().flatten()  # [N] of the padded batch: padding is gone
    aux = states.aux.flatten(0, 1)[rows.to(verifier.device)]  # [N, A*D]
    last = states.last.flatten(0, 1)[rows[asks].to(verifier.device)]  # [L, D]
    parts = [verifier.logits_from(some).float() for some in last.split(HEAD_ROWS)]
    argmax = torch.cat([logits.argmax(-1) for logits in parts])
    lse = torch.cat([logits.logsumexp(-1) for logits in parts])
    aux, aux_scales = stored(aux, len(verifier.facts.aux_layers), dtype)
    last, last_scales = stored(last, 1, dtype)
    by_token = [split(rows, lengths) for rows in (aux, aux_scales)]
    by_asking = [split(rows, asked) for rows in (last, argmax, lse, last_scales)]
    found = [
        SampleStates(aux, last, argmax, lse, aux_scales, last_scales)
        for (aux, aux_scales), (last, argmax, lse, last_scales) in zip(
            zip(*by_token, strict=True), zip(*by_asking, strict=True), strict=True
        )
    ]
    for sample, one in zip(samples, found, strict=True):
        refuse_non_finite(verifier, sample, one)
    return found


def stored(rows: Tensor, states: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """rows [T, n*D] -> values in ``dtype``, and scales [T, n] in fp8."""
    return quantise(rows, states) if dtype == FP8 else (rows.to(dtype), None)


def split(rows: Tensor | None, lengths: list[int]) -> list[Tensor] | list[None]:
    return [None] * len(lengths) if rows is None else list(rows.cpu().split(lengths))


def refuse_non_finite(verifier: Verifier, sample: TokenizedSample, states: SampleStates) -> None:
    rows = (states.aux if states.aux_scales is None else states.aux_scales, states.lse)
    if not all(bool(part.isfinite().all()) for part in rows):
        raise JobError(
            f"verifier.dtype={str(verifier.dtype).removeprefix('torch.')}: the verifier's "
            f"states for sample {sample.id} are not finite; try verifier.dtype=float32"
        )


def padded(samples: list[TokenizedSample]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with zeros behind each sample, and [B, T] bool: True on its own rows."""
    ids = torch.nn.utils.rnn.pad_sequence([s.input_ids for s in samples], batch_first=True)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


Run = Callable[[Tensor], VerifierStates]  # token ids [B, T] -> their states


@torch.no_grad()
def check_states(
    verifier: Verifier,
    run: Run,
    samples: list[TokenizedSample],
    dtype: torch.dtype,
    tolerance: float | None,
) -> None:
    """Compare what ``run`` gives for a few samples with the model library's own forward.

    Raises JobError when it is wrong.

    Teacher: the head applied to the stored last states gives the library's logits, by the root
    mean square of the worst row, within ``tolerance`` of the logits' own. Aux: the streams are the
    library's hidden_states[n], bit by bit. Both catch a state that is one layer off.
    """
    probe = probe_of(samples)
    check_last(verifier, run, probe, dtype, tolerance)
    check_aux(verifier, run, probe[0])


def probe_of(samples: list[TokenizedSample]) -> list[TokenizedSample]:
    """The beginnings of a few samples; every row asks."""
    return [
        replace(
            sample,
            input_ids=sample.input_ids[:PROBE_TOKENS],
            loss_mask=torch.ones(len(sample.input_ids[:PROBE_TOKENS]), dtype=torch.bool),
        )
        for sample in samples[:PROBE_SAMPLES]
    ]


def allowed(tolerance: float | None, dtype: torch.dtype) -> float:
    return tolerance or (FP8_TOLERANCE if dtype == FP8 else TOLERANCE)


def check_last(
    verifier: Verifier,
    run: Run,
    samples: list[TokenizedSample],
    dtype: torch.dtype,
    tolerance: float | None,
) -> None:
    tolerance = allowed(tolerance, dtype)
    ids, real = padded(samples)
    output = verifier.model(input_ids=ids.to(verifier.device), use_cache=False)
    ends = torch.tensor([len(sample.input_ids) for sample in samples]) - 1
    real[torch.arange(len(samples)), ends] = False  # the last row of a sample asks for nothing
    theirs = output.logits[real.to(verifier.device)].float()  # [L, V]
    found = packed(verifier, samples, run(ids.to(verifier.device)), dtype)
    last = torch.cat([restored(s.last, s.last_scales, verifier.dtype) for s in found])
    ours = verifier.logits_from(last.to(verifier.device)).float()
    worst = (ours - theirs).square().mean(-1).sqrt().max() / theirs.square().mean().sqrt()
    if not worst <= tolerance:
        raise JobError(
            f"capture.tolerance={tolerance}: the head applied to the stored last states is "
            f"{worst:.3g} away from the logits of {verifier.facts.path}, in units of their root "
            "mean square; the last state must be the one after the final norm, or "
            f"capture.dtype={str(dtype).removeprefix('torch.')} is too coarse: try float32 there, "
            "or allow more"
        )


def check_aux(verifier: Verifier, run: Run, sample: TokenizedSample) -> None:
    """The stream after the last layer is not compared: the library shows it normed only."""
    facts = verifier.facts
    ids = sample.input_ids[None].to(verifier.device)
    output = verifier.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    streams = run(ids).aux.chunk(len(facts.aux_layers), -1)
    for n, stream in zip(facts.aux_layers, streams, strict=True):
        if n < facts.num_layers and not torch.equal(stream, output.hidden_states[n]):
            raise JobError(
                f"verifier.aux_layers={facts.aux_layers}: stream {n} of {facts.path} is not the "
                f"library's hidden_states[{n}]; {facts.architectures} cannot be captured, "
                "choose another verifier"
            )
