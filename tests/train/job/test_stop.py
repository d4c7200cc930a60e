"""SIGTERM, as a scheduler sends it: a checkpoint at the step that was reached, exit code 0."""

import os
import signal
from pathlib import Path

import pytest
import torch

from conf.schema import Normalise, RunConfig, Supervise
from data.chains import Chains
from data.records import TTTBatch
from train import loop
from train.loop import row_weights
from train.metrics import Interval
from train.stop import StopRequest


def test_the_signal_is_noted_and_the_former_handler_comes_back():
    former = signal.getsignal(signal.SIGTERM)
    with StopRequest() as request:
        assert not request.asked and not request.by_any_rank(torch.device("cpu"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked and request.by_any_rank(torch.device("cpu"))
    assert signal.getsignal(signal.SIGTERM) is former


def stop_in_training(place, words: list[str], at: int, ranks: int = 0, to: str = "job") -> int:
    """Start the job, send SIGTERM once step ``at`` is logged -> the exit code.

    ``to``: the job's first process, or one rank of those that torchrun started.
    """
    (name,) = [word.split("=")[1] for word in words if word.startswith("run.name=")]
    run = place.run(name)
    with place.start(words, ranks) as process:
        place.wait_for(process, name, at)
        os.kill(process.pid if to == "job" else place.workers(process)[-1], signal.SIGTERM)
        out, err = process.communicate()
    (said,) = [line for line in out.splitlines() if line.startswith("stopped at step ")]
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert f"of {place.STEPS}" in said and said.endswith(str(newest)) and "same command" in said
    assert at <= int(said.split()[3]) == int(newest.name.split("-")[1]) < place.STEPS, err[-3000:]
    assert (newest / "state.json").is_file()
    left = [name for name in ("stages.json", "eval", "export") if (run / name).exists()]
    assert not left, "a stage after training ran"
    return process.returncode


def test_sigterm_saves_and_the_same_command_goes_on(place, finished: Path):
    assert stop_in_training(place, place.words("stopped"), 3) == 0
    out, _ = place.finish(place.words("stopped"))
    assert "resumed at step" in out and "best held-out tau" in out
    place.assert_same_training("stopped", "whole")
    assert (place.run("stopped") / "export" / "vllm" / "config.json").is_file()


def test_one_rank_that_is_asked_takes_the_other_along(place, finished: Path):
    assert stop_in_training(place, place.words("left"), 3, ranks=2, to="rank") == 0


@pytest.mark.slow
def test_two_ranks_that_were_stopped_train_the_same_curve(place, finished: Path):
    words = place.words("stopped_pair", "stages=[train]")
    assert stop_in_training(place, words, 3, ranks=2, to="rank") == 0
    # torchrun hands the signal on and waits for its ranks, which end with 0; its own code is 1.
    assert stop_in_training(place, words, 15, ranks=2) == 1
    place.finish(words, ranks=2)
    place.finish(place.words("quiet_pair", "stages=[train]"), ranks=2)
    place.assert_same_training("stopped_pair", "quiet_pair")


def batch(rows: int) -> TTTBatch:
    """One sample with an answer of ``rows`` tokens: one row fewer at depth 0."""
    mask = torch.zeros(12, dtype=torch.bool)
    mask[2 : 2 + rows] = True
    ids, states = torch.zeros(12, dtype=torch.int64), torch.zeros(12, 4)
    chains = Chains.of(mask, torch.tensor([0, 12]), 2, Supervise.span)
    return TTTBatch(ids, ids, states, states, ids, states[:, 0], 1, chains)


@pytest.mark.parametrize("rule", list(Normalise))
def test_a_step_reduces_once_and_the_wish_rides_along(rule: Normalise, monkeypatch):
    reduced = []

    def three_ranks(tensor: torch.Tensor) -> torch.Tensor:
        reduced.append(tensor)
        return tensor * 3

    monkeypatch.setattr(loop, "sum_over_ranks", three_ranks)
    cfg = RunConfig()
    cfg.loss.normalise = rule
    for asked in (False, True):
        shares = row_weights(cfg, [batch(6), batch(0)], asked)
        assert shares.stops == 3 * asked
        assert shares.total == 3 * (5 if rule is Normalise.token else 1)
        assert float(shares.weights[0]) == pytest.approx(1 / 15)
    assert len(reduced) == 2


def test_sums_of_an_unfinished_interval_travel_in_the_checkpoint():
    device = torch.device("cpu")
    first, other = Interval(2, device), Interval(2, device)
    first.totals += torch.tensor([[0.1, 0.2], [3, 4], [1, 0]], dtype=torch.float64)
    other.take_up([[9.0] * 6, first.pending()], rank=1)
    assert torch.equal(other.totals, first.totals)
    other.take_up([], rank=1)
    assert torch.equal(other.totals, first.totals)
