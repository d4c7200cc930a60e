"""The walk over trees against chains, against paths taken one by one, and near a limit."""

import pytest
import torch
from torch import Tensor

from conf.shapes import DynamicShape, Shape, StaticShape, chain, parse_shape
from eval.proof.toy import CHAIN, DYNAMIC, TREE, VOCAB, TableDraft, TableTarget, make_tables
from eval.propose import Proposal, lay_out, propose
from eval.round_plan import RoundPlan
from eval.rounds import RANKS, judge_proposal, ranks_of, verify
from eval.tree_verify import children_of, walk_certain, walk_drawn, walk_greedy
from eval.verify import LOSSY, AcceptRule, accept_certain, accept_drawn, accept_greedy, given
from models.sampling import OwnDice, Sampling, SharedDice

MANY = 3000
WARM = Sampling(temperature=1.0)
CPU = torch.device("cpu")
SAMPLED = [rule for rule in AcceptRule if rule not in LOSSY | {AcceptRule.greedy}]
RAGGED = "[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[1,0,0],[1,0,1]]"


def random_rows(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).softmax(-1)


def shape_of(text: str) -> Shape:
    return parse_shape(text, "shape")


def chain_proposal(ids: Tensor) -> Proposal:
    layout = lay_out(chain(ids.shape[-1]), CPU)
    return Proposal(
        ids, layout.parents.expand(ids.shape), chain(ids.shape[-1]), None, layout.source
    )


