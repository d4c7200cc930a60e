"""The loader: cached samples in a reproducible order, as the batches of whole optimizer steps."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from conf.runtime import RankInfo, fingerprint
from conf.schema import ConfigError, OptimSection
from data.reader import ShardReader
from data.records import CachedSample, TTTBatch

AHEAD = 2  # windows read in the background


@dataclass(frozen=True)
class StepWindow:
    """What one rank computes in one optimizer step: equally many batches on every rank."""

    batches: list[TTTBatch]


class TrainLoader:
    """Deals the training samples of ``reader`` to steps and ranks.

    Samples are shuffled once an epoch by (seed, epoch). A step takes the next optim.batch_size of
    that order, the last one of an epoch what is left. Inside a step they are sorted by length,
    longest first, rank r of W takes r, r+W, ... and cuts its share into micro-batches: padding is
    small, ranks are balanced, and the set of samples a step sees does not depend on W. All of it
    follows from the step number, which is the loader's whole state.
    """

    def __init__(self, reader: ShardReader, optim: OptimSection, seed: int, ranks: RankInfo):
        """Raises ConfigError when the cache holds no training sample."""
        if not reader.train_indices:
            raise ConfigError(
                f"data.valid_share: all {len(reader)} samples are held out and none is left to "
                "train on; hold out less or give more data in data.path"
            )
        self.reader = reader
        self.indices = torch.tensor(reader.train_indices)
        self.optim = optim
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
        share = self.share(step)
        size = self.optim.micro_batch_size
        batches = []
        for start in range(0, self.batches_per_rank(step) * size, size):
            samples = [self.reader.read(index) for index in share[start : start + size]]
            batches.append(collate(samples) if samples else self.idle_batch())
        if torch.cuda.is_initialized():  # a copy from pinned memory overlaps with computation
            batches = [pinned(batch) for batch in batches]
        return StepWindow(batches)

    def samples_of(self, step: int) -> list[int]:
        """The samples all ranks together see in one step, longest first."""
        epoch, place = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(int(fingerprint(self.seed, epoch), 16))
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        size = self.optim.batch_size
        taken = order[place * size : (place + 1) * size]
        return taken[self.reader.lengths[taken].argsort(descending=True, stable=True)].tolist()

    def share(self, step: int) -> list[int]:
        """This rank's samples of one step."""
        return self.samples_of(step)[self.ranks.rank :: self.ranks.world_size]

    def batches_per_rank(self, step: int) -> int:
        """Micro-batches of the busiest rank; the others fill up with idle ones."""
        most = -(-len(self.samples_of(step)) // self.ranks.world_size)
        return -(-most // self.optim.micro_batch_size)

    def idle_batch(self) -> TTTBatch:
        """One row of no length: nothing in it is supervised."""
        width, layers = self.reader.manifest.hidden_size, len(self.reader.manifest.aux_layers)
        dtype = getattr(torch, self.reader.manifest.dtype)
        return TTTBatch(
            input_ids=torch.zeros(1, 1, dtype=torch.int64),
            loss_mask=torch.zeros(1, 1, dtype=torch.bool),
            lengths=torch.zeros(1, dtype=torch.int64),
            aux=torch.zeros(1, 1, layers * width, dtype=dtype),
            last=torch.zeros(1, 1, width, dtype=dtype),
            argmax=torch.zeros(1, 1, dtype=torch.int64),
            lse=torch.zeros(1, 1),
        )


def collate(samples: list[CachedSample]) -> TTTBatch:
    """Pad ``samples`` to the longest one with zeros, which are never supervised."""

    def stack(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    return TTTBatch(
        input_ids=stack([cached.sample.input_ids for cached in samples]),
        loss_mask=stack([cached.sample.loss_mask for cached in samples]),
        lengths=torch.tensor([len(cached.sample.input_ids) for cached in samples]),
        aux=stack([cached.aux for cached in samples]),
        last=stack([cached.last for cached in samples]),
        argmax=stack([cached.argmax for cached in samples]),
        lse=stack([cached.lse for cached in samples]),
    )


def on_device(batch: TTTBatch, device: torch.device, dtype: torch.dtype) -> TTTBatch:
    """Bring a batch to ``device``, its states also to ``dtype``."""
    moved = {
        item.name: getattr(batch, item.name).to(device, non_blocking=True) for item in fields(batch)
    }
    states = {name: moved[name].to(dtype) for name in ("aux", "last")}
    return TTTBatch(**(moved | states))


def pinned(batch: TTTBatch) -> TTTBatch:
    return replace(
        batch, **{item.name: getattr(batch, item.name).pin_memory() for item in fields(batch)}
    )
