"""The arithmetic of trees: tokens a call from the hit rates of ranks, and the best tree of a size.

``rank_hits[d][r]`` is how often the verifier's token at depth d+1 is the draft's rank-r guess,
given that the node before stands. A node stands when its whole path does, so with rates that do not
depend on the path its chance is their product (as Medusa, 2401.10774, builds its trees).
"""

import heapq
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.shapes import StaticShape, parse_paths

HitRates = Sequence[Sequence[float]]  # [depth][rank]
BRANCHY = "2x2x2"


@dataclass(frozen=True)
class Head:
    """An invented draft: how often the verifier's token is its rank-r guess, at every depth."""

    name: str
    rank_hits: tuple[float, ...]


HEADS = (
    Head("weak", (0.55, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015)),
    Head("middle", (0.70, 0.12, 0.05, 0.03, 0.02)),
    Head("strong", (0.80, 0.09, 0.035, 0.02, 0.01)),
    Head("very strong", (0.90, 0.05, 0.015, 0.01, 0.005)),
)


def same_at_every_depth(hits: Sequence[float], depth: int) -> list[list[float]]:
    """The i.i.d. model: one list of rates by rank."""
    return [list(hits) for _ in range(depth)]


def node_chances(shape: StaticShape, rank_hits: HitRates) -> list[float]:
    """How often each guess stands, in the shape's order.

    Raises ValueError where ``shape`` goes beyond the depths or ranks that were measured.
    """
    chances: list[float] = []
    for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths, strict=True):
        if depth > len(rank_hits) or rank >= len(rank_hits[depth - 1]):
            raise ValueError(f"rank_hits: nothing was measured for rank {rank} at depth {depth}")
        before = chances[parent - 1] if parent else 1.0
        chances.append(before * rank_hits[depth - 1][rank])
    return chances


def expected_tokens_of_tree(shape: StaticShape, rank_hits: HitRates) -> float:
    """1 + the chances of all nodes: at most one node a depth stands, so chances add up."""
    return 1 + math.fsum(node_chances(shape, rank_hits))


def best_tree(rank_hits: HitRates, nodes: int, depth: int) -> StaticShape:
    """The tree of at most ``nodes`` guesses and ``depth`` levels with the most tokens a call.

    Takes the likeliest node that a tree may have next, again and again. A child is never likelier
    than its parent, nor a rank than the one before it where the rates fall with rank, so the
    ``nodes`` likeliest of all are reached and no other tree has more. Raises ValueError for a tree
    without a node.
    """
    paths: list[list[int]] = []
    frontier = [(-rank_hits[0][0], 1.0, [0])] if rank_hits and rank_hits[0] and depth else []
    while frontier and len(paths) < nodes:
        chance, before, path = heapq.heappop(frontier)  # heaps keep the smallest first: -chance
        paths.append(path)
        level, rank = len(path), path[-1]
        hits = rank_hits[level - 1]
        if rank + 1 < len(hits):
            heapq.heappush(frontier, (-before * hits[rank + 1], before, [*path[:-1], rank + 1]))
        if level < min(depth, len(rank_hits)) and rank_hits[level]:
            heapq.heappush(frontier, (chance * rank_hits[level][0], -chance, [*path, 0]))
    if not paths:
        raise ValueError(f"best_tree: no guess fits nodes={nodes}, depth={depth}")
    return parse_paths(json.dumps(paths, separators=(",", ":")), "best_tree")
