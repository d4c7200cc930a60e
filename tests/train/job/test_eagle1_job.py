"""The whole job with draft=eagle1; stopped and gone on with, it is the same to the last bit."""

import json
import time
from pathlib import Path

import pytest

from models.eagle1 import Eagle1Config
from models.export.check import check

WORDS = (
    "draft=eagle1",
    "draft.head_init=frozen",
    "draft.vocab_size=full",  # the place's settings are an EAGLE-3 head's
    "ttt.depth=1",
    "verifier.aux_layers=[-1]",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_runs_through_and_a_stop_changes_no_bit(place):
    place.finish(place.words("eagle1", *WORDS))
    run = place.run("eagle1")
    config = Eagle1Config.from_json((run / "best" / "draft.json").read_text())
    assert config.aux_layers == [8]  # of eight layers
    exported = run / "export" / "vllm"
    assert check(exported, Path(place.verifier)) == []
    assert '"method": "eagle"' in (exported / "README.md").read_text()
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
    losses = [row["loss"] for row in place.lines("eagle1") if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]

    words = place.words("eagle1_stopped", *WORDS, "stages=[train]")
    with place.start(words) as process:
        metrics = place.run("eagle1_stopped") / "metrics.jsonl"
        while not metrics.is_file() or '"step": 9,' not in metrics.read_text():
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.01)
        process.terminate()
        assert "stopped at step" in process.communicate()[0]
    place.finish(words)
    place.assert_same_training("eagle1_stopped", "eagle1")
