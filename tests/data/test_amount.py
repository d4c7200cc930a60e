"""The amount of work in samples, against the chains that training itself makes of them."""

import pytest
import torch

from conf.schema import Supervise, TTTSection
from data import amount
from data.chains import Chains
from data.records import TokenizedSample


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_a_pass_is_the_chains_of_all_training_samples(
    flatten, some_samples: list[TokenizedSample], rule: Supervise, block: int, monkeypatch
):
    monkeypatch.setattr(amount, "BLOCK", block)
    ttt = TTTSection(depth=3, supervise=rule)
    found = amount.counts_of_training(flatten(some_samples), ttt)
    trained = [one for one in some_samples if not one.held_out]
    assert 0 < len(trained) < len(some_samples)
    chains = [
        Chains.of(one.loss_mask, torch.tensor([0, len(one.loss_mask)]), 3, rule) for one in trained
    ]
    chains = [one for one in chains if one.counts[0]]  # without a guess an idle row runs
    assert found.tokens == sum(len(one.loss_mask) for one in trained)
    assert found.guesses == [sum(one.counts[k] for one in chains) for k in range(3)]
    assert found.targets == sum(len(one.targets) for one in chains)
    assert found.rows[0] == sum(len(one.steps[0].rows) for one in chains)
    assert found.fed == sum(len(one.near) for one in chains)
    assert found.pairs[0] == sum(int((one.steps[0].positions + 1).sum()) for one in chains)
    lengths = [len(one.loss_mask) for one in trained]
    assert found.all_pairs == sum(n * (n + 1) // 2 for n in lengths)


def test_rows_that_end_early_are_counted_by_step():
    """Answer [2, 6) of 7 tokens: labels x[3..5], rows 1 to 3 at step 0, one fewer a step."""
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 0]).bool()
    found = amount.counts_of(mask, torch.tensor([0, 7]), 4, Supervise.span)
    assert found.rows == found.guesses == [3, 2, 1, 0]
    assert found.pairs == [2 + 3 + 4, 2 + 3, 2, 0]
    assert (found.fed, found.targets, found.all_pairs) == (3, 3, 28)
