"""Checkpoints of another number of ranks: joined and cut anew, the curve goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("reshard_run.py")
FLOAT32 = ["1:float32", "3:float32"]
BFLOAT16 = ["2:bfloat16"]
LIVES = ((0, 4, 0, 2), (4, 8, 2, 1), (8, 12, 1, 4))  # first and end step, ranks before and now


def run(folder: Path, ranks: int, *words: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(RUN), str(folder), *map(str, words)]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def curves(folder: Path, lives: tuple[tuple[int, int, int, int], ...], jobs: list[str]) -> dict:
    """By job: loss and gradient norm of all steps, and the checksum of the last weights."""
    folder.mkdir()
    for first, end, before, now in lives:
        run(folder, now, first, end, before, *jobs)
    found = {}
    for job in jobs:
        ends = [end for _, end, _, _ in lives]
        parts = [
            json.loads((folder / f"{job.replace(':', '_')}.{e}.json").read_text()) for e in ends
        ]
        found[job] = [[step for part in parts for step in part["steps"]], parts[-1]["checksum"]]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_then_one_then_four_are_one_curve(tmp_path: Path):
    jobs = [*FLOAT32, *BFLOAT16]
    through = curves(tmp_path / "through", LIVES, jobs)
    alone = curves(tmp_path / "alone", ((0, 12, 0, 1),), jobs)
    for job in jobs:
        steps, checksum = through[job]
        rounding = 1e-5 if job in FLOAT32 else 3e-3
        for (loss, norm), (other, its) in zip(steps, alone[job][0], strict=True):
            assert loss == pytest.approx(other, rel=rounding), job
            assert job in BFLOAT16 or norm == pytest.approx(its, rel=10 * rounding), job
        assert checksum == pytest.approx(alone[job][1], rel=rounding), job
