"""The step benchmark's whole path on tiny shapes, without the peers."""

import json
import subprocess
import sys
from pathlib import Path

STEP = Path(__file__).with_name("step.py")


def test_the_path_runs_and_every_printed_figure_is_in_the_json(tmp_path: Path):
    target = tmp_path / "step.json"
    options = ["--tiny", "--without-peers", "--depths", "7", "--shares", "40", "--threads", "1"]
    run = subprocess.run(
        [sys.executable, STEP, *options, "--rounds", "2", "--json", target],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "K = 7, 40 % supervised: 38 of 96 tokens" in run.stdout
    figures = json.loads(target.read_text())
    rows = {row["name"]: row for row in figures["cases"][0]["rows"]}
    assert set(rows) == {"eyrie", "eyrie bf16"}
    assert rows["eyrie"]["rows"] == [36, 34, 32, 30, 28, 26, 24]
    assert abs(rows["eyrie bf16"]["loss"] / rows["eyrie"]["loss"] - 1) < 0.01
    assert rows["eyrie"]["extra_bytes"] > 0
    unmeasured = {bar["what"] for bar in figures["bars"] if bar["reached"] is None}
    assert any("of the better peer" in what for what in unmeasured)
    assert figures["versions"]["eyrie"]["torch"]


def test_missing_peers_are_named_with_the_way_out(tmp_path: Path):
    command = [sys.executable, STEP, "--tiny", "--envs", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "peer_envs.sh" in run.stderr and "--without-peers" in run.stderr
