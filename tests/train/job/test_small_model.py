"""The small model through the whole job: trained, stopped, measured, exported, started from."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from test_stop import stop_in_training

from launch.export import main as export

SMALL = ["draft=model", "draft.width=64", "draft.layers=1"]
# after the place's own settings
NO_EAGLE = ["draft.vocab_size=full", "draft.head_init=random", "ttt.depth=1"]


@pytest.fixture(scope="module")
def words(place):
    return lambda name, *more: place.words(name, *SMALL, *NO_EAGLE, *more)


@pytest.mark.slow
def test_the_job_and_the_same_command_after_a_stop(place, words, tiny_verifier: Path):
    place.finish(words("small"))
    run = place.run("small")
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["lossless"]["checked"] == report["lossless"]["identical"] == 2
    best = run / "best"
    assert json.loads((best / "draft.json").read_text())["family"] == "model"
    assert LlamaForCausalLM.from_pretrained(best).config.hidden_size == 64
    assert len(AutoTokenizer.from_pretrained(best)) == 128
    served = run / "export" / "vllm"
    assert export(["--check", str(served), "--verifier", str(tiny_verifier)]) == 0
    assert "draft_model" in (served / "README.md").read_text()
    assert stop_in_training(place, words("small_stopped", "stages=[train]"), 3) == 0
    out, _ = place.finish(words("small_stopped", "stages=[train]"))
    assert "resumed at step" in out
    place.assert_same_training("small_stopped", "small")
    on = ["draft=model", *NO_EAGLE, f"draft.init={best}", "optim.max_steps=2", "stages=[train]"]
    place.finish(place.words("small_on", *on))
    first, later = (
        json.loads((place.run(name) / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for name in ("small", "small_on")
    )
    assert later < first  # it goes on from what was learnt
