"""The states that a verifier gives for a batch of samples, and the check that they are right."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from conf.schema import JobError
from data.chains import asking_rows
from data.fp8 import FP8, quantise, restored
from data.records import TokenizedSample
from data.shards import BY_TOKEN, SampleStates
from models.verifier import Verifier

HEAD_ROWS = 128  # whose logits exist at one time: 25 MB for 50,000 ids, which a CPU caches best
GPU_HEAD_ROWS = 1024  # a GPU reads the whole head for each block
BLOCK = 256  # ids that are compared at one go in search of the largest logit
TOLERANCE = 0.02
FP8_TOLERANCE = 0.1
PROBE_SAMPLES = 4
PROBE_TOKENS = 64  # a wrong layer shows in every row; more would only cost time


def states_of(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype
) -> list[SampleStates]:
    """Run ``samples`` as one right-padded batch -> their states on the CPU, aux and last in dtype.

    argmax and lse come from the verifier's own logits, before the states are rounded to ``dtype``;
    they and last are those of the rows that ask. Raises JobError naming the sample when a state or
    a logit is not finite.
    """
    return BatchStates.of(verifier, samples, dtype).arrived()


@dataclass(frozen=True)
class BatchStates:
    """The states of one batch on their way from the device to the CPU: ``arrived`` waits."""

    verifier: Verifier
    samples: list[TokenizedSample]
    found: SampleStates  # of all samples end to end
    asked: list[int]  # rows of each sample that ask
    copied: torch.cuda.Event | None  # None: nothing had to be copied

    @classmethod
    def of(
        cls, verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype
    ) -> "BatchStates":
        """Start what ``states_of`` tells. On a GPU this queues work and returns at once."""
        ids, real = padded(samples)
        device = verifier.device
        states = verifier.states(ids.to(device))
        lengths = [len(sample.input_ids) for sample in samples]
        mask = torch.cat([sample.loss_mask for sample in samples])
        asks = asking_rows(mask, torch.tensor([0, *lengths]).cumsum(0))
        rows = real.flatten().nonzero().flatten()  # [N] of the padded batch: padding is gone
        aux = states.aux.flatten(0, 1)[rows.to(device)]  # [N, A*D]
        last = states.last.flatten(0, 1)[rows[asks].to(device)]  # [L, D]
        argmax, lse = head_figures(verifier, last)
        aux, aux_scales = stored(aux, len(verifier.facts.aux_layers), dtype)
        last, last_scales = stored(last, 1, dtype)
        there = SampleStates(aux, last, argmax, lse, aux_scales, last_scales)
        asked = [int(part.sum()) for part in asks.split(lengths)]
        if device.type != "cuda":
            return cls(verifier, samples, there, asked, None)
        here = SampleStates(**{name: to_pinned(rows) for name, rows in named(there)})
        copied = torch.cuda.Event()
        copied.record()
        return cls(verifier, samples, here, asked, copied)

    def arrived(self) -> list[SampleStates]:
        """The states of each sample. Raises JobError when one is not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        lengths = [len(sample.input_ids) for sample in self.samples]
        by_sample: list[dict[str, Tensor]] = [{} for _ in lengths]
        for name, rows in named(self.found):
            sizes = lengths if name in BY_TOKEN else self.asked
            for one, part in zip(by_sample, rows.split(sizes), strict=True):
                one[name] = part
        found = [SampleStates(**one) for one in by_sample]
        for sample, states in zip(self.samples, found, strict=True):
            refuse_non_finite(self.verifier, sample, states)
        return found


def named(states: SampleStates) -> Iterator[tuple[str, Tensor]]:
    """The tensors that are there, by name."""
    for item in fields(states):
        rows = getattr(states, item.name)
        if rows is not None:
            yield item.name, rows


def to_pinned(rows: Tensor) -> Tensor:
    """Start a copy of ``rows`` from the GPU into pinned memory."""
    here = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return here.copy_(rows, non_blocking=True)


