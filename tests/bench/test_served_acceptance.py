"""The comparison of acceptance in vLLM with ours: what it counts, and its whole path."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conf.schema import Precision
from eval.acceptance import Counters

BENCH = Path(__file__).with_name("served_acceptance.py")
LAUNCH = Path(__file__).resolve().parents[1] / "launch"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH.parent), *sys.path])
    return importlib.import_module("served_acceptance")


@pytest.mark.parametrize(
    ("accepted", "reached"),
    [([700, 400, 200], [True, True]), ([711, 400, 200], [False, True]), ([709, 430, 240], [False] * 2)],
    ids=["equal", "one position", "all"],
)
def test_a_difference_beyond_its_bound_is_a_bar_missed(
    bench: ModuleType, accepted: list[int], reached: list[bool]
):
    own = bench.Own(Precision.float32, 3, [[1], [2]], Counters.of_chains([1] * 300, 0, 3))
    own = bench.Own(
        Precision.float32, 3, [[1], [2]], Counters(1000, 3000, 0, [700, 400, 200], [], 2)
    )
    found = bench.judge(own, bench.Served([[1], [3]], 1000, accepted))
    assert found.same == 1
    assert [bar.reached for bar in found.bars] == reached


@pytest.mark.vllm
@pytest.mark.slow  # half a minute
@pytest.mark.timeout(600)
def test_the_path_runs_and_leaves_its_figures(
    vllm_python: Path, tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(LAUNCH))
    head, verifier = importlib.import_module("serving").learnt_head(tiny_verifier, tmp_path)
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "served.json"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(6)))
    options = ["--verifier", verifier, "--prompts", prompts, "--tokens", "24", "--lengths", "2"]
    options += ["--dtypes", "float32", "--vllm-python", vllm_python, "--json", target]
    run = subprocess.run(
        [sys.executable, BENCH, head, *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "MISSED   prompts: 6" in run.stdout
    figures = json.loads(target.read_text())
    (one,) = figures["figures"]
    assert one["same_text"] == 6
    assert one["ours"]["rounds"] == one["vllm"]["rounds"] > 0
    assert one["ours"]["accepted_by_depth"] == one["vllm"]["accepted_by_depth"]
    assert one["ours"]["accepted_by_depth"][0] > 0
