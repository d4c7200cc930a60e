"""kill -9 at twenty random moments of a capture (report B59): nothing torn, nothing done twice."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from conf.schema import (
    CaptureSection,
    Device,
    Precision,
    RunConfig,
    StateDtype,
    VerifierSection,
)
from data.records import PreparedData

ROOT = Path(__file__).resolve().parents[2]


def test_twenty_kills_at_random_moments(
    tiny_verifier: Path, prepared: PreparedData, tmp_path: Path, flatten
):
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    few = replace(
        prepared, samples=flatten(prepared.samples[:10])
    )  # ten shards: a capture takes 0.2 s
    (tmp_path / "job.pickle").write_bytes(pickle.dumps((cfg, few)))
    script = Path(__file__).with_name("kill_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "job.pickle"), "20"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] == 20
    assert found["torn"] == 0, "a shard under its own name was not whole"
    assert found["redone"] == 0, "a whole shard was written again"
    assert found["same"] and not found["left"]
    assert len(found["whole_at_kill"]) > 2, "the kills came all at the same place"