def head_figures(verifier: Verifier, last: Tensor) -> tuple[Tensor, Tensor]:
    """last [L, D] -> argmax [L] and log-sum-exp [L] fp32 of the verifier's logits.

    Beside the head's product this costs a sixth of it on a CPU: memory is used again from block to
    block, fresh pages would cost more than the arithmetic; softmax has the quickest exponential.
    """
    on_gpu = last.device.type == "cuda"
    argmax = torch.empty(len(last), dtype=torch.int64, device=last.device)
    lse = torch.empty(len(last), device=last.device)
    room: Tensor | None = None  # [2, rows, V]: logits and probabilities
    step = GPU_HEAD_ROWS if on_gpu else HEAD_ROWS
    for first in range(0, len(last), step):
        block = slice(first, first + step)
        logits = verifier.logits_from(last[block])
        if room is None:
            room = torch.empty(2, *logits.shape, device=last.device)
        exact, probabilities = room[:, : len(logits)]
        exact.copy_(logits)
        argmax[block], largest = first_largest(exact)
        torch.softmax(exact, -1, out=probabilities)
        lse[block] = largest - probabilities.amax(-1).log()
    return argmax, lse


def first_largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows [L, V] -> argmax [L], of equals the first, and maximum [L].

    The largest of each BLOCK ids, then the place within the one block: a CPU takes the maximum of
    many numbers ten times faster than its place.
    """
    size = rows.shape[-1]
    whole = size - size % BLOCK
    tops = rows[:, :whole].unflatten(-1, (whole // BLOCK, BLOCK)).amax(-1)  # [L, V // BLOCK]
    if whole < size:
        tops = torch.cat([tops, rows[:, whole:].amax(-1, keepdim=True)], dim=-1)
    largest, block = tops.max(-1)
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=rows.device)
    ids = ids.clamp_max(size - 1)  # behind the last id comes the last id again
    return block * BLOCK + rows.gather(-1, ids).argmax(-1), largest


def stored(rows: Tensor, states: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """rows [T, n*D] -> values in ``dtype``, and scales [T, n] in fp8."""
    return quantise(rows, states) if dtype == FP8 else (rows.to(dtype), None)


def refuse_non_finite(verifier: Verifier, sample: TokenizedSample, states: SampleStates) -> None:
    rows = (states.aux if states.aux_scales is None else states.aux_scales, states.lse)
    extremes = [edge for part in rows if part.numel() for edge in part.aminmax()]  # NaN stays NaN
    if not all(bool(edge.isfinite()) for edge in extremes):
        raise JobError(
            f"verifier.dtype={str(verifier.dtype).removeprefix('torch.')}: the verifier's "
            f"states for sample {sample.id} are not finite; try verifier.dtype=float32"
        )


def padded(samples: list[TokenizedSample]) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] with zeros behind each sample, and [B, T] bool: True on its own rows."""
    ids = torch.nn.utils.rnn.pad_sequence([s.input_ids for s in samples], batch_first=True)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def check_states(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, tolerance: float | None
) -> None:
    """Compare a few samples with the model library's own forward. Raises JobError when wrong.

    Teacher: the head applied to the stored last states gives the library's logits, by the root
    mean square of the worst row, within ``tolerance`` of the logits' own. Aux: the streams are the
    library's hidden_states[n], bit by bit. Both catch a state that is one layer off.
    """
    probe = [
        replace(  # every row asks
            sample,
            input_ids=sample.input_ids[:PROBE_TOKENS],
            loss_mask=torch.ones(len(sample.input_ids[:PROBE_TOKENS]), dtype=torch.bool),
        )
        for sample in samples[:PROBE_SAMPLES]
    ]
    check_last(verifier, probe, dtype, tolerance or (FP8_TOLERANCE if dtype == FP8 else TOLERANCE))
    check_aux(verifier, probe[0])


def check_last(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, tolerance: float
) -> None:
    ids, real = padded(samples)
    output = verifier.model(input_ids=ids.to(verifier.device), use_cache=False)
    ends = torch.tensor([len(sample.input_ids) for sample in samples]) - 1
    real[torch.arange(len(samples)), ends] = False  # the last row of a sample asks for nothing
    theirs = output.logits[real.to(verifier.device)].float()  # [L, V]
    found = states_of(verifier, samples, dtype)
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
