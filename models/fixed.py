"""The cache as forwards of fixed shape see it: all of it, written where the device says."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from models.branches import Branches
from models.kv import KVCache
from models.masks import Mask, additive, masks_of, sight_of


class FixedCache(Cache):
    """All ``slots`` sequences that a KVCache began with, in its own memory.

    Keys and values come back at full capacity, new rows go where ``lengths`` on the device points,
    and masks cover every slot: no number on the host that a forward reads differs between steps,
    so that it can be compiled once for each shape, or captured and replayed. That costs attention
    over the whole capacity, and junk rows in place of sequences that left: their length is 0 here,
    and what they write lies in memory that is nobody's.
    """

    def __init__(self, cache: KVCache):
        """After the first forward over ``cache``, which allocates its layers."""
        super().__init__(layers=[])
        self.capacity, self.dtype = cache.capacity, cache.dtype
        self.reaches, self.additive = cache.reaches, cache.additive
        self.keys = {layer: keys[: cache.slots] for layer, keys in cache.keys.items()}
        self.values = {layer: values[: cache.slots] for layer, values in cache.values.items()}
        self.lengths = cache.lengths.new_zeros(cache.slots)  # [B]
        self._rows = torch.arange(cache.slots, device=cache.device)[:, None]  # [B, 1]

    def follow(self, cache: KVCache) -> None:
        """Take over the lengths of the sequences still there."""
        if cache.batch < cache.slots:
            self.lengths.zero_()
        self.lengths[: cache.batch].copy_(cache.lengths)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kw: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, T, Dh] at each sequence's length; all [B, Hkv, capacity, Dh].

        The host cannot see whether the rows fit: ``KVCache.check_room`` must have.
        """
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        places = self._places(key_states.shape[2])
        keys[self._rows, :, places] = key_states.transpose(1, 2)  # indexed dimensions lead
        values[self._rows, :, places] = value_states.transpose(1, 2)
        return keys, values

    def _places(self, steps: int) -> Tensor:
        """[B, T] the rows that the next ``steps`` tokens take."""
        return self.lengths[:, None] + torch.arange(steps, device=self.lengths.device)

    def positions(self, steps: int, branches: Branches | None = None) -> Tensor:
        """[B, T]."""
        return self._places(steps) if branches is None else self.lengths[:, None] + branches.depth

    def mask(self, steps: int, branches: Branches | None = None) -> Mask:
        """[B, 1, T, capacity], as KVCache's otherwise; never None."""
        sight = sight_of(self.lengths, steps, self.capacity, branches)
        masks = masks_of(sight, self.reaches)
        return additive(masks, self.dtype) if self.additive else masks

    # What the library's models and mask code may ask of a cache; masks and positions are ours.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.capacity, 0
