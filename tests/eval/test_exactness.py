"""What every rule emits, computed and not sampled: each outcome with its exact chance.

A rule is a function of the numbers it rolls: one a guess, then one for the verifier's token. Its
outcome changes at one threshold a guess, and at one a token, and bisection finds them, whatever
the rule computes inside.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, permutations, product

import pytest
import torch
from torch import Tensor

from conf.shapes import StaticShape, chain, parse_shape
from eval.proof.wrong_rules import judge_by_whole_draft, judge_by_whole_target
from eval.propose import Proposal, lay_out
from eval.rounds import verify
from eval.tree_verify import Left, Tree, walk, walk_drawn
from eval.verify import AcceptRule, Verdict, accept_drawn, given, overlap

HIGHEST = 1 - 2**-53
BISECTIONS = 60

Law = dict[tuple[int, ...], float]  # chance of each emitted text
Judge = Callable[[Proposal, "Numbers"], Verdict]


class Numbers:
    """Dice with the numbers given: [S, M], then [S]."""

    def __init__(self, guesses: Tensor, token: Tensor):
        self.numbers = [guesses, token]

    def roll(self, *shape: int) -> Tensor:
        numbers = self.numbers.pop(0)
        assert tuple(numbers.shape[1:]) == shape
        return numbers


@dataclass(frozen=True)
class Draws:
    """Proposals that a draft may make, and the chance of each."""

    ids: Tensor  # [S, M]
    chance: Tensor  # [S] fp64


def certain(ids: list[int]) -> Draws:
    return Draws(torch.tensor([ids]), torch.ones(1, dtype=torch.float64))


def proposal_of(shape: StaticShape, ids: Tensor) -> Proposal:
    layout = lay_out(shape, torch.device("cpu"))
    return Proposal(ids, layout.parents.expand(ids.shape), shape, source=layout.source)


def outcomes(judge: Judge, shape: StaticShape, draws: Draws, size: int) -> Law:
    """Chance of each emitted text: the ids along the path and then the verifier's token."""
    ids, chance = draws.ids, draws.chance
    fixed = torch.full(ids.shape, HIGHEST, dtype=torch.float64)  # every test failed

    def verdict(guesses: Tensor, token: Tensor) -> Verdict:
        own = ids.repeat_interleave(len(token) // len(ids), 0)
        return judge(proposal_of(shape, own), Numbers(guesses, token))

    def border(below: Callable[[Tensor], Tensor], count: int) -> Tensor:
        """[count] fp64: up to which number ``below`` is true."""
        low, high = torch.zeros(count).double(), torch.ones(count).double()
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            true = below(middle.clamp_max(HIGHEST))
            low, high = torch.where(true, middle, low), torch.where(true, high, middle)
        return low

    for node in range(1, shape.nodes + 1):

        def stands(number: Tensor, node: int = node, fixed: Tensor = fixed) -> Tensor:
            trial = fixed.clone()
            trial[:, node - 1] = number
            return (verdict(trial, torch.zeros_like(number)).path == node).any(-1)

        share = border(stands, len(ids))
        stood = fixed.clone()
        stood[:, node - 1] = 0.0
        keep = share > 0  # those where the node can stand
        ids, fixed = torch.cat([ids, ids[keep]]), torch.cat([fixed, stood[keep]])
        chance = torch.cat([chance * (1 - share), (chance * share)[keep]])
    wide, tokens = fixed.repeat_interleave(size, 0), torch.arange(size).repeat(len(ids))
    upto = border(lambda number: verdict(wide, number).token <= tokens, len(wide))
    shares = torch.diff(upto.unflatten(0, (-1, size)), dim=-1, prepend=torch.zeros(len(ids), 1))
    paths = verdict(fixed, torch.zeros_like(chance)).path
    found: Law = {}
    for own, path, part in zip(ids.tolist(), paths.tolist(), chance[:, None] * shares, strict=True):
        text = tuple(own[node - 1] for node in path if node)
        for token, value in enumerate(part.tolist()):
            found[(*text, token)] = found.get((*text, token), 0.0) + value
    return found


def first_tokens(found: dict[tuple[int, ...], float], size: int) -> Tensor:
    total = torch.zeros(size, dtype=torch.float64)
    for text, chance in found.items():
        total[text[0]] += chance
    return total


def variation(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().sum() / 2)


class Pair:
    """A target and a draft over ``size`` tokens, context-dependent; the draft lacks some."""

    def __init__(self, seed: int, size: int, draft_tokens: list[int]):
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self.root = torch.randn(size, generator=generator).double().softmax(-1)
        self.after = torch.randn(size, size, generator=generator).double().softmax(-1)
        self.draft_root = self.spread(generator, draft_tokens)
        self.draft_after = torch.stack([self.spread(generator, draft_tokens) for _ in range(size)])

    def spread(self, generator: torch.Generator, tokens: list[int]) -> Tensor:
        whole = torch.zeros(self.size, dtype=torch.float64)
        whole[tokens] = torch.randn(len(tokens), generator=generator).double().softmax(-1)
        return whole

    def rows(self, proposal: Proposal) -> tuple[Tensor, Tensor]:
        """Target [S, M+1, V] and draft [S, P, V]; the context is the token before."""
        ids, copies = proposal.ids, len(proposal.ids)
        assert isinstance(proposal.shape, StaticShape)
        target = torch.cat([self.root.expand(copies, 1, -1), self.after[ids]], 1)
        first, *others = dict.fromkeys(proposal.shape.parents)
        assert first == 0
        rows = [self.draft_root.expand(copies, -1)]
        rows += [self.draft_after[ids[:, node - 1]] for node in others]
        return target, torch.stack(rows, 1)

    def tree(self, proposal: Proposal) -> Tree:
        target, draft = self.rows(proposal)
        return Tree(proposal, given(target), given(draft))

    def judge(self, rule: AcceptRule) -> Judge:
        def judged(proposal: Proposal, dice: Numbers) -> Verdict:
            target, draft = self.rows(proposal)
            return verify(rule, given(target), given(draft), proposal, dice)

        return judged

    def draws(self, shape: StaticShape) -> Draws:
        """Every proposal with its chance: siblings are distinct draws, in order."""
        parents = list(dict.fromkeys(shape.parents))
        sets = [permutations(range(self.size), shape.parents.count(node)) for node in parents]
        found: list[list[int]] = []
        chances: list[float] = []
        for chosen in product(*sets):
            ids = [
                chosen[parents.index(p)][r] for p, r in zip(shape.parents, shape.ranks, strict=True)
            ]
            chance = 1.0
            for node, tokens in zip(parents, chosen, strict=True):
                row = self.draft_root if node == 0 else self.draft_after[ids[node - 1]]
                left = row.clone()
                for token in tokens:
                    chance *= float(left[token] / left.sum())
                    left[token] = 0.0
            if chance > 0:
                found.append(ids)
                chances.append(chance)
        return Draws(torch.tensor(found), torch.tensor(chances, dtype=torch.float64))

    def exact(self, text: tuple[int, ...]) -> float:
        chance = float(self.root[text[0]])
        for before, token in pairwise(text):
            chance *= float(self.after[before, token])
        return chance


def law(pair: Pair, judge: Judge, shape: StaticShape) -> Law:
    """The emitted text's law over all draws of the draft."""
    return outcomes(judge, shape, pair.draws(shape), pair.size)


def blocks(found: Law, pair: Pair, length: int) -> tuple[Tensor, Tensor]:
    """Chances of the first ``length`` tokens, found and exact; a short text is drawn on."""
    sizes = (pair.size,) * length
    emitted, wanted = torch.zeros(sizes).double(), torch.zeros(sizes).double()
    for text in product(range(pair.size), repeat=length):
        wanted[text] = pair.exact(text)
    for text, chance in found.items():
        for rest in product(range(pair.size), repeat=max(0, length - len(text))):
            whole = (text + rest)[:length]
            going_on = 1.0
            for k in range(len(text), length):
                going_on *= float(pair.after[whole[k - 1], whole[k]])
            emitted[whole] += chance * going_on
    return emitted, wanted


CHAIN_RULES = (AcceptRule.argmax_draft, AcceptRule.rejection)
TREE_RULES = (AcceptRule.tree_one_hot, AcceptRule.tree_without_replacement)
DRAWN = (AcceptRule.rejection, AcceptRule.tree_without_replacement)
TWO_DEEP = "[[0],[1],[0,0],[0,1],[1,0]]"


@pytest.mark.parametrize("rule", DRAWN, ids=lambda rule: rule.value)
@pytest.mark.parametrize("tokens", [[0, 1, 2, 3], [0, 2, 3], [1, 2]], ids=str)
def test_draws_emit_the_target_exactly(rule: AcceptRule, tokens: list[int]):
    """Three-token blocks; the draft has all tokens or some."""
    shape = chain(2) if rule is AcceptRule.rejection else parse_shape(TWO_DEEP, "shape")
    assert isinstance(shape, StaticShape)
    pair = Pair(1, 4, tokens)
    emitted, wanted = blocks(law(pair, pair.judge(rule), shape), pair, 3)
    assert variation(emitted.flatten(), wanted.flatten()) < 1e-12


@pytest.mark.parametrize("rule", [AcceptRule.argmax_draft, AcceptRule.tree_one_hot])
@pytest.mark.parametrize("ids", [[0, 1, 2, 3, 1], [3, 2, 0, 3, 3], [1, 0, 1, 2, 0]], ids=str)
def test_certain_guesses_emit_the_target_exactly(rule: AcceptRule, ids: list[int]):
    shape = chain(2) if rule is AcceptRule.argmax_draft else parse_shape(TWO_DEEP, "shape")
    assert isinstance(shape, StaticShape)
    pair = Pair(2, 4, [0, 1, 2, 3])
    found = outcomes(pair.judge(rule), shape, certain(ids[: shape.nodes]), 4)
    emitted, wanted = blocks(found, pair, 3)
    assert variation(emitted.flatten(), wanted.flatten()) < 1e-12


def siblings(count: int) -> StaticShape:
    shape = parse_shape(f"[{','.join(f'[{rank}]' for rank in range(count))}]", "shape")
    assert isinstance(shape, StaticShape)
    return shape


def accepted_share(found: Law) -> float:
    return sum(chance for text, chance in found.items() if len(text) > 1)


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_of_several_candidates_is_what_the_theory_says(seed: int):
    """Facts, 8.3: six tokens, one to three candidates.

    One candidate: sum of min(target, draft), or the target of the draft's argmax. More of them:
    the target's mass of the top ranks, and draws without replacement gain with each.
    """
    pair = Pair(seed, 6, list(range(6)))
    order = pair.draft_root.sort(descending=True).indices.tolist()
    drawn: list[float] = []
    for count in (1, 2, 3):
        shape = siblings(count)
        ranked = outcomes(pair.judge(AcceptRule.tree_one_hot), shape, certain(order[:count]), 6)
        assert variation(first_tokens(ranked, 6), pair.root) < 1e-12
        mass = float(pair.root[order[:count]].sum())
        assert accepted_share(ranked) == pytest.approx(mass, abs=1e-12)
        found = law(pair, pair.judge(AcceptRule.tree_without_replacement), shape)
        assert variation(first_tokens(found, 6), pair.root) < 1e-12
        drawn.append(accepted_share(found))
    both = float(overlap(pair.root, pair.draft_root))
    assert drawn[0] == pytest.approx(both, abs=1e-12)
    assert drawn[0] < drawn[1] < drawn[2] < 1


def test_wrong_rules_are_far_from_the_target():
    """The controls: by how much, so that the tests above could not pass them."""
    pair = Pair(1, 4, [0, 1, 2, 3])
    shape = siblings(2)
    order = pair.draft_root.sort(descending=True).indices.tolist()[:2]

    def whole_draft(proposal: Proposal, dice: Numbers) -> Verdict:
        return walk(pair.tree(proposal), dice, None, judge_by_whole_draft)

    def whole_target(proposal: Proposal, dice: Numbers) -> Verdict:
        tree = replace(pair.tree(proposal), draft=None)
        return walk(tree, dice, None, judge_by_whole_target)

    def as_if_drawn(proposal: Proposal, dice: Numbers) -> Verdict:
        return walk(pair.tree(proposal), dice, None, Left.judge)

    drawn = law(pair, whole_draft, shape)
    assert variation(first_tokens(drawn, 4), pair.root) > 0.005
    for wrong in (whole_target, as_if_drawn):
        found = outcomes(wrong, shape, certain(order), 4)
        assert variation(first_tokens(found, 4), pair.root) > 0.01


def test_top_ranks_judged_as_draws_never_emit_the_second_token():
    """EAGLE issue 110: target and draft (.51, .49), both tokens proposed."""
    row = torch.tensor([0.51, 0.49], dtype=torch.float64)

    def rows(proposal: Proposal) -> tuple[Tensor, Tensor]:
        copies = len(proposal.ids)
        return row.expand(copies, 3, 2), row.expand(copies, 1, 2)

    def wrong(proposal: Proposal, dice: Numbers) -> Verdict:
        target, draft = rows(proposal)
        return walk_drawn(given(target), given(draft), proposal, dice)

    def right(proposal: Proposal, dice: Numbers) -> Verdict:
        return verify(AcceptRule.tree_one_hot, given(rows(proposal)[0]), None, proposal, dice)

    assert first_tokens(outcomes(wrong, siblings(2), certain([0, 1]), 2), 2).tolist() == [1, 0]
    found = first_tokens(outcomes(right, siblings(2), certain([0, 1]), 2), 2)
    assert variation(found, row) < 1e-12


def one_level(target: list[float], draft: list[float], rule: AcceptRule) -> Judge:
    """The same rows at every node."""
    wanted, offered = (torch.tensor(row, dtype=torch.float64) for row in (target, draft))

    def judged(proposal: Proposal, dice: Numbers) -> Verdict:
        copies, nodes = proposal.ids.shape
        rows = given(wanted.expand(copies, nodes + 1, -1))
        return verify(rule, rows, given(offered.expand(copies, nodes, -1)), proposal, dice)

    return judged


def test_siblings_without_a_token_left_never_stand():
    """The draft's filter left one token for three siblings; the others repeat some token."""
    target, draft = [0.2, 0.3, 0.5], [0.0, 1.0, 0.0]
    for second, third in ((1, 1), (0, 2), (2, 1)):
        judge = one_level(target, draft, AcceptRule.tree_without_replacement)
        found = outcomes(judge, siblings(3), certain([1, second, third]), 3)
        assert variation(first_tokens(found, 3), torch.tensor(target, dtype=torch.float64)) < 1e-12
        assert accepted_share(found) == pytest.approx(0.3, abs=1e-12)


def test_repeated_top_ranks_never_stand_twice():
    target = [0.2, 0.3, 0.5]
    judge = one_level(target, target, AcceptRule.tree_one_hot)
    found = outcomes(judge, siblings(3), certain([1, 1, 1]), 3)
    assert variation(first_tokens(found, 3), torch.tensor(target, dtype=torch.float64)) < 1e-12
    assert accepted_share(found) == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize("rule", [AcceptRule.rejection, AcceptRule.tree_without_replacement])
def test_disjoint_supports_emit_the_target_and_accept_nothing(rule: AcceptRule):
    shape = chain(1) if rule is AcceptRule.rejection else siblings(2)
    target = [0.0, 0.0, 0.25, 0.75]
    judge = one_level(target, [0.5, 0.5, 0.0, 0.0], rule)
    found = outcomes(judge, shape, certain([1, 0][: shape.nodes]), 4)
    assert first_tokens(found, 4).tolist() == pytest.approx(target, abs=1e-12)
    assert accepted_share(found) == 0


@pytest.mark.parametrize("rule", [AcceptRule.rejection, AcceptRule.tree_without_replacement])
def test_equal_distributions_accept_the_first_draw(rule: AcceptRule):
    """The residual is 0 and nothing is ever drawn from it."""
    row = [0.125, 0.5, 0.375]
    shape = chain(1) if rule is AcceptRule.rejection else siblings(2)
    found = outcomes(one_level(row, row, rule), shape, certain([1, 2][: shape.nodes]), 3)
    assert {text[0] for text, chance in found.items() if chance > 0} == {1}


@pytest.mark.parametrize("rule", list(AcceptRule)[1:], ids=lambda rule: rule.value)
def test_filtered_tokens_are_neither_accepted_nor_emitted(rule: AcceptRule):
    """The target's filter removed token 0, which the draft likes best."""
    shape = chain(1) if rule in CHAIN_RULES else siblings(2)
    judge = one_level([0.0, 0.4, 0.6], [0.7, 0.2, 0.1], rule)
    found = outcomes(judge, shape, certain([0, 1][: shape.nodes]), 3)
    assert first_tokens(found, 3)[0] == 0


def test_the_bisection_finds_a_known_law():
    """One draw, by hand: accept 2 with .5/.8, else the residual (.3, .2, 0)."""
    target, draft = torch.tensor([[0.3, 0.2, 0.5], [0.0, 0.2, 0.8]], dtype=torch.float64)

    def judge(proposal: Proposal, dice: Numbers) -> Verdict:
        copies = len(proposal.ids)
        rows = target.expand(copies, 2, 3)
        return accept_drawn(rows, draft.expand(copies, 1, 3), proposal.ids, dice)

    found = outcomes(judge, chain(1), certain([2]), 3)
    assert accepted_share(found) == pytest.approx(0.625, abs=1e-12)
    assert found[(0,)] == pytest.approx(0.375, abs=1e-12)
    assert found.get((1,), 0.0) == pytest.approx(0.0, abs=1e-12)
