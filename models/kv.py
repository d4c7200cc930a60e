"""The key/value cache of a decoding verifier: one logical length per sequence."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from models.branches import Branches
from models.masks import Mask, Reach, additive, masks_of, reaches_of, sight_of


class KVCache(Cache):
    """Physical [B, Hkv, capacity, Dh] keys and values a layer, allocated at the first forward.

    The library's own caches have one length a batch. Here sequence b owns rows 0..lengths[b]-1;
    a forward over T tokens writes rows lengths[b]..lengths[b]+T-1 and changes no length, so rolling
    back is advancing by less: what lies beyond the logical length is overwritten later. Layers with
    a window store as much as the others and see less, so that rolling back is the same there.
    Layers are allocated by the shapes the model sends, zeroed: a masked row must not hold NaN.
    ``models/fixed.py`` sees the same memory in forwards whose shapes never change.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """``dtype`` is the verifier's. Raises ConfigError when this cache cannot serve it."""
        super().__init__(layers=[])
        self.reaches = reaches_of(config, capacity)
        self.capacity = capacity
        self.device = device
        self.dtype = dtype
        text = config.get_text_config(decoder=True)
        self.additive = text._attn_implementation == "eager"  # it adds its mask to the scores
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.room = batch  # sequences that there is memory for
        self.begin(batch)

    def begin(self, batch: int) -> None:
        """Start over with ``batch`` empty sequences, at most ``room``, in the same memory."""
        self.slots = batch  # sequences at the start: those that leave do not change it
        self._set_batch([0] * batch)

    def _set_batch(self, lengths: list[int]) -> None:
        self._set_host(lengths)
        self.lengths = torch.tensor(lengths, dtype=torch.long, device=self.device)  # [B]
        self._rows = torch.arange(len(lengths), device=self.device)[:, None]  # [B, 1]

    def _set_host(self, lengths: list[int]) -> None:
        """The lengths are kept on both sides: the host's decide slices without a wait."""
        self._host = lengths
        self._longest = max(lengths, default=0)
        self._uniform = all(n == self._longest for n in lengths)

    @property
    def batch(self) -> int:
        return len(self._host)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kw: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, T, Dh] at each sequence's length; views up to the longest end.

        Further arguments are the library's and concern other caches. Raises ValueError when the
        rows do not fit.
        """
        steps = key_states.shape[2]
        self.check_room(steps)
        end = self._longest + steps
        keys = self._store(self.keys, layer_idx, key_states)
        values = self._store(self.values, layer_idx, value_states)
        if self._uniform:
            keys[:, :, self._longest : end] = key_states
            values[:, :, self._longest : end] = value_states
        else:
            rows, slots = self._rows, self._places(steps)
            keys[rows, :, slots] = key_states.transpose(1, 2)  # indexed dims lead: [B, T, Hkv, Dh]
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, :end], values[:, :, :end]

    def _store(self, layers: dict[int, Tensor], layer_idx: int, like: Tensor) -> Tensor:
        """The rows in use [B, Hkv, capacity, Dh] of one layer, allocated when first asked for."""
        if layer_idx not in layers:
            _, heads, _, width = like.shape
            layers[layer_idx] = like.new_zeros(self.room, heads, self.capacity, width)
        layer = layers[layer_idx]
        return layer if self.batch == self.room else layer[: self.batch]

    def check_room(self, steps: int) -> None:
        """Raise ValueError when the longest sequence has no room for ``steps`` more tokens."""
        if self._longest + steps > self.capacity:
            raise ValueError(
                f"KVCache: {self._longest} cached + {steps} new tokens exceed capacity="
                f"{self.capacity}; make the cache for prompt + max_new_tokens + drafts"
            )

    def advance(self, counts: int | list[int] | Tensor) -> None:
        """Accept ``counts`` (one number or [B]) of the rows written last."""
        if isinstance(counts, Tensor):
            counts = counts.tolist()
        added = [counts] * self.batch if isinstance(counts, int) else counts
        if len(added) != self.batch:
            raise ValueError(f"KVCache: {len(added)} counts for a batch of {self.batch}")
        lengths = [n + more for n, more in zip(self._host, added, strict=True)]
        if lengths and (min(lengths) < 0 or max(lengths) > self.capacity):
            raise ValueError(f"KVCache: lengths {lengths} leave 0..capacity={self.capacity}")
        self._set_host(lengths)
        if len(set(added)) == 1:  # no transfer
            self.lengths = self.lengths + added[0]
        else:
            self.lengths = torch.tensor(lengths, dtype=torch.long, device=self.device)

    def commit(self, path: Tensor, counts: list[int] | Tensor, line: bool = False) -> None:
        """Keep the root and the first counts[b] nodes of path[b] of the rows written last.

        path [B, K] holds nodes 1..M of a forward over the root and M guesses, anything from
        counts[b] on. Their rows move up behind the root's in every layer. ``line`` says that the
        path is 1, 2, 3... in every sequence, so that nothing moves. Counts on the host and one
        length a batch cost no wait for the device.
        """
        standing = counts if isinstance(counts, list) else counts.tolist()
        depth = max(standing, default=0)
        if depth and not line:
            root = self.lengths[:, None]
            source = root + path[:, :depth]  # [B, K]: what lies beyond counts[b] is junk
            target = root + 1 + torch.arange(depth, device=self.device)
            for layer in (*self.keys.values(), *self.values.values()):
                self._move(layer[: self.batch], source, target)
        self.advance([n + 1 for n in standing])

    def _move(self, layer: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy rows ``source`` [B, K] of a layer [B, Hkv, capacity, Dh] to rows ``target``."""
        if self.batch == 1:
            layer.index_copy_(2, target[0], layer.index_select(2, source[0]))
        else:
            layer[self._rows, :, target] = layer[self._rows, :, source]  # the right side is a copy

    def _places(self, steps: int) -> Tensor:
        """[B, T] the rows that the next ``steps`` tokens take."""
        return self.lengths[:, None] + torch.arange(steps, device=self.device)

    def positions(self, steps: int, branches: Branches | None = None) -> Tensor:
        """[B, T] positions of the next ``steps`` tokens: one behind the other, or by depth."""
        return self._places(steps) if branches is None else self.lengths[:, None] + branches.depth

    def mask(self, steps: int, branches: Branches | None = None) -> Mask | None:
        """[B, 1, T, longest + T]: query i of sequence b sees keys 0..lengths[b]+i, or its branch.

        True is seen; for eager attention 0 is seen and the lowest number is not. By kind of layer
        where some have a window or chunk that the text exceeds. None where the library's maskless
        call is exact and quicker: an empty cache (causality alone, right-padded rows are junk),
        and on an accelerator one token a sequence at equal lengths. On a CPU that call is up to
        six times slower with grouped heads in bfloat16, and no quicker in float32.
        """
        size = self._longest + steps
        reaches = [reach if reach.limits(size) else Reach(reach.kind) for reach in self.reaches]
        one_each = steps == 1 and self._uniform and self.device.type != "cpu"
        if self._longest == 0 and branches is None:
            return None
        if one_each and not any(reach.limits(size) for reach in reaches):
            return None
        masks = masks_of(sight_of(self.lengths, steps, size, branches), reaches)
        return additive(masks, self.dtype) if self.additive else masks

    def keep(self, rows: Tensor) -> None:
        """Go on with sequences ``rows`` [B'] (unique), in that order; the others leave.

        Only rows that change place are copied: put the last sequences into the holes.
        """
        chosen: list[int] = rows.tolist()
        if len(set(chosen)) != len(chosen) or not all(0 <= r < self.batch for r in chosen):
            raise ValueError(f"KVCache: keep {chosen} of a batch of {self.batch}; rows are unique")
        moved = [i for i, row in enumerate(chosen) if row != i]
        if moved:
            target = torch.tensor(moved, device=self.device)
            source = torch.tensor([chosen[i] for i in moved], device=self.device)
            for layer in (*self.keys.values(), *self.values.values()):
                layer[target] = layer[source]  # the right side is a copy before the write
        self._set_batch([self._host[row] for row in chosen])

    # What the library's models and mask code ask of a cache.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._longest

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._longest + query_length, 0

    @property
    def is_initialized(self) -> bool:
        return bool(self.keys)
