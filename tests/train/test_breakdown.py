"""The breakdown names the part that takes long, and costs nothing when it is off."""

import re
import time

import pytest
import torch

from models.marks import PARTS, part
from train.breakdown import WARM_UP, Breakdown

CPU = torch.device("cpu")


def train(breakdown: Breakdown, steps: int) -> int:
    done = 0
    with breakdown:
        for _ in breakdown.watched(iter(range(steps))):
            with part("forward"):
                time.sleep(0.002)
                with part("mlp"):
                    time.sleep(0.004)
            with part("backward"):
                time.sleep(0.012)
            done += 1
    return done


def test_it_says_where_the_time_goes(capsys: pytest.CaptureFixture[str]):
    assert train(Breakdown(4, CPU), WARM_UP + 4) == WARM_UP + 4
    table = capsys.readouterr().out
    rows = {
        words.strip(): (float(ms), float(share))
        for words, ms, share in re.findall(r"^  (.+?) +([\d.]+) ms +([\d.]+)%$", table, re.M)
    }
    assert set(rows) == {words.strip() for words in PARTS.values()} | {
        "of all this, exchanged between ranks"
    }
    forward, mlp, backward = (rows[PARTS[n].strip()][0] for n in ("forward", "mlp", "backward"))
    assert 4 <= mlp < forward < backward
    outer = [rows[words][1] for words in PARTS.values() if not words.startswith(" ")]
    assert sum(outer) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("steps", [1, WARM_UP - 1, WARM_UP])
def test_a_run_that_ends_in_the_warm_up_says_so(steps, capsys: pytest.CaptureFixture[str]):
    assert train(Breakdown(4, CPU), steps) == steps
    assert capsys.readouterr().out.startswith("log.breakdown=4: nothing to show")


def test_a_run_that_ends_inside_is_divided_by_what_was_seen(capsys: pytest.CaptureFixture[str]):
    train(Breakdown(10, CPU), WARM_UP + 2)
    table = capsys.readouterr().out
    assert "mean of 2 steps" in table
    assert float(re.findall(r"a step's ([\d.]+) ms", table)[0]) > 18


def test_off_it_profiles_nothing(capsys: pytest.CaptureFixture[str]):
    breakdown = Breakdown(0, CPU)
    assert breakdown.profiler is None
    assert train(breakdown, 5) == 5
    assert capsys.readouterr().out == ""