@pytest.mark.parametrize("bounded", [False, True])
def test_on_a_chain_the_tree_rules_are_the_chain_rules_draw_for_draw(bounded: bool):
    target, draft = random_rows(0, MANY, 5, 6), random_rows(1, MANY, 4, 6)
    ids = draft.argmax(-1)
    ids[::2] = torch.randint(0, 6, (MANY // 2, 4), generator=torch.Generator().manual_seed(2))
    counts = torch.arange(MANY) % 5 if bounded else None
    proposal = chain_proposal(ids)
    pairs = (
        (accept_greedy(target, ids, counts), walk_greedy(target, proposal, counts)),
        (
            accept_certain(target, ids, SharedDice(3, MANY), counts),
            walk_certain(given(target), proposal, SharedDice(3, MANY), counts),
        ),
        (
            accept_drawn(target, draft, ids, SharedDice(3, MANY), counts),
            walk_drawn(given(target), given(draft), proposal, SharedDice(3, MANY), counts),
        ),
    )
    for of_chain, of_tree in pairs:
        assert torch.equal(of_chain.accepted, of_tree.accepted)
        assert torch.equal(of_chain.token, of_tree.token)
        assert torch.equal(of_chain.path, of_tree.path)
        assert len(set(of_chain.accepted.tolist())) > 2
        if counts is not None:
            assert bool((of_tree.accepted <= counts).all())


def test_children_are_listed_in_order():
    parents = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 4]])
    first, second = children_of(parents).tolist()
    assert first == [[1, 2, 5], [3, 4, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert second == [[1, 0, 0], [2, 3, 4], [0, 0, 0], [0, 0, 0], [5, 0, 0], [0, 0, 0]]


def longest_path(best: list[int], ids: list[int], parents: list[int], limit: int) -> list[int]:
    """By the definition: of all paths whose every token is the argmax before it, the longest."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(ids, parents, strict=True):
        node = len(paths)
        stands = token == best[parent] and (parent == 0 or paths[parent][-1:] == [parent])
        paths.append([*paths[parent], node] if stands and len(paths[parent]) < limit else [])
    return max(paths, key=len)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("text", [RAGGED, "3x2x2", DYNAMIC])
def test_a_greedy_walk_takes_the_longest_right_path(text: str, bounded: bool):
    sequences = 300
    table, draft_table = make_tables(0, tuple(range(VOCAB)))
    target = TableTarget(table, sequences)
    target.last_two = torch.randint(
        0, VOCAB, (sequences, 2), generator=torch.Generator().manual_seed(1)
    )
    draft = TableDraft(draft_table, tuple(range(VOCAB)), target)
    plan = RoundPlan(AcceptRule.greedy, Sampling())
    shape = shape_of(text)
    proposal = propose(draft, shape, plan, SharedDice(0, sequences))
    logits = target.score(proposal)
    counts = torch.arange(sequences) % (shape.depth + 1) if bounded else None
    outcome = judge_proposal(
        proposal, logits, draft.target_ids, plan, SharedDice(0, sequences), counts
    )
    best, lengths = logits.argmax(-1), set()
    for row in range(sequences):
        wanted = longest_path(
            best[row].tolist(),
            proposal.ids[row].tolist(),
            proposal.parents[row].tolist(),
            shape.depth if counts is None else int(counts[row]),
        )
        path = outcome.verdict.path[row].tolist()
        assert path == wanted + [0] * (shape.depth - len(wanted))
        assert int(outcome.verdict.accepted[row]) == len(wanted)
        assert int(outcome.verdict.token[row]) == int(best[row, wanted[-1] if wanted else 0])
        lengths.add(len(wanted))
    assert lengths == set(range(shape.depth + 1))


@pytest.mark.parametrize("text", [CHAIN, TREE, DYNAMIC])
def test_temperature_zero_ignores_filters_on_both_sides(text: str):
    """User report B72: every rule that may judge the shape emits plain greedy's tokens."""
    shape = shape_of(text)
    rules = [AcceptRule.greedy, AcceptRule.tree_one_hot]
    rules += [AcceptRule.argmax_draft, AcceptRule.rejection] if shape.is_chain else []
    rules += [] if isinstance(shape, DynamicShape) else [AcceptRule.tree_without_replacement]
    found: list[list[int]] = []
    for rule in rules:
        for cold in (Sampling(), Sampling(0.0, top_k=1, top_p=0.3, min_p=0.9)):
            table, draft_table = make_tables(2)
            target = TableTarget(table, 1)
            draft = TableDraft(draft_table, (0, 2, 3, 5), target)
            plan, emitted = RoundPlan(rule, cold), []
            for _ in range(12):
                proposal = propose(draft, shape, plan, SharedDice(0, 1))
                verdict = judge_proposal(
                    proposal, target.score(proposal), draft.target_ids, plan, SharedDice(0, 1)
                ).verdict
                nodes = [node for node in verdict.path[0].tolist() if node]
                round_ = [int(proposal.ids[0, node - 1]) for node in nodes] + verdict.token.tolist()
                emitted += round_
                target.commit(torch.tensor([round_]), verdict.accepted)
            found.append(emitted[:12])
    table, _ = make_tables(2)
    text_so_far = [1, 2]
    for _ in range(12):
        text_so_far.append(int(table[text_so_far[-2], text_so_far[-1]].argmax()))
    assert all(tokens == text_so_far[2:] for tokens in found)


@pytest.mark.parametrize(
    "rule",
    [AcceptRule.tree_one_hot, AcceptRule.tree_without_replacement],
    ids=lambda rule: rule.value,
)
def test_counts_bound_the_walk_and_rule_nothing_out(rule: AcceptRule):
    """All would stand; where the bound is met the token is a draw of the target at that node."""
    shape = shape_of("2x2")
    assert isinstance(shape, StaticShape)
    layout, certain = lay_out(shape, CPU), torch.eye(7)
    # Each node's row names its first child's token for certain: 1, then 3 or 5.
    target = certain[[1, 3, 5, 6, 6, 6, 6]].expand(3, 7, 7)
    ids = torch.tensor([1, 2, 3, 4, 5, 6]).expand(3, 6)
    proposal = Proposal(ids, layout.parents.expand(3, 6), shape, None, layout.source)
    draft = certain[[1, 3, 5]].expand(3, 3, 7)
    counts = torch.tensor([0, 1, 2])
    verdict = verify(rule, given(target), given(draft), proposal, SharedDice(0, 3), counts)
    assert verdict.accepted.tolist() == [0, 1, 2]
    assert verdict.token.tolist() == [1, 3, 6]
    assert verdict.path.tolist() == [[0, 0], [1, 0], [1, 3]]


class CountingDice(SharedDice):
    rolled = 0

    def roll(self, *shape: int) -> Tensor:
        numbers = super().roll(*shape)
        self.rolled += numbers.numel() // len(numbers)
        return numbers


@pytest.mark.parametrize("rule", SAMPLED, ids=lambda rule: rule.value)
def test_a_rule_rolls_a_number_a_guess_and_one_more(rule: AcceptRule):
    """Whatever comes out: all stand, none stands, or no level is open."""
    draft = random_rows(1, 20, 3, 6)
    ids = torch.tensor([0, 1, 2]).expand(20, 3)
    agreeing = torch.eye(6)[[0, 1, 2, 3]].expand(20, 4, 6)
    opposing = torch.eye(6)[[5, 5, 5, 5]].expand(20, 4, 6)
    for target in (agreeing, opposing, random_rows(0, 20, 4, 6)):
        for counts in (None, torch.zeros(20, dtype=torch.long)):
            dice = CountingDice(0, 20)
            verify(rule, given(target), given(draft), chain_proposal(ids), dice, counts)
            assert dice.rolled == 4


@pytest.mark.parametrize("text", [TREE, DYNAMIC])
def test_a_sequence_is_judged_the_same_alone_and_in_a_batch(text: str):
    shape, seeds = shape_of(text), list(range(50))
    rule = AcceptRule.tree_one_hot
    if isinstance(shape, StaticShape):
        rule = AcceptRule.tree_without_replacement
    plan = RoundPlan(rule, Sampling(0.9, top_p=0.95))

    def play(rows: list[int]) -> tuple[Tensor, Tensor]:
        table, draft_table = make_tables(1)
        target = TableTarget(table, len(rows))
        target.last_two = torch.tensor([[row % VOCAB, row // VOCAB % VOCAB] for row in rows])
        draft = TableDraft(draft_table, (0, 2, 3, 5), target)
        dice = OwnDice([seeds[row] for row in rows], CPU)
        proposal = propose(draft, shape, plan, dice)
        logits = target.score(proposal)
        verdict = judge_proposal(proposal, logits, draft.target_ids, plan, dice).verdict
        return verdict.path, verdict.token

    paths, tokens = play(seeds)
    for row in (0, 13, 49):
        path, token = play([row])
        assert torch.equal(path[0], paths[row]) and int(token) == int(tokens[row])


def test_ranks_say_where_the_verifiers_token_stood():
    """Ten ranks are told apart; beyond them, and outside the draft's vocabulary, it is -1."""
    vocab_size, draft_ids = 14, torch.arange(1, 13)  # the draft has tokens 1 to 12
    draft_logits = -torch.arange(12.0).expand(1, 4, 12)  # token 1 first, then 2, ...
    best = torch.tensor([1, 10, 11, 13, 0])  # at the root and after each guess
    target_logits = torch.eye(vocab_size)[best][None]
    proposal = chain_proposal(torch.ones(1, 4, dtype=torch.long))
    kept = Proposal(proposal.ids, proposal.parents, proposal.shape, draft_logits, proposal.source)
    assert RANKS == 10
    assert ranks_of(kept, target_logits, draft_ids).tolist() == [[0, 9, -1, -1]]


def test_overlap_and_ranks_are_measured_on_chains_alone():
    table, draft_table = make_tables(0)
    target = TableTarget(table, 5)
    draft = TableDraft(draft_table, (0, 2, 3, 5), target)
    dice = SharedDice(0, 5)
    for rule, text, measured in (
        (AcceptRule.rejection, "3", True),
        (AcceptRule.argmax_draft, "3", True),
        (AcceptRule.tree_one_hot, TREE, False),
    ):
        plan = RoundPlan(rule, WARM, measure_overlap=True)
        proposal = propose(draft, shape_of(text), plan, dice)
        outcome = judge_proposal(proposal, target.score(proposal), draft.target_ids, plan, dice)
        assert (outcome.overlap is not None) is (outcome.ranks is not None) is measured
        if outcome.overlap is not None and outcome.ranks is not None:
            assert outcome.overlap.shape == outcome.ranks.shape == (5, 3)
            assert bool((outcome.overlap > 0).all()) and bool((outcome.overlap < 1).all())
            assert bool((outcome.ranks < 4).all())
    cold = RoundPlan(AcceptRule.greedy, Sampling(), measure_overlap=True)
    proposal = propose(draft, chain(3), cold, dice)
    outcome = judge_proposal(proposal, target.score(proposal), draft.target_ids, cold, dice)
    assert outcome.overlap is not None
    assert bool(((outcome.overlap > 0) & (outcome.overlap < 1)).all())  # at temperature 1
