"""The check that captured states are right, while the verifier is in memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from conf.schema import JobError, StateDtype
from data.fp8 import FP8, restored
from data.records import SampleStates, TokenizedSample
from data.states import BatchStates, padded, stored
from models.verifier import Verifier, VerifierStates

TOLERANCE = 0.02
FP8_TOLERANCE = 0.1  # the worst row of SmolLM2-135M is 0.07 away, half of them 0.02
PROBE_SAMPLES = 4
PROBE_TOKENS = 32  # a wrong layer shows in every row; more would only cost time

Run = Callable[[Tensor], VerifierStates]  # token ids [B, T] -> their states


@torch.no_grad()
def check_states(
    verifier: Verifier,
    run: Run,
    samples: Sequence[TokenizedSample],
    dtype: torch.dtype,
    tolerance: float | None,
) -> None:
    """Compare what ``run`` gives for a few samples with the model library's own forward.

    Raises JobError when it is wrong.

    Teacher: the head applied to the stored last states gives the library's logits, by the root
    mean square of the worst row, within ``tolerance`` of the logits' own. Aux: the streams are the
    library's hidden_states[n], bit by bit as stored. Both catch a state that is one layer off.
    """
    asking = list(islice((one for one in samples if len(one.input_ids) > 1), PROBE_SAMPLES))
    probe = probe_of(asking or samples)
    ids, real = padded(probe)
    ids = ids.to(verifier.device)
    library = verifier.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    found = BatchStates.of(verifier, probe, run(ids), dtype).arrived()
    check_aux(
        verifier, found, [stream[real.to(stream.device)] for stream in library.hidden_states], dtype
    )
    ends = torch.tensor([len(sample.input_ids) for sample in probe]) - 1
    real[torch.arange(len(probe)), ends] = False
    if not asking:
        return  # samples of one token have no last state
    tolerance = tolerance or (FP8_TOLERANCE if dtype == FP8 else TOLERANCE)
    check_last(verifier, found, library.logits[real.to(verifier.device)].float(), tolerance)


def probe_of(samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
    """The beginnings of a few samples; every row but the last one asks."""
    return [
        replace(
            sample,
            input_ids=sample.input_ids[:PROBE_TOKENS],
            loss_mask=torch.ones(len(sample.input_ids[:PROBE_TOKENS]), dtype=torch.bool),
        )
        for sample in samples[:PROBE_SAMPLES]
    ]


def check_last(
    verifier: Verifier, found: list[SampleStates], theirs: Tensor, tolerance: float
) -> None:
    """theirs [L, V]: the library's logits in the rows that ask."""
    last = torch.cat([restored(s.last, s.last_scales, verifier.dtype) for s in found])
    ours = verifier.logits_from(last.to(verifier.device)).float()
    worst = (ours - theirs).square().mean(-1).sqrt().max() / theirs.square().mean().sqrt()
    if not worst <= tolerance:
        dtype = StateDtype(str(found[0].last.dtype).removeprefix("torch.")).name
        raise JobError(
            f"capture.tolerance={tolerance}: the head applied to the stored last states is "
            f"{worst:.3g} away from the logits of {verifier.facts.path}, in units of their root "
            "mean square; the last state must be the one after the final norm, or "
            f"capture.dtype={dtype} is too coarse: try float32 there, or allow more"
        )


def check_aux(
    verifier: Verifier, found: list[SampleStates], streams: list[Tensor], dtype: torch.dtype
) -> None:
    """streams: the library's [T, D] after 0, 1, ... layers; the last one is normed, so not ours."""
    facts = verifier.facts
    width = facts.hidden_size
    for place, n in enumerate(facts.aux_layers):
        theirs, scales = stored(streams[n], 1, dtype)
        same = torch.equal(
            torch.cat([one.aux[:, place * width : (place + 1) * width] for one in found]),
            theirs.cpu(),
        )
        if scales is not None:
            ours = [one.aux_scales[:, place] for one in found if one.aux_scales is not None]
            same = same and torch.equal(torch.cat(ours), scales[:, 0].cpu())
        if n < facts.num_layers and not same:
            raise JobError(
                f"verifier.aux_layers={facts.aux_layers}: stream {n} of {facts.path} is not the "
                f"library's hidden_states[{n}]; {facts.architectures} cannot be captured, "
                "choose another verifier"
            )
