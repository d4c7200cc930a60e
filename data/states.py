"""The states that a verifier gives for a batch of samples, and the check that they are right."""

from dataclasses import replace

import torch
from torch import Tensor

from conf.schema import JobError
from data.records import TokenizedSample
from data.shards import SampleStates
from models.verifier import Verifier

HEAD_ROWS = 128  # whose logits exist at one time: 25 MB for 50,000 ids, which a CPU caches best
PROBE_SAMPLES = 4
PROBE_TOKENS = 64  # a wrong layer shows in every row; more would only cost time


def states_of(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype
) -> list[SampleStates]:
    """Run ``samples`` as one right-padded batch -> their states on the CPU, aux and last in dtype.

    argmax and lse come from the verifier's own logits, before the states are rounded to ``dtype``.
    Raises JobError naming the sample when its logits are not finite.
    """
    ids, real = padded(samples)
    states = verifier.states(ids.to(verifier.device))
    real = real.to(verifier.device)
    aux, last = states.aux[real], states.last[real]  # [N, A*D], [N, D]: padding is gone
    parts = [verifier.logits_from(rows).float() for rows in last.split(HEAD_ROWS)]
    argmax = torch.cat([logits.argmax(-1) for logits in parts])
    lse = torch.cat([logits.logsumexp(-1) for logits in parts])
    lengths = [len(sample.input_ids) for sample in samples]
    flat = (aux.to(dtype), last.to(dtype), argmax, lse)
    columns = [rows.cpu().split(lengths) for rows in flat]
    found = [SampleStates(*rows) for rows in zip(*columns, strict=True)]
    for sample, one in zip(samples, found, strict=True):
        if not one.lse.isfinite().all():  # whatever overflows in a stream reaches the logits
            raise JobError(
                f"verifier.dtype={str(verifier.dtype).removeprefix('torch.')}: the verifier's "
                f"logits for sample {sample.id} are not finite; try verifier.dtype=float32"
            )
    return found


def padded(samples: list[TokenizedSample]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with zeros behind each sample, and [B, T] bool: True on its own rows."""
    ids = torch.nn.utils.rnn.pad_sequence([s.input_ids for s in samples], batch_first=True)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def check_states(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, tolerance: float
) -> None:
    """Compare a few samples with the model library's own forward. Raises JobError when wrong.

    Teacher: the head applied to the stored last states gives the library's logits, by the root
    mean square of the worst row, within ``tolerance`` of the logits' own. Aux: the streams are the
    library's hidden_states[n], bit by bit. Both catch a state that is one layer off.
    """
    probe = [
        replace(
            sample,
            input_ids=sample.input_ids[:PROBE_TOKENS],
            loss_mask=sample.loss_mask[:PROBE_TOKENS],
        )
        for sample in samples[:PROBE_SAMPLES]
    ]
    check_last(verifier, probe, dtype, tolerance)
    check_aux(verifier, probe[0])


def check_last(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, tolerance: float
) -> None:
    ids, real = padded(samples)
    output = verifier.model(input_ids=ids.to(verifier.device), use_cache=False)
    theirs = output.logits[real.to(verifier.device)].float()  # [N, V]
    stored = torch.cat([states.last for states in states_of(verifier, samples, dtype)])
    ours = verifier.logits_from(stored.to(verifier.device, verifier.dtype)).float()
    worst = (ours - theirs).square().mean(-1).sqrt().max() / theirs.square().mean().sqrt()
    if not worst <= tolerance:
        raise JobError(
            f"capture.tolerance={tolerance}: the head applied to the stored last states is "
            f"{worst:.3g} away from the logits of {verifier.facts.path}, in units of their root "
            "mean square; the last state must be the one after the final norm, or "
            f"capture.dtype={str(dtype).removeprefix('torch.')} is too coarse: try float32 there, "
            "or allow more"
        )


def check_aux(verifier: Verifier, sample: TokenizedSample) -> None:
    """The stream after the last layer is not compared: the library shows it normed only."""
    facts = verifier.facts
    ids = sample.input_ids[None].to(verifier.device)
    output = verifier.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    streams = verifier.states(ids).aux.chunk(len(facts.aux_layers), -1)
    for n, stream in zip(facts.aux_layers, streams, strict=True):
        if n < facts.num_layers and not torch.equal(stream, output.hidden_states[n]):
            raise JobError(
                f"verifier.aux_layers={facts.aux_layers}: stream {n} of {facts.path} is not the "
                f"library's hidden_states[{n}]; {facts.architectures} cannot be captured, "
                "choose another verifier"
            )
