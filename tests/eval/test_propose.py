"""Chains, static trees and EAGLE-2's: which nodes, in which order, for how many draft forwards."""

import math

import pytest
import torch
from torch import Tensor

from conf.choices import EvalRule
from conf.schema import ConfigError
from conf.shapes import DynamicShape, Shape, StaticShape, chain, parse_shape
from eval.proof.toy import PRUNED, ROOT, VOCAB, TableDraft, TableTarget, make_tables
from eval.propose import Proposal, lay_out, propose, top_ranks
from eval.round_plan import RoundPlan, rule_of
from eval.verify import LOSSY, AcceptRule
from models.sampling import OwnDice, Sampling, SharedDice, probabilities

GREEDY = RoundPlan(AcceptRule.greedy, Sampling())
WARM = Sampling(temperature=1.0)
SEQUENCES = 40


def shape_of(text: str) -> Shape:
    return parse_shape(text, "shape")


class CountedDraft(TableDraft):
    """Counts forwards and rows, and starts each sequence from a context of its own."""

    def __init__(self, tokens: tuple[int, ...] = PRUNED, sequences: int = SEQUENCES, seed: int = 0):
        table, draft_table = make_tables(seed, tokens)
        target = TableTarget(table, sequences)
        generator = torch.Generator().manual_seed(seed)
        target.last_two = torch.randint(0, VOCAB, (sequences, 2), generator=generator)
        super().__init__(draft_table, tokens, target)
        self.fed: list[int] = []

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        assert ids.shape == parents.shape
        self.fed.append(ids.shape[-1])
        return super().step(ids, parents)


def rows_by_hand(draft: CountedDraft, proposal: Proposal) -> Tensor:
    """[S, M+1, Vd]: the draft's logits at each node, on its own path."""
    nodes = torch.cat([draft.target.last_two[:, 1:], proposal.ids], -1)
    above = torch.cat([draft.target.last_two[:, :1], nodes.gather(-1, proposal.parents)], -1)
    return draft.table[above, nodes]


@pytest.mark.parametrize("rule", [AcceptRule.greedy, AcceptRule.argmax_draft, AcceptRule.rejection])
def test_a_chain_costs_one_row_a_guess(rule: AcceptRule):
    draft = CountedDraft()
    plan = RoundPlan(rule, Sampling() if rule is AcceptRule.greedy else WARM)
    proposal = propose(draft, chain(4), plan, SharedDice(0, SEQUENCES))
    assert draft.fed == [1, 1, 1]  # and the start
    assert proposal.parents.tolist() == [[0, 1, 2, 3]] * SEQUENCES
    assert (proposal.logits is not None) == (rule is AcceptRule.rejection)
    if rule is not AcceptRule.rejection:
        best = draft.target_ids[rows_by_hand(draft, proposal).argmax(-1)]
        assert torch.equal(best[:, :-1], proposal.ids)


@pytest.mark.parametrize(
    ("text", "fed"),
    [("2x2x2", [2, 4]), ("3x1x2", [3, 3]), ("[[0],[1],[2],[0,0],[0,1],[2,0],[2,0,0]]", [2, 1])],
)
def test_a_static_tree_takes_the_top_ranks(text: str, fed: list[int]):
    """Only nodes with children are fed."""
    draft, shape = CountedDraft(), shape_of(text)
    assert isinstance(shape, StaticShape)
    proposal = propose(draft, shape, GREEDY, SharedDice(0, SEQUENCES))
    assert draft.fed == fed
    order = rows_by_hand(draft, proposal).argsort(-1, descending=True)  # [S, M+1, Vd]
    for i, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        assert torch.equal(proposal.ids[:, i], draft.target_ids[order[:, parent, rank]])


