"""SIGTERM, as a scheduler sends it: a checkpoint at the step that was reached, exit code 0."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from conf.schema import Normalise, RunConfig
from data.records import TTTBatch
from train import loop
from train.loop import row_weights
from train.metrics import Interval
from train.stop import StopRequest

AT = 5  # no multiple of save_every, valid_every or every


def test_the_signal_is_noted_and_the_former_handler_comes_back():
    former = signal.getsignal(signal.SIGTERM)
    with StopRequest() as request:
        assert not request.asked and not request.by_any_rank(torch.device("cpu"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked and request.by_any_rank(torch.device("cpu"))
    assert signal.getsignal(signal.SIGTERM) is former


def wait_for(process: subprocess.Popen[str], run: Path, step: int) -> None:
    """Until metrics.jsonl has a line of ``step``."""
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or f'"step": {step},' not in metrics.read_text():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.001)


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The ranks that torchrun started."""
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in task.read_text().split()]


def stopped(place, name: str, ranks: int = 0, to: str = "self", code: int = 0) -> str:
    """Start ``name`` with all stages, send SIGTERM in the middle of training -> what it said."""
    with place.start(place.words(name), ranks) as process:
        wait_for(process, place.run(name), 3)
        for pid in [process.pid] if to == "self" else workers(process)[:1]:
            os.kill(pid, signal.SIGTERM)
        out, err = process.communicate()
    assert process.returncode == code, err[-3000:]
    run = place.run(name)
    assert not (run / "stages.json").exists() and not (run / "eval").exists()
    assert not (run / "export").exists()
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert (newest / "state.json").is_file()
    (said,) = [line for line in out.splitlines() if line.startswith("stopped at step ")]
    assert f"of {place.STEPS}" in said and said.endswith(str(newest)) and "same command" in said
    assert 3 <= int(said.split()[3]) == int(newest.name.split("-")[1]) < place.STEPS
    return out


def test_sigterm_saves_and_the_same_command_goes_on(place, finished: Path):
    assert "Traceback" not in stopped(place, "stopped")
    out, _ = place.finish(place.words("stopped"))
    assert "resumed at step" in out and "best held-out tau" in out
    place.assert_same_training("stopped", "whole")
    assert (place.run("stopped") / "export" / "vllm" / "config.json").is_file()
