"""The loader: cached samples in a reproducible order, as the batches of whole optimizer steps."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from conf.runtime import RankInfo, fingerprint
from conf.schema import ConfigError, OptimSection, TTTSection
from data.chains import Chains, asking_rows
from data.fp8 import FP8, restored
from data.packer import pack
from data.reader import ShardReader
from data.records import CachedSample, TokenizedSample, TTTBatch
from models.runs import with_moved

AHEAD = 2  # windows read in the background


@dataclass(frozen=True)
class StepWindow:
    """What one rank computes in one optimizer step: equally many batches on every rank."""

    batches: list[TTTBatch]


class TrainLoader:
    """Deals the training samples of ``reader`` to steps and ranks.

    Samples are shuffled once an epoch by (seed, epoch). A step takes the next optim.batch_size of
    that order, the last one of an epoch what is left. Inside a step they are sorted by length,
    longest first, rank r of W takes r, r+W, ... and packs its share into micro-batches: ranks are
    balanced, and the set of samples a step sees does not depend on W. All of it follows from the
    step number, which is the loader's whole state.
    """

    def __init__(
        self,
        reader: ShardReader,
        optim: OptimSection,
        ttt: TTTSection,
        seed: int,
        ranks: RankInfo,
    ):
        """Raises ConfigError when the cache holds no training sample."""
        if not reader.train_indices:
            raise ConfigError(
                f"data.valid_share: all {len(reader)} samples are held out and none is left to "
                "train on; hold out less or give more data in data.path"
            )
        self.reader = reader
        self.indices = torch.tensor(reader.train_indices)
        self.optim = optim
        self.ttt = ttt
        self.seed = seed
        self.ranks = ranks

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.indices) // self.optim.batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training: optim.epochs passes, or optim.max_steps if fewer."""
        steps = max(1, round(self.optim.epochs * self.steps_per_epoch))
        return min(steps, self.optim.max_steps or steps)

    def windows(self, start_step: int = 0) -> Iterator[StepWindow]:
        """The windows of steps start_step, ..., total_steps-1, two of them read ahead.

        An error while reading is raised here; closing the iterator ends the reading thread.
        """
        steps = iter(range(start_step, self.total_steps))
        ahead: deque[Future[StepWindow]] = deque()
        # One thread, or the reader would start OpenMP workers of its own: more workers than cores
        # sleep at every barrier instead of spinning, and a CPU step takes a third longer.
        pool = ThreadPoolExecutor(1, "loader", initializer=torch.set_num_threads, initargs=(1,))
        try:
            for step in islice(steps, AHEAD):
                ahead.append(pool.submit(self.window, step))
            while ahead:
                window = ahead.popleft().result()
                for step in islice(steps, 1):
                    ahead.append(pool.submit(self.window, step))
                yield window
        finally:
            pool.shutdown(cancel_futures=True)

    def window(self, step: int) -> StepWindow:
        """This rank's part of one step, read from the cache."""
        shares = self.packs(step)
        packs = shares[self.ranks.rank]
        idle = [[] for _ in range(max(map(len, shares)) - len(packs))]
        batches = [self.batch(pack) for pack in packs + idle]
        if torch.cuda.is_initialized():  # a copy from pinned memory overlaps with computation
            batches = [moved_batch(batch, Tensor.pin_memory) for batch in batches]
        return StepWindow(batches)

    def batch(self, pack: list[int]) -> TTTBatch:
        """The samples ``pack`` end to end; an empty one still has a row, and nothing supervised."""
        samples = [self.reader.read(index) for index in pack] or [self.idle_sample()]
        mask = torch.cat([cached.sample.loss_mask for cached in samples])
        starts = starts_of(samples)
        chains = Chains.of(mask, starts, self.ttt.depth, self.ttt.supervise)
        return collate(samples, chains)

    def samples_of(self, step: int) -> list[int]:
        """The samples all ranks together see in one step, longest first."""
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(int(fingerprint(self.seed, epoch), 16))
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        size = self.optim.batch_size
        taken = order[place * size : (place + 1) * size]
        return taken[self.reader.lengths[taken].argsort(descending=True, stable=True)].tolist()

    def packs(self, step: int) -> list[list[list[int]]]:
        """The samples of one step by rank and micro-batch; ranks may have fewer than others."""
        samples = self.samples_of(step)
        shares = []
        for rank in range(self.ranks.world_size):
            share = samples[rank :: self.ranks.world_size]
            lengths = self.reader.lengths[share].tolist()
            packs = pack(lengths, self.optim.micro_batch_tokens)
            shares.append([[share[i] for i in chosen] for chosen in packs])
        return shares

    def idle_sample(self) -> CachedSample:
        """One row in which nothing is supervised."""
        manifest = self.reader.manifest
        width, layers = manifest.hidden_size, len(manifest.aux_layers)
        dtype = getattr(torch, manifest.dtype)
        ids = torch.zeros(1, dtype=torch.int64)
        return CachedSample(
            sample=TokenizedSample("", ids, ids.bool(), greedy=False, held_out=False),
            aux=torch.zeros(1, layers * width).to(dtype),
            last=torch.zeros(0, width).to(dtype),
            argmax=ids[:0],
            lse=torch.zeros(0),
            aux_scales=torch.ones(1, layers) if dtype == FP8 else None,
            last_scales=torch.ones(0, 1) if dtype == FP8 else None,
        )


def starts_of(samples: list[CachedSample]) -> Tensor:
    """[B+1] first packed row of each sample, and the end of the last."""
    return torch.tensor([0, *(len(cached.sample.input_ids) for cached in samples)]).cumsum(0)


def collate(samples: list[CachedSample], chains: Chains) -> TTTBatch:
    """``samples`` end to end, with the chains that run on them."""
    mask = torch.cat([cached.sample.loss_mask for cached in samples])
    return TTTBatch(
        input_ids=torch.cat([cached.sample.input_ids for cached in samples]),
        positions=torch.cat([torch.arange(len(cached.sample.input_ids)) for cached in samples]),
        aux=torch.cat([cached.aux for cached in samples]),
        last=torch.cat([cached.last for cached in samples]),
        argmax=torch.cat([cached.argmax for cached in samples]),
        lse=torch.cat([cached.lse for cached in samples]),
        samples=len(samples),
        chains=chains,
        asking=asking_rows(mask, starts_of(samples)).cumsum(0) - 1,
        aux_scales=joined([cached.aux_scales for cached in samples]),
        last_scales=joined([cached.last_scales for cached in samples]),
    )


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All of ``parts`` end to end; None where the states have no scales."""
    there = [part for part in parts if part is not None]
    assert len(there) in (0, len(parts))
    return torch.cat(there) if there else None


def moved_batch(batch: TTTBatch, move: Callable[[Tensor], Tensor]) -> TTTBatch:
    return replace(with_moved(batch, move), chains=batch.chains.moved(move))


def on_device(batch: TTTBatch, device: torch.device, dtype: torch.dtype) -> TTTBatch:
    """Bring a batch to ``device``, its states also to ``dtype``."""
    there = moved_batch(batch, lambda tensor: tensor.to(device, non_blocking=True))
    return replace(
        there,
        aux=restored(there.aux, there.aux_scales, dtype),
        last=restored(there.last, there.last_scales, dtype),
        aux_scales=None,
        last_scales=None,
    )