def test_nodes_may_be_listed_depth_first():
    """Only parents must come first: the root's second child is listed last here."""
    odd = StaticShape("odd", parents=(0, 1, 2, 0, 4), ranks=(0, 0, 0, 1, 0))
    draft = CountedDraft()
    plan = RoundPlan(AcceptRule.tree_without_replacement, WARM)
    for shape_plan in (GREEDY, plan):
        proposal = propose(draft, odd, shape_plan, SharedDice(0, SEQUENCES))
        rows = rows_by_hand(draft, proposal)
        if proposal.logits is None:
            best = draft.target_ids[rows.topk(2).indices]
            wanted = [best[:, 0, 0], best[:, 1, 0], best[:, 2, 0], best[:, 0, 1], best[:, 4, 0]]
            assert torch.equal(proposal.ids, torch.stack(wanted, -1))
            continue
        assert proposal.source is not None
        for i, parent in enumerate(odd.parents):
            assert torch.equal(proposal.logits[:, proposal.source[i]], rows[:, parent])


@pytest.mark.parametrize("text", ["2x2x2", "[[0],[1],[0,0],[1,0],[1,1],[1,0,0]]"])
def test_kept_logits_are_those_the_guess_was_chosen_from(text: str):
    draft, shape = CountedDraft(), shape_of(text)
    assert isinstance(shape, StaticShape)
    plan = RoundPlan(AcceptRule.tree_without_replacement, WARM)
    proposal = propose(draft, shape, plan, SharedDice(0, SEQUENCES))
    rows = rows_by_hand(draft, proposal)
    assert proposal.logits is not None and proposal.source is not None
    for i, parent in enumerate(shape.parents):
        assert torch.equal(proposal.logits[:, proposal.source[i]], rows[:, parent])
    siblings = {(p, i) for i, p in enumerate(shape.parents)}
    for parent, i in siblings:
        for other, j in siblings:
            if parent == other and i < j:
                assert bool((proposal.ids[:, i] != proposal.ids[:, j]).all())


def test_draws_follow_the_filtered_draft_without_replacement():
    """Pairs of siblings against their exact chance, within five standard deviations."""
    many, sampling = 20_000, Sampling(temperature=0.8, top_k=3)
    draft = CountedDraft(tuple(range(VOCAB)), many)
    draft.target.last_two = torch.tensor(ROOT).expand(many, 2)
    plan = RoundPlan(AcceptRule.tree_without_replacement, sampling)
    proposal = propose(draft, shape_of("[[0],[1]]"), plan, SharedDice(3, many))
    row = probabilities(draft.table[ROOT], sampling).double()
    assert int((row > 0).sum()) == 3
    counts = torch.bincount(proposal.ids[:, 0] * VOCAB + proposal.ids[:, 1], minlength=VOCAB**2)
    for code, count in enumerate(counts.tolist()):
        first, second = divmod(code, VOCAB)
        left = 1 - float(row[first])
        chance = float(row[first] * row[second]) / left if first != second else 0.0
        spread = math.sqrt(many * chance * (1 - chance))
        assert abs(count - many * chance) <= 5 * spread


