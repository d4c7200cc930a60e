"""States that are computed when a step asks for them: nothing of them is ever on a disk."""

from collections.abc import Sequence

import torch

from conf.runtime import RankInfo, cache_dir
from conf.schema import RunConfig
from data.capture_job import manifest_of
from data.distributed import pick_device
from data.manifest import Manifest
from data.origin import Agreement
from data.records import CachedPack, CachedSample, PreparedData, Samples, named
from data.state_check import check_states
from data.states import batches, states_of
from models.verifier import Verifier

AGREEMENT_TOKENS = 2000  # a share of them is within 3% of that of all, 99 times of 100


class OnlineStates:
    """What ShardReader offers, from the verifier itself, which stays in memory beside the draft.

    States are rounded as the cache would (capture.dtype). Each rank holds a whole verifier and
    computes its own packs, every epoch anew: a forward of the verifier a token and epoch in place
    of 8*D bytes a token on a disk. On a GPU the states of a step go to the CPU and back, two copies
    of those bytes: for an 8B verifier 3 us a token beside 40 us of its forward.
    """

    def __init__(
        self,
        verifier: Verifier,
        samples: Samples,
        manifest: Manifest,
        batch_tokens: int,
    ):
        """``manifest`` describes the states as a cache's would; it has no shards."""
        self.verifier = verifier
        self.samples = samples
        self.manifest = manifest
        self.batch_tokens = batch_tokens
        self.lengths = samples.lengths
        self.held_out = samples.held_out
        self.greedy = samples.greedy

    @classmethod
    def load(cls, cfg: RunConfig, prepared: PreparedData, ranks: RankInfo) -> "OnlineStates":
        """Load the verifier and check its states. Raises JobError when they are wrong."""
        device = pick_device(cfg.run.device, ranks.local_rank)
        dtype = getattr(torch, cfg.verifier.dtype.value)
        verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
        manifest = manifest_of(cfg, prepared, verifier.facts)
        stored = getattr(torch, manifest.dtype)
        check_states(verifier, verifier.states, prepared.samples, stored, cfg.capture.tolerance)
        return cls(verifier, prepared.samples, manifest, cfg.capture.batch_tokens)

    def __str__(self) -> str:
        return "the memory of capture.mode=online"

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def train_indices(self) -> list[int]:
        return (~self.held_out).nonzero()[:, 0].tolist()

    @property
    def valid_indices(self) -> list[int]:
        return self.held_out.nonzero()[:, 0].tolist()

    def agreement(self) -> Agreement:
        """Of the first training samples with AGREEMENT_TOKENS supervised tokens together."""
        chosen: list[int] = []
        supervised = 0
        for index in self.train_indices:
            if supervised >= AGREEMENT_TOKENS:
                break
            chosen.append(index)
            supervised += int(self.samples[index].loss_mask.sum())
        tokens, agreed = 0, 0
        for index in chosen:
            cached = self.read(index)
            ids, mask = cached.sample.input_ids, cached.sample.loss_mask
            tokens += len(ids)
            agreed += int((cached.argmax == ids[1:][mask[1:]]).sum())
        return Agreement(tokens, supervised, agreed)

    @property
    def parameters(self) -> int:
        """Of the verifier, all frozen."""
        return sum(weight.numel() for weight in self.verifier.model.parameters())

    def read(self, index: int) -> CachedSample:
        """Sample ``index`` of the prepared order, aux and last in capture.dtype."""
        return self.compute([index])[0]

    def read_pack(self, indices: Sequence[int]) -> CachedPack:
        """The samples end to end, on the CPU."""
        return CachedPack.of(self.compute(indices))

    def compute(self, indices: Sequence[int]) -> list[CachedSample]:
        """The samples, in the order asked for; those of like length run through together."""
        samples = [self.samples[index] for index in indices]
        found: dict[int, CachedSample] = {}
        dtype = getattr(torch, self.manifest.dtype)
        for places in batches([len(sample.input_ids) for sample in samples], self.batch_tokens):
            chosen = [samples[place] for place in places]
            states = states_of(self.verifier, chosen, dtype)
            for place, sample, one in zip(places, chosen, states, strict=True):
                found[place] = CachedSample(sample=sample, **dict(named(one)))
        return [found[place] for place in range(len(samples))]
