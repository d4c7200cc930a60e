"""A budget of FLOPs becomes passes over the training samples."""

from dataclasses import replace

import pytest
import torch

from conf.schema import ConfigError, HeadInit, OptimSection, RunConfig
from data.amount import counts_of_training
from data.records import Samples
from models.flops import eagle3_flops
from train.budget import budget_of, eagle3_sizes


def samples_of(masks: list[list[int]], held_out: list[bool]) -> Samples:
    lengths = torch.tensor([0, *map(len, masks)])
    flat = torch.tensor([one for mask in masks for one in mask], dtype=torch.uint8)
    none = torch.zeros(len(masks), dtype=torch.int64)
    return Samples(
        tokens=flat.int(),
        mask=flat,
        offsets=lengths.cumsum(0),
        id_text=flat[:0],
        id_offsets=torch.zeros(len(masks) + 1, dtype=torch.int64),
        greedy=none.bool(),
        held_out=torch.tensor(held_out),
        prompts=none,
    )


@pytest.fixture
def samples() -> Samples:
    return samples_of([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1, 1]], [False, True, False])


def settings(flops: float | None) -> RunConfig:
    cfg = RunConfig()
    cfg.optim = OptimSection(flops=flops, epochs=7.0)
    cfg.ttt.depth = 2
    return cfg


def test_passes_cost_what_the_budget_has(make_draft, samples: Samples, capsys):
    config = make_draft().config
    a_pass = budget_of(settings(1.0), samples, config).a_pass
    found = budget_of(settings(2.5 * a_pass), samples, config)
    assert found.a_pass == a_pass
    assert found.within(OptimSection(epochs=7.0)).epochs == pytest.approx(2.5)
    assert found.figures(5, steps_per_epoch=2) == {"flops": pytest.approx(found.flops)}
    found.announce(4, steps_per_epoch=2)
    said = capsys.readouterr().out
    assert f"{a_pass:.4g} FLOPs a pass" in said and "are 2.5 passes" in said
    assert f"4 steps spend {2 * a_pass:.4g}" in said


def test_without_a_budget_epochs_count(make_draft, samples: Samples, capsys):
    found = budget_of(settings(None), samples, make_draft().config)
    assert found.within(OptimSection(epochs=7.0)).epochs == 7.0
    found.announce(4, 2)
    assert not found.figures(5, 2) and not capsys.readouterr().out


def test_a_pass_counts_training_samples_and_what_is_trained(make_draft, samples: Samples):
    cfg, config = settings(1.0), make_draft().config
    counts = counts_of_training(samples, cfg.ttt)
    assert counts.tokens == 11  # the held-out sample has 4 more
    found = budget_of(cfg, samples, config)
    assert found.a_pass == eagle3_flops(eagle3_sizes(cfg, config), counts).total
    cfg.draft.head_init = HeadInit.frozen
    assert budget_of(cfg, samples, config).a_pass < found.a_pass


def test_what_costs_nothing_is_refused(make_draft, samples: Samples):
    empty = replace(samples, held_out=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ConfigError, match=r"optim\.flops=1: a pass over these samples costs"):
        budget_of(settings(1.0), empty, make_draft().config)
