"""The first 20 steps of the demo on its real verifier: a refactor is finished when they are equal.

The stored curve is that of the plain step that the trimmed, packed and fused one replaced; it took
two samples a step, in the order that is stored beside it.
"""

import json
from pathlib import Path

import pytest

WORDS = [
    "stages=[prepare,capture,train]",
    "data.max_samples=48",
    *(f"{knob}=float32" for knob in ("verifier.dtype", "capture.dtype", "engine.precision")),
    *(f"{knob}=20" for knob in ("optim.max_steps", "log.valid_every", "log.save_every")),
    "optim.lr=1e-4",
    "engine.threads=1",
    "log.every=1",
    "ttt.depth=5",  # the recipe of that time
    "draft.fit_rows=null",
    "draft.head_init=verifier",
    "draft.norm_output=false",
]
ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "demo.json"
ORDER = ROOT / "tests" / "golden" / "demo_order.json"
RUN = ROOT / "tests" / "train" / "job" / "golden_run.py"
ANSWERS = ROOT / "data" / "demo" / "answers.jsonl"


def test_twenty_steps_of_the_demo(place, smollm2: Path, tmp_path: Path):
    places = {"run.root": tmp_path, "run.cache": tmp_path / "cache", "data.path": ANSWERS}
    words = [f"{knob}={path}" for knob, path in places.items()]
    words = [str(ORDER), f"verifier.path={smollm2}", *words, *WORDS]
    with place.start(words, program=str(RUN)) as process:
        _, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    lines = (tmp_path / "demo" / "metrics.jsonl").read_text().splitlines()
    curve = [row["loss"] for row in map(json.loads, lines) if "loss" in row]
    assert curve == pytest.approx(json.loads(GOLDEN.read_text()), rel=1e-4)
