"""Room for packs: memory that is used again once the pack in it is gone."""

import weakref
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.shard_index import Stretch

STEP = 1 << 20  # sizes are rounded up to it, so that packs of about one size fit each other's place
ALIGNED = 64  # bytes at which each tensor begins


class Room:
    """Gives out tensors to read into.

    A page that was never touched costs nine times what reading into it does (13 ms against 1.5 for
    18 MB here), and the C library returns large blocks of other threads to the system at once. A
    block comes back when the last tensor in it has died, so as many exist as were ever alive.
    """

    def __init__(self):
        self.free: list[NDArray[np.uint8]] = []
        self.picking = Lock()  # blocks come back at any moment, at the end of the list

    def take(self, size: int) -> Tensor:
        """[size] uint8, whatever it holds; pinned where CUDA is in use, whose allocator keeps it"""
        if torch.cuda.is_initialized():
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        block = self.pick(size)
        lent = block[:size]  # the tensor holds it, and through it the block
        weakref.finalize(lent, self.free.append, block).atexit = False
        return torch.from_numpy(lent)

    def pick(self, size: int) -> NDArray[np.uint8]:
        with self.picking:
            for place, block in enumerate(self.free):
                if size <= len(block) <= 2 * size + STEP:
                    return self.free.pop(place)
        return np.empty(-(-size // STEP) * STEP, dtype=np.uint8)

    def tensors(self, stretches: list[Stretch]) -> list[Tensor]:
        """One tensor of the shape and dtype of each stretch, side by side in one block."""
        sizes = [-(-one.bytes // ALIGNED) * ALIGNED for one in stretches]
        parts = self.take(sum(sizes)).split(sizes)
        return [
            part[: one.bytes].view(one.dtype).view(one.shape)
            for part, one in zip(parts, stretches, strict=True)
        ]
