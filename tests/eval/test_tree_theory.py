"""The arithmetic of trees: known figures, and the best tree against every other one."""

from itertools import combinations

import pytest

from conf.shapes import StaticShape, chain, parse_shape
from eval.arithmetic.tree_compare import Comparisons, compare_heads, leaf_lines
from eval.arithmetic.tree_theory import (
    HEADS,
    best_tree,
    expected_tokens_of_tree,
    node_chances,
    same_at_every_depth,
)
from eval.theory import expected_tokens

# tokens a call / speed-up at c = .05, guesses verified for nothing
KNOWN = {
    "weak": "2.02/1.76 2.22/1.31 2.11/1.76 2.53/2.20 2.69/2.34 3.47/2.48",
    "middle": "2.53/2.20 3.32/1.95 3.06/2.35 3.04/2.65 3.17/2.76 4.67/3.33",
    "strong": "2.95/2.57 4.82/2.84 4.33/3.09 3.39/2.95 3.49/3.04 5.91/4.22",
    "very strong": "3.44/2.99 7.94/4.67 7.71/4.67 3.71/3.23 3.77/3.28 7.42/5.30",
}
COLUMNS = (
    "chain, equal draft passes",
    "chain, equal verified tokens",
    "best chain",
    "[2,2,2]",
    "best tree of 14, depth 3",
    "best tree of 59, depth 8",
)


def static(text: str) -> StaticShape:
    shape = parse_shape(text, "tree")
    assert isinstance(shape, StaticShape)
    return shape


def figures(found: Comparisons, head: str) -> dict[str, tuple[float, float]]:
    (one,) = (each for each in found.heads if each.head == head)
    return {each.column: (each.tokens, each.speedup) for each in one.shapes}


@pytest.mark.parametrize("head", KNOWN)
def test_trees_against_chains(head: str):
    found = figures(compare_heads(0.0), head)
    for column, known in zip(COLUMNS, KNOWN[head].split(), strict=True):
        tokens, times = map(float, known.split("/"))
        assert found[column] == (
            pytest.approx(tokens, abs=0.00501),
            pytest.approx(times, abs=0.00501),
        )


def test_a_verified_guess_at_one_per_cent():
    """The big tree falls, for a very strong draft below the best chain."""
    found = compare_heads(0.01)
    big = [figures(found, head.name)[COLUMNS[-1]][1] for head in HEADS]
    assert big == [pytest.approx(v, abs=0.00501) for v in (1.74, 2.35, 2.97, 3.73)]
    assert figures(found, "very strong")["best chain"][1] == pytest.approx(4.34, abs=0.00501)


def test_what_is_held_equal():
    for one in compare_heads(0.01).heads:
        shapes = {each.column: each for each in one.shapes}
        tree = shapes["[2,2,2]"]
        assert shapes["chain, equal draft passes"].passes == tree.passes == 3
        assert shapes["chain, equal verified tokens"].guesses == tree.guesses == 14
        timed = shapes["chain, equal time"]
        cost = tree.tokens / tree.speedup
        assert timed.tokens / timed.speedup <= cost + 1e-9
        assert 1 + (timed.guesses + 1) * 0.06 > cost  # one guess more would cost more


def test_two_by_two_by_two_in_closed_form():
    for head in HEADS:
        s = head.rank_hits[0] + head.rank_hits[1]
        found = expected_tokens_of_tree(static("2x2x2"), same_at_every_depth(head.rank_hits, 3))
        assert found == pytest.approx(1 + s + s**2 + s**3)


def test_a_chain_is_a_tree():
    hits = same_at_every_depth([0.7, 0.2], 9)
    assert expected_tokens_of_tree(chain(9), hits) == pytest.approx(expected_tokens(0.7, 9))


def test_rates_by_depth_are_those_of_the_right_depth():
    shape = static("[[0],[1],[0,0],[1,0]]")
    chances = node_chances(shape, [[0.6, 0.3], [0.5]])
    assert chances == pytest.approx([0.6, 0.3, 0.3, 0.15])
    with pytest.raises(ValueError, match="depth 2"):
        node_chances(shape, [[0.6, 0.3]])
    with pytest.raises(ValueError, match="rank 1"):
        node_chances(shape, [[0.6], [0.5]])


@pytest.mark.parametrize(
    "hits",
    [
        [[0.6, 0.3, 0.05], [0.6, 0.3, 0.05], [0.6, 0.3, 0.05]],
        [[0.5, 0.4, 0.1], [0.9, 0.05, 0.01], [0.2, 0.1, 0.1]],
    ],
)
def test_the_best_tree_by_brute_force(hits: list[list[float]]):
    """All trees of 5 nodes that depth and ranks allow: none has more."""
    paths = [(a,) for a in range(3)]
    paths += [(*p, r) for p in paths for r in range(3)]
    paths += [(*p, r) for p in paths if len(p) == 2 for r in range(3)]
    ranked = sorted(paths, key=lambda path: -chance(path, hits))[:14]  # others cannot be in it
    best = 0.0
    for chosen in combinations(ranked, 5):
        if all(path[:-1] in {(), *chosen} for path in chosen):
            best = max(best, 1 + sum(chance(path, hits) for path in chosen))
    assert expected_tokens_of_tree(best_tree(hits, 5, 3), hits) == pytest.approx(best)


def chance(path: tuple[int, ...], hits: list[list[float]]) -> float:
    found = 1.0
    for depth, rank in enumerate(path):
        found *= hits[depth][rank]
    return found


def test_the_best_tree_keeps_its_limits():
    hits = same_at_every_depth(HEADS[0].rank_hits, 8)
    for nodes, depth in ((1, 1), (14, 3), (59, 8), (256, 4)):
        shape = best_tree(hits, nodes, depth)
        assert (shape.nodes, shape.depth <= depth) == (nodes, True)
    assert best_tree([[0.5, 0.0, 0.4]], 3, 5).parents == (0, 0, 0)  # as wide as measured, no deeper
    for nodes, depth in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="no guess fits"):
            best_tree(hits, nodes, depth)


def test_leaves_of_the_same_ranks_are_alike():
    rows = [line.split("]")[-1] for line in leaf_lines()[2:]]
    assert len(rows) == 8
    assert rows[1].split() == rows[2].split() == rows[4].split()
    assert rows[0].split()[0] == f"{0.55**3:.4f}"
