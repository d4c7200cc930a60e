"""Trees beside chains at equal draft passes, equal verified tokens and equal time."""

from dataclasses import dataclass

from conf.shapes import StaticShape, chain, parse_shape
from eval.arithmetic.tree_theory import (
    BRANCHY,
    HEADS,
    Head,
    best_tree,
    expected_tokens_of_tree,
    node_chances,
    same_at_every_depth,
)
from eval.tables import aligned
from eval.theory import best_n_of_alpha, round_cost

LONGEST = 40  # chain that is compared; every best one is shorter
BUDGETS = (0.0, 0.01)  # cost of a verified guess, in plain verifier steps
C = 0.05


@dataclass(frozen=True)
class ShapeFigures:
    column: str
    shape: str
    passes: int  # of the draft: one a level
    guesses: int  # verified
    tokens: float  # a call
    speedup: float


@dataclass(frozen=True)
class Comparison:
    head: str
    shapes: list[ShapeFigures]


@dataclass(frozen=True)
class Comparisons:
    c: float
    verify_cost: float
    heads: list[Comparison]


def compare_heads(verify_cost: float) -> Comparisons:
    return Comparisons(C, verify_cost, [compare(head, verify_cost) for head in HEADS])


def compare(head: Head, verify_cost: float) -> Comparison:
    """The tree of two children everywhere, chains equal to it in three ways, and the best."""
    hits = same_at_every_depth(head.rank_hits, LONGEST)
    tree = branchy()
    best = best_n_of_alpha(head.rank_hits[0], C, verify_cost, LONGEST).n
    as_long = equal_time(tree, verify_cost)
    shapes = (
        ("[2,2,2]", tree),
        ("chain, equal draft passes", chain(tree.depth)),
        ("chain, equal verified tokens", chain(tree.nodes)),
        ("chain, equal time", chain(as_long)),
        ("best chain", chain(best)),
        ("best tree of 14, depth 3", best_tree(hits, 14, 3)),
        ("best tree of 59, depth 8", best_tree(hits, 59, 8)),
    )
    figures: list[ShapeFigures] = []
    for column, shape in shapes:
        tokens = expected_tokens_of_tree(shape, hits)
        cost = round_cost(shape.depth, shape.nodes, C, verify_cost)
        figures.append(
            ShapeFigures(column, shape.name, shape.depth, shape.nodes, tokens, tokens / cost)
        )
    return Comparison(head.name, figures)


def branchy() -> StaticShape:
    shape = parse_shape(BRANCHY, "tree")
    assert isinstance(shape, StaticShape)
    return shape


def equal_time(tree: StaticShape, verify_cost: float) -> int:
    """The longest chain whose round costs no more than the tree's."""
    limit = round_cost(tree.depth, tree.nodes, C, verify_cost) + 1e-12  # sums round
    return max(n for n in range(1, tree.nodes + 1) if round_cost(n, n, C, verify_cost) <= limit)


def tree_lines(found: Comparisons) -> list[str]:
    """Tokens a call / speed-up, a column a draft."""
    rows: list[list[str]] = []
    for number, first in enumerate(found.heads[0].shapes):
        values = [one.shapes[number] for one in found.heads]
        lengths = {value.guesses for value in values}
        size = f" ({min(lengths)})" if len(lengths) == 1 else ""
        cells = [f"{value.tokens:.2f}/{value.speedup:.2f}" for value in values]
        if not size:
            cells = [f"N{v.guesses} {cell}" for v, cell in zip(values, cells, strict=True)]
        rows.append([first.column + size, *cells])
    title = (
        f"Trees and chains, tokens a call / speed-up, c = {found.c:g}, "
        f"{found.verify_cost:g} a verified guess"
    )
    return [title, *aligned(["(guesses)", *(one.head for one in found.heads)], rows)]


def leaf_lines() -> list[str]:
    """How often each leaf of [2,2,2] is reached; leaves with the same ranks are alike."""
    tree = branchy()
    leaves = [node for node, depth in enumerate(tree.depths) if depth == tree.depth]
    rows: list[list[str]] = []
    for leaf in leaves:
        path = ranks_to(tree, leaf)
        chances = [
            node_chances(tree, same_at_every_depth(head.rank_hits, tree.depth))[leaf]
            for head in HEADS
        ]
        rows.append([str(path), *(f"{chance:.4f}" for chance in chances)])
    title = "How often each leaf of [2,2,2] stands, by the ranks on its path (0: likeliest)"
    return [title, *aligned(["ranks", *(head.name for head in HEADS)], rows)]


def ranks_to(shape: StaticShape, guess: int) -> list[int]:
    """Ranks from the root to guess ``guess`` (0-based)."""
    parent = shape.parents[guess]
    before = ranks_to(shape, parent - 1) if parent else []
    return [*before, shape.ranks[guess]]
