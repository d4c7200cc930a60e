"""Branches: new tokens that continue a sequence as a tree and not as a line."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Branches:
    """Who stands where among T tokens of one forward; token 0 is the root of all others."""

    depth: Tensor  # [B, T] int64: steps from the root, which has 0; its position is length + depth
    seen: Tensor  # [B, T, T] bool: token i sees token j, which is itself or an ancestor

    @classmethod
    def of_parents(cls, parents: Tensor, levels: int) -> "Branches":
        """parents [B, M] of nodes 1..M (0 is the root) at most ``levels`` deep -> T = M + 1."""
        size = parents.shape[1] + 1
        above = torch.cat([torch.zeros_like(parents[:, :1]), parents], 1)  # the root's is itself
        above = above[:, :, None].expand(-1, -1, size)  # [B, T, T]
        own = torch.eye(size, dtype=torch.bool, device=parents.device)
        seen = own.expand(len(parents), -1, -1)
        for _ in range(levels):
            seen = own | seen.gather(1, above)
        return cls(seen.sum(-1) - 1, seen)

    @classmethod
    def line(cls, batch: int, size: int, device: torch.device) -> "Branches":
        """Each token behind the one before, as without branches."""
        depth = torch.arange(size, device=device)
        seen = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        return cls(depth.repeat(batch, 1), seen.repeat(batch, 1, 1))
