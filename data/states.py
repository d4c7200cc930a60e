"""The states that a verifier gives for a batch of samples."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import JobError
from data.chains import asking_rows
from data.fp8 import FP8, quantise
from data.records import SampleStates, TokenizedSample, named
from data.shards import BY_TOKEN
from models.layerwise import states_by_layer
from models.verifier import Verifier, VerifierStates

HEAD_ROWS = 128  # whose logits exist at one time: 25 MB for 50,000 ids, which a CPU caches best
EXACT_ROWS = 16  # of them in fp32 at one time: 6 MB, which the allocator hands out again and again
GPU_HEAD_ROWS = 1024  # a GPU reads the whole head for each block
BLOCK = 256  # ids that are compared at one go in search of the largest logit


def states_of(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype
) -> list[SampleStates]:
    """Run ``samples`` as one right-padded batch -> their states on the CPU, aux and last in dtype.

    Raises JobError naming the sample when a state or a logit is not finite.
    """
    states = verifier.states(padded(samples)[0].to(verifier.device))
    return BatchStates.of(verifier, samples, states, dtype).arrived()


def states_of_chunk(
    verifier: Verifier, samples: list[TokenizedSample], dtype: torch.dtype, batch_tokens: int
) -> list[SampleStates]:
    """The same, each layer over all ``samples`` before the next, in batches of ``batch_tokens``."""
    groups = list(batches([len(sample.input_ids) for sample in samples], batch_tokens))
    chosen = [[samples[place] for place in places] for places in groups]
    states = states_by_layer(verifier, [padded(some)[0] for some in chosen])
    found: dict[int, SampleStates] = {}
    for places, some in zip(groups, chosen, strict=True):
        parts = BatchStates.of(verifier, some, states.pop(0), dtype)  # whose memory goes at once
        found.update(zip(places, parts.arrived(), strict=True))
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


def chunks(lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Group samples, longest first, to at most ``limit`` tokens, for what pads them by itself."""
    chunk: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if chunk and tokens + lengths[place] > limit:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(place)
        tokens += lengths[place]
    if chunk:
        yield chunk


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
        cls,
        verifier: Verifier,
        samples: list[TokenizedSample],
        states: VerifierStates,
        dtype: torch.dtype,
    ) -> "BatchStates":
        """``states`` of ``samples`` as one right-padded batch, packed as the cache keeps them.

        argmax and lse come from the verifier's own logits, before the states are rounded to
        ``dtype``; they and last are those of the rows that ask. On a GPU this queues work and
        returns at once.
        """
        real, device = padded(samples)[1], verifier.device
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
