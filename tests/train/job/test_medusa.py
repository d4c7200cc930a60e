"""Medusa down the whole road, in real processes: trained, stopped, resumed, measured, exported."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.draft_file import read_config
from models.medusa import MedusaConfig

WORDS = ["draft=tiny_medusa", "draft.vocab_size=64", "loss=ce"]


def say(place, *words: str) -> subprocess.CompletedProcess[str]:
    """Another command, from the checkout."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(place) -> Path:
    place.finish(place.words("medusa", *WORDS))
    return place.run("medusa")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_job_leaves_heads_a_report_and_an_export(place, run: Path):
    config = read_config(run / "best")
    assert isinstance(config, MedusaConfig) and (config.heads, config.draft_vocab_size) == (2, 64)
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] == 2
    exported = json.loads((run / "export" / "vllm" / "config.json").read_text())
    assert exported["architectures"] == ["MedusaModel"] and exported["num_heads"] == 2
    losses = [row["loss"] for row in place.lines("medusa") if "loss" in row]
    assert losses[-1] < losses[0]
    assert max(row["held_out"]["tau"] for row in place.lines("medusa") if "held_out" in row) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_stopped_training_goes_on_to_the_same_heads(place, run: Path):
    words = place.words("medusa_stopped", *WORDS, "stages=[train]")
    metrics = place.run("medusa_stopped") / "metrics.jsonl"
    with place.start(words) as process:
        while not metrics.is_file() or '"step": 3,' not in metrics.read_text():
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
    assert "stopped at step" in out
    out, _ = place.finish(words)
    assert "resumed at step" in out
    place.assert_same_training("medusa_stopped", "medusa")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tools_take_the_run(place, run: Path):
    checked = say(place, "launch.export", "--check", str(run / "export" / "vllm"), "--verifier",
                  str(place.verifier))  # fmt: skip
    assert checked.returncode == 0 and "in order" in checked.stdout, checked.stderr
    refused = say(place, "launch.export", str(run / "best"), "--to", "sglang")
    assert refused.returncode == 2 and "written for vLLM alone" in refused.stderr
    advice = say(place, "eval.tune", str(run))
    assert advice.returncode == 0 and "Medusa heads" in advice.stdout, advice.stderr
    proof = say(place, "eval.lossless", str(run), "--quick", "--shapes", "2", "2x2")
    assert proof.returncode == 0 and "PROVED" in proof.stdout, proof.stdout + proof.stderr
    assert "typical (LOSSY)" in proof.stdout  # as a control that was caught
