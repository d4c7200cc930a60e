"""Exact rules pass the counting test and wrong ones fail it (user report B73)."""

import pytest
import torch

from eval.proof.chi_square import chi_square_p
from eval.proof.toy import (
    BLOCKS,
    CASES,
    CONTROLS,
    ERROR_RATE,
    EXACT,
    SEEDS,
    TREE,
    ToyCase,
    exact_blocks,
    make_tables,
    run_toy,
)
from eval.proof.wrong_rules import Control
from eval.verify import LOSSY, AcceptRule
from models.sampling import Sampling

QUICK = 10_000  # sequences


def name_of(case: ToyCase) -> str:
    control = case.control.value if case.control else "exact"
    words = (case.rule.value, case.shape_kind, case.vocabulary, case.filters, control)
    return "-".join(words).replace(" ", "-")


@pytest.mark.parametrize("case", EXACT, ids=name_of)
def test_exact_rules_pass(case: ToyCase):
    result = run_toy(case, seeds=1, sequences=QUICK)
    assert result.exact and result.as_expected, result


@pytest.mark.parametrize("case", CONTROLS, ids=name_of)
def test_wrong_rules_fail(case: ToyCase):
    result = run_toy(case, seeds=1, sequences=QUICK)
    assert not result.exact and result.as_expected, result


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_whole_proof(case: ToyCase):
    """What eval.lossless runs."""
    result = run_toy(case)
    assert result.as_expected, result
    assert result.bound == pytest.approx(ERROR_RATE / (len(EXACT) * SEEDS * len(BLOCKS)))


def test_the_cases_cover_every_rule_shape_filter_vocabulary_and_control():
    """B73: argmax drafts, sampled drafts, top-k trees, temperature 0.7 with top-p 0.9."""
    assert {case.rule for case in EXACT} == set(AcceptRule) - LOSSY
    assert {case.shape_kind for case in EXACT} == {"chain", "tree", "dynamic"}
    assert {case.control for case in CONTROLS} == set(Control)
    sampled = {(case.rule, case.shape) for case in EXACT if not case.sampling.greedy}
    for rule, shape in sampled:
        own = [case for case in EXACT if (case.rule, case.shape) == (rule, shape)]
        for pruned in (True, False):
            found = [case.sampling for case in own if case.pruned is pruned]
            assert Sampling(0.7, top_p=0.9) in found
            assert any(one.top_k for one in found) and any(one.min_p for one in found)
    filters = {case.sampling for case in EXACT if case.sampling.greedy}
    assert all(one.top_p < 1 for one in filters)


def test_a_control_of_another_seed_fails_too():
    """The smallest of the biases, on other tables."""
    case = next(c for c in CONTROLS if c.control is Control.draft_not_renormalised)
    assert case.shape == TREE
    assert not run_toy(case, seeds=3, sequences=QUICK).exact


def test_chi_square_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    expected = torch.tensor([50.0, 30.0, 20.0], dtype=torch.float64)
    counts = torch.tensor([60.0, 25.0, 15.0], dtype=torch.float64)
    reference = stats.chisquare(counts.numpy(), expected.numpy()).pvalue
    assert chi_square_p(counts, expected) == pytest.approx(reference, rel=1e-9)


def test_chi_square_pools_rare_cells_and_refuses_impossible_ones():
    expected = torch.tensor([90.0, 4.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    pooled = chi_square_p(torch.tensor([88.0, 12.0, 0, 0, 0]), expected)
    assert pooled == pytest.approx(
        chi_square_p(torch.tensor([88.0, 12.0]), torch.tensor([90.0, 10.0]).double())
    )
    assert chi_square_p(torch.tensor([89.0, 4, 3, 3, 1]), expected) == 0.0
    certain = torch.tensor([100.0, 0.0], dtype=torch.float64)
    assert chi_square_p(torch.tensor([100.0, 0.0]), certain) == 1.0
    assert chi_square_p(torch.tensor([99.0, 1.0]), certain) == 0.0


def test_p_values_of_a_direct_draw_are_uniform():
    """The test's own size: a sampler that is right by definition fails 5 % of the time at 5 %."""
    table, _ = make_tables(0)
    exact = exact_blocks(table, Sampling(temperature=1.0))[2].flatten()
    generator = torch.Generator().manual_seed(0)
    low = 0
    for _ in range(300):
        drawn = torch.multinomial(exact, 20_000, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=len(exact)).double()
        low += chi_square_p(counts, exact * 20_000) < 0.05
    assert 4 <= low <= 30  # 15 expected; both bounds are three standard deviations or more away


def test_exact_blocks_are_distributions():
    table, _ = make_tables(3)
    one, two, three = exact_blocks(table, Sampling(temperature=0.7, top_p=0.9))
    torch.testing.assert_close(two.sum(-1), one, atol=1e-6, rtol=0)
    torch.testing.assert_close(three.sum(-1), two, atol=1e-6, rtol=0)
    assert float(one.sum()) == pytest.approx(1, abs=1e-6)
