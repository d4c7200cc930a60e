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
EXACT_ROWS = 16  # of them in fp32 at one time: 6 MB, which the allocator hands out again and again
GPU_HEAD_ROWS = 1024  # a GPU reads the whole head for each block
BLOCK = 256  # ids that are compared at one go in search of the largest logit
TOLERANCE = 0.02
FP8_TOLERANCE = 0.1  # the worst row of SmolLM2-135M is 0.07 away, half of them 0.02
PROBE_SAMPLES = 4
PROBE_TOKENS = 32  # a wrong layer shows in every row; more would only cost time


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

    Beside the head's product this costs a sixth of it on a CPU. Memory is used again from block to
    block: fresh pages would cost more than the arithmetic.
    """
    on_gpu = last.device.type == "cuda"
    argmax = torch.empty(len(last), dtype=torch.int64, device=last.device)
    lse = torch.empty(len(last), device=last.device)
    room: Tensor | None = None  # [2, rows, V]: logits and probabilities
    first = 0
    for states in last.split(GPU_HEAD_ROWS if on_gpu else HEAD_ROWS):
        for logits in verifier.logits_from(states).split(GPU_HEAD_ROWS if on_gpu else EXACT_ROWS):
            if room is None:
                room = torch.empty(2, *logits.shape, device=last.device)
            block = slice(first, first + len(logits))
            exact, probabilities = room[:, : len(logits)]
            exact.copy_(logits)
            argmax[block], largest = first_largest(exact)
            torch.softmax(exact, -1, out=probabilities)  # the quickest exponential there is
            lse[block] = largest - probabilities.amax(-1).log()
            first += len(logits)
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
    library's hidden_states[n], bit by bit as stored. Both catch a state that is one layer off.
    """
    probe = [
        replace(  # every row but the last one asks
            sample,
            input_ids=sample.input_ids[:PROBE_TOKENS],
            loss_mask=torch.ones(len(sample.input_ids[:PROBE_TOKENS]), dtype=torch.bool),
        )
        for sample in samples[:PROBE_SAMPLES]
    ]
    ids, real = padded(probe)
    library = verifier.model(
        input_ids=ids.to(verifier.device), use_cache=False, output_hidden_states=True
    )
    found = states_of(verifier, probe, dtype)
    check_aux(
        verifier, found, [stream[real.to(stream.device)] for stream in library.hidden_states], dtype
    )
    ends = torch.tensor([len(sample.input_ids) for sample in probe]) - 1
    real[torch.arange(len(probe)), ends] = False
    tolerance = tolerance or (FP8_TOLERANCE if dtype == FP8 else TOLERANCE)
    check_last(verifier, found, library.logits[real.to(verifier.device)].float(), tolerance)


def check_last(
    verifier: Verifier, found: list[SampleStates], theirs: Tensor, tolerance: float
) -> None:
    """theirs [L, V]: the library's logits in the rows that ask."""
    last = torch.cat([restored(s.last, s.last_scales, verifier.dtype) for s in found])
    ours = verifier.logits_from(last.to(verifier.device)).float()
    worst = (ours - theirs).square().mean(-1).sqrt().max() / theirs.square().mean().sqrt()
    if not worst <= tolerance:
        dtype = str(found[0].last.dtype).removeprefix("torch.")
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
