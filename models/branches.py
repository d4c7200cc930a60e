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
    def of_parents(cls, parents: Tensor) -> "Branches":
        """parents [B, M] of nodes 1..M (0 is the root, parents come first) -> T = M + 1."""
        batch, nodes = parents.shape
        size = nodes + 1
        seen = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
        rows = torch.arange(batch, device=parents.device)
        for node in range(1, size):
            seen[:, node] |= seen[rows, parents[:, node - 1]]
        return cls(seen.sum(-1) - 1, seen)