def test_more_children_than_tokens_repeat_some():
    """A draft of two tokens, or a filter that leaves one: proposals stay valid ids."""
    draft = CountedDraft((1, 4))
    for plan in (
        GREEDY,
        RoundPlan(AcceptRule.tree_one_hot, WARM),
        RoundPlan(AcceptRule.tree_without_replacement, Sampling(1.0, top_k=1)),
    ):
        proposal = propose(draft, shape_of("4x2"), plan, SharedDice(0, SEQUENCES))
        assert proposal.ids.shape == (SEQUENCES, 12)
        assert set(proposal.ids.flatten().tolist()) == {1, 4}
    confident = propose(draft, shape_of("dynamic:nodes=8,depth=2,top_k=3"), GREEDY, SharedDice(0))
    everything = {(1,), (4,), (1, 1), (1, 4), (4, 1), (4, 4)}  # and two repeats
    assert all(set(paths_of(confident, row)) == everything for row in range(SEQUENCES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equal_logits_go_by_index_as_argmax_has_it(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 3, (200, 300), generator=generator).to(dtype)  # 50 of each
    scores[:20] = torch.randn(20, 300, generator=generator).to(dtype)
    scores[:, 7] = -torch.inf
    scores[::2, 9] = -0.0
    wanted = scores.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 2, 10, 60, 290, 300):
        assert torch.equal(top_ranks(scores, count), wanted[:, :count])
    assert torch.equal(top_ranks(scores, 3)[:, 0], scores.argmax(-1))
    repeated = top_ranks(torch.tensor([[1.0, 2.0]]).to(dtype), 4)
    assert repeated.tolist() == [[1, 0, 0, 0]]


def tree_by_hand(draft: CountedDraft, shape: DynamicShape, row: int) -> set[tuple[int, ...]]:
    """EAGLE-2 with lists: the paths of draft tokens that are kept, of sequence ``row``."""
    first, second = draft.target.last_two[row].tolist()
    tokens = draft.target_ids.tolist()
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(shape.depth):
        level: list[tuple[float, tuple[int, ...]]] = []
        for reached, path in frontier:
            before, last = ([first, second, *(tokens[k] for k in path)])[-2:]
            gained = draft.table[before, last].log_softmax(-1).tolist()
            best = sorted(range(len(gained)), key=lambda k: -gained[k])[: shape.top_k]
            level += [(reached + gained[k], (*path, k)) for k in best]
        pool += level
        frontier = sorted(level, key=lambda node: -node[0])[: shape.top_k]
    return {path for _, path in sorted(pool, key=lambda node: -node[0])[: shape.nodes]}


def paths_of(proposal: Proposal, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    ids, parents = proposal.ids[row].tolist(), proposal.parents[row].tolist()
    for token, parent in zip(ids, parents, strict=True):
        paths.append((*paths[parent], token))  # an IndexError where the parent comes later
    return paths[1:]


@pytest.mark.parametrize(
    "text", ["dynamic:nodes=7,depth=3,top_k=3", "dynamic:nodes=5,depth=5,top_k=2"]
)
def test_confidence_keeps_the_best_of_the_pool(text: str):
    draft, shape = CountedDraft(), shape_of(text)
    assert isinstance(shape, DynamicShape)
    proposal = propose(draft, shape, GREEDY, SharedDice(0, SEQUENCES))
    assert draft.fed == [shape.top_k] * (shape.depth - 1)
    trees: set[tuple[int, ...]] = set()
    for row in range(SEQUENCES):
        kept = {
            tuple(draft.target_ids[list(path)].tolist()) for path in tree_by_hand(draft, shape, row)
        }
        paths = paths_of(proposal, row)
        assert set(paths) == kept and len(paths) == shape.nodes
        trees.add(tuple(proposal.parents[row].tolist()))
    assert len(trees) > 3  # each sequence has a tree of its own


def test_siblings_chosen_by_confidence_stand_in_the_order_of_their_rank():
    draft = CountedDraft()
    proposal = propose(draft, shape_of("dynamic:nodes=7,depth=3,top_k=3"), GREEDY, SharedDice(0))
    rows = rows_by_hand(draft, proposal)
    rank = rows.argsort(-1, descending=True).argsort(-1)  # [S, M+1, Vd]
    own = {int(token): k for k, token in enumerate(draft.target_ids)}
    for row in range(SEQUENCES):
        seen: dict[int, list[int]] = {}
        for token, parent in zip(
            proposal.ids[row].tolist(), proposal.parents[row].tolist(), strict=True
        ):
            seen.setdefault(parent, []).append(int(rank[row, parent, own[token]]))
        assert all(ranks == list(range(len(ranks))) for ranks in seen.values())


class CountingDice(SharedDice):
    def __init__(self, seed: int, *leading: int):
        super().__init__(seed, *leading)
        self.shapes: list[tuple[int, ...]] = []

    def roll(self, *shape: int) -> Tensor:
        self.shapes.append(shape)
        return super().roll(*shape)


@pytest.mark.parametrize("text", ["3", "2x2", "[[0],[1],[0,0]]"])
def test_how_much_is_rolled_depends_on_the_shape_alone(text: str):
    shape = shape_of(text)
    rule = rule_of(EvalRule.rejection, shape, WARM)
    rolled = []
    for seed in range(4):
        dice = CountingDice(seed, SEQUENCES)
        propose(CountedDraft(seed=seed), shape, RoundPlan(rule, WARM), dice)
        rolled.append(dice.shapes)
    assert all(shapes == rolled[0] for shapes in rolled) and rolled[0]
    dice = CountingDice(0, SEQUENCES)
    propose(CountedDraft(), shape, GREEDY, dice)
    assert not dice.shapes


@pytest.mark.parametrize("text", ["3", "2x2", "dynamic:nodes=6,depth=3,top_k=2"])
def test_a_sequence_proposes_the_same_alone_and_in_a_batch(text: str):
    shape = shape_of(text)
    plan = RoundPlan(rule_of(EvalRule.auto, shape, WARM), WARM)
    seeds = list(range(SEQUENCES))
    together = propose(CountedDraft(), shape, plan, OwnDice(seeds, torch.device("cpu")))
    for row in (0, 17):
        draft = CountedDraft()
        draft.target.last_two = draft.target.last_two[row : row + 1]
        alone = propose(draft, shape, plan, OwnDice([seeds[row]], torch.device("cpu")))
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.parents[0], together.parents[row])


def test_layouts_are_made_once():
    device = torch.device("cpu")
    assert lay_out(chain(4), device) is lay_out(chain(4), device)
    assert [level.picks for level in lay_out(chain(4), device).levels] == [None] * 4


@pytest.mark.parametrize(
    ("rule", "sampling", "shape", "says"),
    [
        (AcceptRule.greedy, WARM, "3", "take rule=rejection or temperature=0"),
        (AcceptRule.rejection, WARM, "2x2", "take rule=tree_without_replacement"),
        (AcceptRule.argmax_draft, WARM, "2x2", "take rule=tree_one_hot"),
        (AcceptRule.argmax_draft, WARM, "dynamic:nodes=3,depth=2,top_k=2", "rule=tree_one_hot"),
        (
            AcceptRule.tree_without_replacement,
            WARM,
            "dynamic:nodes=3,depth=2,top_k=2",
            "take rule=tree_one_hot",
        ),
    ],
)
def test_pairs_that_would_not_be_exact_are_refused(
    rule: AcceptRule, sampling: Sampling, shape: str, says: str
):
    with pytest.raises(ConfigError, match=f"rule={rule.value}.*{says}"):
        propose(CountedDraft(), shape_of(shape), RoundPlan(rule, sampling), SharedDice(0))


def test_the_knob_means_a_rule_for_every_shape():
    line, tree, dynamic = (
        shape_of("3"),
        shape_of("2x2"),
        shape_of("dynamic:nodes=3,depth=2,top_k=2"),
    )
    exact = [choice for choice in EvalRule if choice is not EvalRule.typical]
    chains = [rule_of(choice, line, WARM) for choice in exact]
    trees = [rule_of(choice, tree, WARM) for choice in exact]
    for shape in (line, tree, dynamic):
        assert rule_of(EvalRule.typical, shape, WARM) is AcceptRule.typical
        assert rule_of(EvalRule.auto, shape, WARM) not in LOSSY
    assert chains == [AcceptRule.rejection, AcceptRule.argmax_draft, AcceptRule.rejection]
    assert trees == [
        AcceptRule.tree_without_replacement,
        AcceptRule.tree_one_hot,
        AcceptRule.tree_without_replacement,
    ]
    for choice in (EvalRule.auto, EvalRule.argmax_draft):
        assert rule_of(choice, dynamic, WARM) is AcceptRule.tree_one_hot
    with pytest.raises(ConfigError, match=r"eval\.rule=rejection.*eval\.rule=auto"):
        rule_of(EvalRule.rejection, dynamic, WARM)
    for choice in EvalRule:
        for shape in (line, tree, dynamic):
            assert rule_of(choice, shape, Sampling()) is AcceptRule.greedy
