"""Typical acceptance against the paper's words, and as the lossy rule that it is."""

from dataclasses import replace

import pytest
import torch

from conf.choices import EvalRule
from conf.eval_rules import evaluation
from conf.schema import ConfigError, RunConfig
from conf.shapes import Shape, chain, parse_shape
from eval.advice.question import EXACT
from eval.proof.toy import CASES, CONTROLS, ToyCase, run_toy
from eval.propose import Proposal
from eval.round_plan import RoundPlan
from eval.typical import DELTA, EPSILON, accept_typical
from eval.verify import LOSSY, AcceptRule, given
from models.sampling import Sampling

VOCAB = 7
SHAPES = ["3", "[[0],[1],[2],[0,0],[0,1],[1,0],[1,0,0]]"]


def by_hand(shape: Shape, ids: list[int], target: torch.Tensor, most: int):
    """One sequence: every root-to-node path in turn, from the words of the paper."""
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for node in range(1, len(ids) + 1):
        path, at = [], node
        while at:
            path.insert(0, at)
            at = shape.parents[at - 1]  # type: ignore[union-attr]
        if len(path) > most:
            continue
        score, fine = 0.0, True
        for step in path:
            row = target[shape.parents[step - 1]]  # type: ignore[union-attr]
            entropy = -sum(float(p) * float(p.log()) for p in row if p > 0)
            chance = float(row[ids[step - 1]])
            fine &= chance > min(EPSILON, DELTA * float(torch.tensor(-entropy).exp()))
            score += float(torch.tensor(chance).log())
        if fine and (len(path), score) > best[:2] and (len(path) > best[0] or score > best[1]):
            best = (len(path), score, path)
    last = best[2][-1] if best[2] else 0
    return best[0], int(target[last].argmax()), best[2] + [0] * (shape.depth - best[0])


@pytest.mark.parametrize("text", SHAPES)
@pytest.mark.parametrize("counted", [False, True])
def test_the_longest_path_that_is_likely_enough_stands(text: str, counted: bool):
    shape, generator = parse_shape(text, "shape"), torch.Generator().manual_seed(1)
    sequences = 60
    sharp = torch.linspace(0.5, 5.0, sequences)[:, None, None]  # from flat to nearly certain
    logits = torch.randn(sequences, shape.nodes + 1, VOCAB, generator=generator).double() * sharp
    target = logits.softmax(-1)
    ids = torch.randint(0, VOCAB, (sequences, shape.nodes), generator=generator)
    parents = torch.tensor(shape.parents).expand(sequences, -1)  # type: ignore[union-attr]
    counts = torch.arange(sequences) % (shape.depth + 1) if counted else None
    verdict = accept_typical(given(target), Proposal(ids, parents, shape), counts)
    lengths = set()
    for i in range(sequences):
        most = shape.depth if counts is None else int(counts[i])
        length, token, path = by_hand(shape, ids[i].tolist(), target[i], most)
        assert int(verdict.accepted[i]) == length
        assert int(verdict.token[i]) == token
        assert verdict.path[i].tolist() == path
        lengths.add(length)
    assert lengths == set(range(shape.depth + 1))


def test_the_test_of_exactness_catches_it():
    cases = [case for case in CONTROLS if case.rule is AcceptRule.typical]
    assert {case.shape_kind for case in cases} == {"chain", "tree"}
    for case in cases:
        found = run_toy(case, seeds=1, sequences=10_000)
        assert not found.exact and found.as_expected
        # The same case, were it taken for an exact rule, through the product's own door.
        taken = run_toy(replace(case, control=None), seeds=1, sequences=10_000)
        assert not taken.exact and not taken.as_expected


def test_no_exact_case_and_no_advice_takes_it():
    exact = [case for case in CASES if isinstance(case, ToyCase) and case.control is None]
    assert not {case.rule for case in exact} & LOSSY
    assert not {rule.value for rule in LOSSY} & EXACT
    assert all("LOSSY" in rule.value for rule in LOSSY)


def test_at_temperature_0_it_is_refused_and_greedy():
    cfg = RunConfig()
    cfg.eval.rule = EvalRule.typical
    said = list(evaluation(cfg))
    assert len(said) == 1 and said[0].startswith("eval.rule=typical: at temperature 0")
    with pytest.raises(ConfigError, match="greedy"):
        RoundPlan(AcceptRule.greedy, Sampling(1.0))
    assert RoundPlan(AcceptRule.typical, Sampling(1.0)).check(chain(2)) is None
