"""The comparison of acceptance in vLLM with ours: what it counts, and its whole path."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conf.schema import Precision
from data.records import Turn
from data.template import encode_prompt
from eval.acceptance import Counters
from models.draft_file import save_draft

BENCH = Path(__file__).with_name("served_acceptance.py")
LAUNCH = Path(__file__).resolve().parents[1] / "launch"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH.parent), *sys.path])
    return importlib.import_module("served_acceptance")


@pytest.mark.parametrize(
    ("accepted", "reached"),
    [
        ([700, 400, 200], [True, True]),
        ([711, 400, 200], [False, True]),
        ([709, 430, 240], [False] * 2),
    ],
    ids=["equal", "one position", "all"],
)
def test_a_difference_beyond_its_bound_is_a_bar_missed(
    bench: ModuleType, accepted: list[int], reached: list[bool]
):
    counters = Counters(1000, 3000, 0, [700, 400, 200], [], 2)
    own = bench.Own(Precision.float32, 3, [[1], [2]], counters)
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
    serving, learnt = importlib.import_module("serving"), importlib.import_module("learnt")
    row = importlib.import_module("pairwise").COVER[0]
    verifier = serving.tiny(row, tmp_path, tiny_verifier)
    tokens = [encode_prompt([Turn("user", f"say {i}")], verifier.tokenizer, {}) for i in range(6)]
    draft = learnt.overfit(verifier, tokens, row.section, serving.TINY)
    save_draft(tmp_path / "head", draft.config, draft.state_dict())
    prompts, target = tmp_path / "prompts.jsonl", tmp_path / "served.json"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(6)))
    options = [
        "--verifier",
        verifier.facts.path,
        "--prompts",
        prompts,
        "--tokens",
        "24",
        "--lengths",
        "2",
    ]
    options += ["--dtypes", "float32", "--vllm-python", vllm_python, "--json", target]
    run = subprocess.run(
        [sys.executable, BENCH, tmp_path / "head", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "MISSED   prompts: 6" in run.stdout
    figures = json.loads(target.read_text())
    (one,) = figures["figures"]
    assert one["same_text"] == 6
    assert one["ours"]["rounds"] == one["vllm"]["rounds"] > 0
    assert one["ours"]["accepted_by_depth"] == one["vllm"]["accepted_by_depth"]
    assert one["ours"]["accepted_by_depth"][0] > 0
