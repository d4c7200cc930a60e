"""The benchmark of a GPU, short: MFU, memory, decoding; bars reached, figures kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(os.environ.get("EYRIE_GPU_OUT", ROOT / "runs" / "gpu"))  # where figures stay


def measured(name: str, *words: str) -> dict:
    """What the benchmark says; all it printed is kept beside its figures. Bars must be reached."""
    KEPT.mkdir(parents=True, exist_ok=True)
    figures = KEPT / f"{name}.json"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(ROOT / "tests" / "bench" / "gpu.py"), "--json", str(figures)]
    with (KEPT / f"{name}.txt").open("w") as said:
        done = subprocess.run([*command, *words], stdout=said, stderr=said, check=False)
    printed = (KEPT / f"{name}.txt").read_text()
    assert done.returncode == 0, printed[-3000:]
    found = json.loads(figures.read_text())
    missed = [bar for bar in found["bars"] if bar["reached"] is False]
    assert found["bars"] and not missed, printed
    return found


@pytest.mark.gpu("figures", seconds=120)
def test_training_steps_of_8b_and_70b_heads():
    words = ("--minutes", "1.2", "--lengths", "2048", "8192", "--shares", "40")
    found = measured("steps", "--only", "steps", *words)
    timed = [case for case in found["cases"] if not case["error"]]
    assert timed and all(0 < case["mfu"] < 1 and case["extra_bytes"] > 0 for case in timed)


@pytest.mark.gpu("figures", seconds=60)
def test_decoding_eager_and_graphed():
    found = measured("decoding", "--only", "decoding")
    kinds = {one["kind"] for one in found["decoding"]["answers"]}
    assert {"eager", "graphed"} <= kinds


def test_a_missed_bar_fails_and_what_was_printed_is_kept(tmp_path, monkeypatch):
    """The benchmark itself walks its path on a CPU in tests/bench/test_gpu.py."""
    reached = [True]

    def run(command: list[str], stdout, **_) -> subprocess.CompletedProcess:
        stdout.write("the table")
        bars = [{"what": "MFU", "reached": one} for one in reached]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"bars": bars}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setitem(measured.__globals__, "KEPT", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    assert measured("steps", "--only", "steps")["bars"]
    assert (tmp_path / "steps.txt").read_text() == "the table"
    for bars in ([True, False], []):
        reached[:] = bars
        with pytest.raises(AssertionError):
            measured("steps")
