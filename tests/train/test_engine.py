"""DeepSpeed in real processes: stages, ranks and a partial last window give one curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("engine_run.py")
STEPS = "20"
FLOAT32 = [f"{stage}:float32" for stage in range(4)]


def curves(folder: Path, ranks: int, jobs: list[str]) -> dict:
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(RUN), STEPS, str(out), *jobs]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return curves(tmp_path_factory.mktemp("alone"), 1, [*FLOAT32, "1:bfloat16"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return curves(tmp_path_factory.mktemp("pair"), 2, FLOAT32)


@pytest.mark.parametrize("job", FLOAT32)
def test_stages_and_ranks_give_one_curve(alone: dict, pair: dict, job: str):
    reference = alone["1:float32"]
    assert reference["curve"][-1] < reference["curve"][0]
    for other in (alone[job], pair[job]):
        assert other["curve"] == pytest.approx(reference["curve"], rel=1e-5)
        assert other["checksum"] == pytest.approx(reference["checksum"], rel=1e-5)


def test_bfloat16_with_float32_masters_stays_close(alone: dict):
    curve, reference = alone["1:bfloat16"]["curve"], alone["1:float32"]["curve"]
    assert curve == pytest.approx(reference, rel=0.05)
