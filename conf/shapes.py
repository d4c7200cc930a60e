"""The shapes of a round's guesses: chains, static trees, EAGLE-2's dynamic tree; and their names.

A guess is a node; node 0 is the root, the token emitted last. Parents come before their children.
    4                          a chain of four guesses
    2x2x2                      every node of a level has two children: 14 guesses, three deep
    [[0],[1],[0,0]]            paths of ranks, as Medusa lists them: 0 is the likeliest token
    dynamic:nodes=24,depth=5,top_k=4    chosen anew each round by confidence (2406.16858)
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from conf.schema import ConfigError

MAX_NODES = 256  # guesses a round: beyond it a verifier step costs far more than a plain one
DYNAMIC = re.compile(r"dynamic:nodes=(\d+),depth=(\d+),top_k=(\d+)")


@dataclass(frozen=True)
class StaticShape:
    """The same tree every round. Guess i (0-based) is node i+1."""

    name: str
    parents: tuple[int, ...]  # of each guess: the node it continues, 0 is the root
    ranks: tuple[int, ...]  # which of its parent's guesses it is, 0 the likeliest or first drawn

    @property
    def nodes(self) -> int:
        """Guesses a round, the root not counted."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        return depths_of(self.parents)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        return self.depth == self.nodes

    @property
    def fed(self) -> list[int]:
        """Nodes with children, level by level: what the draft runs on after its first forward."""
        depths = [self.depths[node - 1] for node in {parent for parent in self.parents if parent}]
        return [depths.count(level) for level in range(1, self.depth)]


def depths_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Of each guess, from the node it continues: 1 continues the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == 0 else found[parent - 1] + 1)
    return tuple(found)


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2's tree: at most ``top_k`` nodes a level are expanded, the best ``nodes`` are kept."""

    name: str
    nodes: int  # guesses a round, the root not counted
    depth: int  # levels
    top_k: int  # children of a node, and nodes expanded a level

    is_chain = False

    @property
    def fed(self) -> list[int]:
        return [self.top_k] * (self.depth - 1)


Shape = StaticShape | DynamicShape


def chain(length: int) -> StaticShape:
    return StaticShape(str(length), tuple(range(length)), (0,) * length)


def parse_shape(text: str, knob: str) -> Shape:
    """The shape that ``text`` names. Raises ConfigError, which names ``knob``."""
    words = text.strip()
    dynamic = DYNAMIC.fullmatch(words)
    if dynamic:
        return parse_dynamic(words, [int(number) for number in dynamic.groups()], knob)
    if re.fullmatch(r"\d+(x\d+)*", words):
        widths = [int(number) for number in words.split("x")]
        if len(widths) == 1:
            widths = check_chain(widths[0], knob)
        else:
            check_widths(words, widths, knob)
        return of_widths(words, widths)
    if words.startswith("["):
        return parse_paths(words, knob)
    raise ConfigError(
        f"{knob}={text}: no shape of guesses; write a chain as 4, a tree as 2x2x2 or "
        "[[0],[1],[0,0]], EAGLE-2's as dynamic:nodes=24,depth=5,top_k=4"
    )


def check_chain(length: int, knob: str) -> list[int]:
    if not 1 <= length <= MAX_NODES:
        raise ConfigError(f"{knob}={length}: a chain has 1 to {MAX_NODES} guesses; try 4")
    return [1] * length


def check_widths(words: str, widths: list[int], knob: str) -> None:
    counts = [math.prod(widths[: level + 1]) for level in range(len(widths))]
    if min(widths) < 1 or sum(counts) > MAX_NODES:
        raise ConfigError(
            f"{knob}={words}: has {sum(counts)} guesses a round and widths down to {min(widths)}; "
            f"widths are 1 or more and guesses {MAX_NODES} at most, try 2x2x2"
        )


def of_widths(name: str, widths: list[int]) -> StaticShape:
    """Level by level: every node of level l has ``widths[l]`` children."""
    parents: list[int] = []
    ranks: list[int] = []
    level = [0]
    for width in widths:
        begin = len(parents) + 1
        parents += [node for node in level for _ in range(width)]
        ranks += [rank for _ in level for rank in range(width)]
        level = list(range(begin, len(parents) + 1))
    return StaticShape(name, tuple(parents), tuple(ranks))


def parse_paths(words: str, knob: str) -> StaticShape:
    """Medusa's way: each node is the path of ranks from the root to it."""
    wrong = ConfigError(
        f"{knob}={words}: must be a list of paths of ranks such as [[0],[1],[0,0]], each with its "
        f"beginning and its likelier siblings in the list, none twice, {MAX_NODES} at most"
    )
    try:
        paths = [tuple(path) for path in json.loads(words)]
    except (ValueError, TypeError) as error:
        raise wrong from error
    if not all(path and all(type(rank) is int and rank >= 0 for rank in path) for path in paths):
        raise wrong
    paths.sort(key=lambda path: (len(path), path))
    node = {(): 0} | {path: i + 1 for i, path in enumerate(paths)}
    siblings = {(*path[:-1], rank) for path in paths for rank in range(path[-1])}
    if not 1 <= len(paths) == len(set(paths)) <= MAX_NODES:
        raise wrong
    if not all(path in node for path in {path[:-1] for path in paths} | siblings):
        raise wrong
    return StaticShape(
        words, tuple(node[path[:-1]] for path in paths), tuple(path[-1] for path in paths)
    )


def parse_dynamic(words: str, numbers: list[int], knob: str) -> DynamicShape:
    nodes, depth, top_k = numbers
    pool = top_k + (depth - 1) * top_k**2
    if min(numbers) < 1 or not depth <= nodes <= min(pool, MAX_NODES):
        raise ConfigError(
            f"{knob}={words}: nodes must be at least depth, at most {MAX_NODES} and at most "
            f"top_k + (depth - 1) * top_k^2 = {pool}; try dynamic:nodes=24,depth=5,top_k=4"
        )
    return DynamicShape(words, nodes, depth, top_k)
