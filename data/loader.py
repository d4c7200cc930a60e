"""The loader: samples with their states in a reproducible order, as the batches of whole steps."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from conf.runtime import RankInfo, fingerprint
from conf.schema import ConfigError, OptimSection, TTTSection
from data.chains import Chains, asking_rows
from data.fp8 import FP8, restored
from data.online import OnlineStates
from data.packer import Packing
from data.reader import ShardReader
from data.records import CachedPack, CachedSample, TokenizedSample, TTTBatch
from models.runs import with_moved

AHEAD = 3  # windows made in the background, each by a thread of its own
SOON = 256 << 20  # bytes beyond them that the system is asked to fetch from the disk


@dataclass(frozen=True)
class StepWindow:
    """What one rank computes in one optimizer step: equally many batches on every rank."""

    batches: list[TTTBatch]


class TrainLoader:
    """Deals the training samples of ``source`` to steps and ranks.

    The samples are packed once, by the seed, so an epoch has equally many steps each time. Packs
    are shuffled once an epoch by (seed, epoch); a step takes the next optim.packs_per_step of that
    order, the last one of an epoch what is left. Rank r of W takes packs r, r+W, ... of the step,
    so the samples that a step sees do not depend on W. All of it follows from the step number,
    which is the loader's whole state.
    """

    def __init__(
        self,
        source: ShardReader | OnlineStates,
        optim: OptimSection,
        ttt: TTTSection,
        seed: int,
        ranks: RankInfo,
    ):
        """Raises ConfigError when the source holds no training sample."""
        if not source.train_indices:
            raise ConfigError(
                f"data.valid_share: all {len(source)} samples are held out and none is left to "
                "train on; hold out less or give more data in data.path"
            )
        self.source = source
        self.indices = torch.tensor(source.train_indices)
        self.optim = optim
        self.ttt = ttt
        self.seed = seed
        self.ranks = ranks
        self.packing = Packing.of(
            source.lengths[self.indices], optim.micro_batch_tokens, generator_of(seed, "packing")
        )
        self.order_of = lru_cache(2)(self.shuffled)  # 10 ms for a million packs; reading ahead
        # looks into the next epoch while this one is being read

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.packing) // self.optim.packs_per_step)

    @property
    def samples_per_pack(self) -> float:
        return len(self.indices) / len(self.packing)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training: optim.epochs passes, or optim.max_steps if fewer."""
        steps = max(1, round(self.optim.epochs * self.steps_per_epoch))
        return min(steps, self.optim.max_steps or steps)

    def windows(self, start_step: int = 0) -> Iterator[StepWindow]:
        """The windows of steps start_step, ..., total_steps-1; from a cache, some are read ahead.

        An error while reading is raised here; closing the iterator ends the reading threads.
        """
        steps = range(start_step, self.total_steps)
        if isinstance(self.source, ShardReader):
            yield from self.read_ahead(self.source, steps)
        else:  # the verifier computes where the draft does: a thread could only get in its way
            yield from map(self.window, steps)

    def read_ahead(self, reader: ShardReader, steps: range) -> Iterator[StepWindow]:
        share = -(-self.optim.packs_per_step // self.ranks.world_size)
        size = share * self.optim.micro_batch_tokens * reader.token_bytes
        soon = AHEAD + 1 + int(SOON / size)  # windows from the one in use
        waiting, expected = iter(steps), iter(steps)
        ahead: deque[Future[StepWindow]] = deque()
        # Single threads, or each would start OpenMP workers of its own: more workers than cores
        # sleep at every barrier instead of spinning, and a CPU step takes a third longer.
        pool = ThreadPoolExecutor(AHEAD, "loader", initializer=torch.set_num_threads, initargs=(1,))

        def fetch(step: int) -> None:
            reader.expect([index for pack in self.packs_of(step)[self.own] for index in pack])

        def expect(count: int) -> None:  # what goes wrong here goes wrong again in the reading
            for step in islice(expected, count):
                pool.submit(fetch, step)

        try:
            expect(soon)
            for step in islice(waiting, AHEAD):
                ahead.append(pool.submit(self.window, step))
            while ahead:
                window = ahead.popleft().result()
                expect(1)
                for step in islice(waiting, 1):
                    ahead.append(pool.submit(self.window, step))
                yield window
        finally:
            pool.shutdown(cancel_futures=True)

    def window(self, step: int) -> StepWindow:
        """This rank's part of one step, with its states."""
        packs = self.packs_of(step)
        mine = packs[self.own]
        laps = -(-len(packs) // self.ranks.world_size)
        batches = [self.batch(pack) for pack in mine + [[]] * (laps - len(mine))]
        places = range(self.ranks.rank, laps * self.ranks.world_size, self.ranks.world_size)
        batches = [
            replace(batch, draw=seed_of(self.seed, "draw", step, place))
            for batch, place in zip(batches, places, strict=True)
        ]
        if torch.cuda.is_initialized():  # a copy from pinned memory overlaps with computation
            batches = [moved_batch(batch, Tensor.pin_memory) for batch in batches]
        return StepWindow(batches)

    @property
    def own(self) -> slice:
        """This rank's among the packs of a step."""
        return slice(self.ranks.rank, None, self.ranks.world_size)

    def batch(self, chosen: list[int]) -> TTTBatch:
        """The samples ``chosen`` end to end; none is a row in which nothing is supervised."""
        pack = self.source.read_pack(chosen) if chosen else CachedPack.of([self.idle_sample()])
        mask = torch.cat([sample.loss_mask for sample in pack.samples])
        chains = Chains.of(mask, pack.starts, self.ttt.depth, self.ttt.supervise)
        return batch_of(pack, chains)

    def packs_of(self, step: int) -> list[list[int]]:
        """The packs that all ranks together see in one step, as samples of the source."""
        epoch, place = divmod(step, self.steps_per_epoch)
        size = self.optim.packs_per_step
        chosen = self.order_of(epoch)[place * size : (place + 1) * size].tolist()
        return [self.indices[self.packing[number]].tolist() for number in chosen]

    def shuffled(self, epoch: int) -> Tensor:
        """[P] the packs in the order of one epoch."""
        return torch.randperm(len(self.packing), generator=generator_of(self.seed, epoch))

    def idle_sample(self) -> CachedSample:
        """One row in which nothing is supervised."""
        manifest = self.source.manifest
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


def generator_of(*parts: object) -> torch.Generator:
    """Random numbers that depend on ``parts`` alone."""
    return torch.Generator().manual_seed(seed_of(*parts))


def seed_of(*parts: object) -> int:
    """For a generator: a number that depends on ``parts`` alone."""
    return int(fingerprint(*parts), 16)


def batch_of(pack: CachedPack, chains: Chains) -> TTTBatch:
    """The samples of a pack as one batch, its states as they lie in the pack."""
    mask = torch.cat([sample.loss_mask for sample in pack.samples])
    return TTTBatch(
        input_ids=torch.cat([sample.input_ids for sample in pack.samples]),
        positions=torch.cat([torch.arange(len(sample.input_ids)) for sample in pack.samples]),
        aux=pack.aux,
        last=pack.last,
        argmax=pack.argmax,
        lse=pack.lse,
        samples=len(pack.samples),
        chains=chains,
        asking=asking_rows(mask, pack.starts).cumsum(0) - 1,
        aux_scales=pack.aux_scales,
        last_scales=pack.last_scales,
    )


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
