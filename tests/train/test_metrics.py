"""What training reports, and the learning rate it reports."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from conf.runtime import RankInfo
from conf.schema import JobError, OptimSection, RunConfig
from eval.acceptance import Counters, report_acceptance
from train import metrics
from train.loop import Schedule, refuse_non_finite
from train.metrics import Interval, MetricsLog, flat
from train.ttt import TTTOutput

ALONE = RankInfo(0, 1, 0)


def output(sums: list[float], counts: list[int], hits: list[int]) -> TTTOutput:
    return TTTOutput(
        torch.tensor(0.0), torch.tensor(sums), torch.tensor(counts), torch.tensor(hits)
    )


def test_an_interval_adds_up_and_starts_anew():
    interval = Interval(2, torch.device("cpu"))
    interval.started -= 10.0  # ten seconds ago
    interval.add(output([6.0, 2.0], [3, 1], [2, 0]), 15)
    interval.add(output([4.0, 1.0], [2, 1], [1, 1]), 7)
    found = interval.close(0.5)
    assert found["loss"] == pytest.approx((10 + 0.5 * 3) / 5)  # each step's sum over rows of step 0
    assert found["loss_by_depth"] == pytest.approx([2.0, 1.5])
    assert found["accuracy_by_depth"] == pytest.approx([0.6, 0.5])
    assert found["supervised_tokens"] == 5
    assert found["tokens_per_second"] == pytest.approx(22 / 10, rel=0.05)
    interval.add(output([3.0, 0.0], [3, 0], [3, 0]), 4)
    again = interval.close(0.5)
    assert again["loss_by_depth"] == [1.0, 0.0] and again["accuracy_by_depth"] == [1.0, 0.0]


def test_an_interval_reduces_once_whatever_it_adds_up(monkeypatch):
    reduced = []
    monkeypatch.setattr(metrics, "sum_over_ranks", lambda sums: reduced.append(sums) or sums)
    interval = Interval(2, torch.device("cpu"))
    for _ in range(5):
        interval.add(output([6.0, 2.0], [3, 1], [2, 0]), 15)
    assert not reduced
    interval.close(0.5)
    assert len(reduced) == 1


def test_an_interval_without_a_supervised_row_is_all_zero():
    found = Interval(3, torch.device("cpu")).close(0.8)
    assert found["loss"] == 0 and found["loss_by_depth"] == [0, 0, 0]
    assert all(math.isfinite(value) for value in flat(found).values())


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    return MetricsLog(RunConfig(), tmp_path, ALONE, 10)


def test_what_is_not_a_number_becomes_null(log: MetricsLog):
    report = report_acceptance([Counters(2, 4, 2, [0, 0], [2, 0], 3)], 10, seed=0)
    assert math.isnan(report.alpha_by_depth[1])
    log.held_out(5, report)
    (line,) = log.path.read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line
    row = json.loads(line)
    assert row["step"] == 5 and row["held_out"]["alpha_by_depth"] == [0.0, None]
    log.close()


def test_truncate_drops_later_lines_and_half_a_line(log: MetricsLog):
    log.truncate(0)  # nothing is there yet
    for step in (2, 4, 6, 8):
        log.write(step, {"loss": 1.5 / step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    before = log.path.read_text().splitlines()
    log.truncate(4)
    assert log.path.read_text().splitlines() == before[:2]
    assert log.bar.n == 4
    log.write(6, {"loss": 0.25})
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [2, 4, 6]
    log.truncate(0)
    assert log.path.read_text() == ""
    log.close()


def test_other_ranks_write_nothing(tmp_path: Path):
    log = MetricsLog(RunConfig(), tmp_path, RankInfo(1, 2, 1), 10)
    log.write(1, {"loss": 1.0})
    log.truncate(0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_lists_and_groups_become_series():
    figures = {"loss": 1.0, "a": [0.5, 0.25], "held_out": {"tau": 2, "x": {"low": 0.0}, "n": None}}
    assert flat(figures) == {
        "loss": 1.0,
        "a/0": 0.5,
        "a/1": 0.25,
        "held_out/tau": 2,
        "held_out/x/low": 0.0,
    }


@pytest.mark.parametrize("figures", [{"loss": math.nan}, {"loss": 1.0, "x": [0.1, -math.inf]}])
def test_training_ends_when_a_figure_is_not_finite(figures: dict):
    cfg = RunConfig(optim=OptimSection(lr=0.25))
    refuse_non_finite(cfg, {"loss": 1.0, "x": [0.1]}, 7)
    with pytest.raises(JobError, match=r"^optim\.lr=0\.25: .*(loss is nan|x/1 is -inf) at step 7"):
        refuse_non_finite(cfg, figures, 7)


def test_the_rate_warms_up_and_falls_to_its_share():
    schedule = Schedule(OptimSection(lr=2.0, warmup_share=0.1, min_lr_share=0.25), total=100)
    rates = [schedule.lr(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == max(rates) == 2.0
    falling = rates[10:]
    assert all(later < earlier for earlier, later in pairwise(falling))
    assert rates[55] == pytest.approx(2.0 * (0.25 + 0.75 / 2))  # half-way down the cosine
    assert rates[100] == pytest.approx(0.5)


def test_short_runs_have_a_rate_too():
    assert Schedule(OptimSection(lr=2.0, warmup_share=0.0), total=1).lr(0) == 2.0
    two = Schedule(OptimSection(lr=2.0, warmup_share=0.9), total=2)
    assert 0 < two.lr(0) < two.lr(1) == 2.0
