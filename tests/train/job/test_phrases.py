"""The job of the n-gram family, in this process: counted, measured, exported, and skipped."""

import json
from pathlib import Path

import pytest

from conf.compose import load_config, to_yaml
from conf.runtime import RankInfo, run_dir
from conf.schema import RunConfig
from eval.lossless import main as lossless
from eval.report_file import read_report
from models.draft_file import read_config
from models.phrases import PhraseConfig
from train import stages
from train.stages import run_in

ALONE = RankInfo(0, 1, 0)


def config(place, name: str, *more: str) -> RunConfig:
    words = [w for w in place.words(name, "draft=ngram", *more) if "draft.vocab_size" not in w]
    return load_config(words)


@pytest.fixture(scope="module")
def finished(place) -> RunConfig:
    own = f"run.cache={place.folder / 'cache_of_phrases'}"
    cfg = config(place, "phrases", "draft.phrases=context", own)
    run_in(run_dir(cfg), cfg, ALONE)
    return cfg


def test_what_the_job_leaves(finished: RunConfig, place, capsys):
    folder = run_dir(finished)
    assert isinstance(read_config(folder / "best"), PhraseConfig)
    held_out = json.loads((folder / "best" / "acceptance.json").read_text())
    assert held_out["counters"]["rounds"] > 0 and 1 <= held_out["tau"] <= 3
    report = read_report(folder / "eval" / "report.json")
    assert report.tau > 1 and report.data.held_out_tau == held_out["tau"]
    assert report.lossless.identical == report.lossless.checked > 0
    told = json.loads((folder / "export" / "vllm" / "speculative_config.json").read_text())
    assert told == {
        "method": "ngram",
        "num_speculative_tokens": finished.eval.n_draft,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    assert not list(Path(finished.run.cache).glob("capture-*"))  # no state was computed
    before = place.digests(folder / "best", folder / "eval")
    run_in(folder, finished, ALONE)
    assert place.digests(folder / "best", folder / "eval") == before
    said = capsys.readouterr().out
    for stage in ("capture", "train", "eval", "export"):
        assert any(line.startswith(stage) and "skipped" in line for line in said.splitlines())


def test_a_table_knows_the_training_answers(finished: RunConfig, place, monkeypatch):
    """Counting to seven is in its training: it accepts more than the context's phrases do."""
    words = "stages=[prepare,train]", "draft.phrases=both"
    cfg = config(place, "counted", *words)
    monkeypatch.setattr(stages, "fit", None)  # no training loop
    run_in(run_dir(cfg), cfg, ALONE)
    taus = [
        json.loads((run_dir(one) / "best" / "acceptance.json").read_text())["tau"]
        for one in (finished, cfg)
    ]
    assert taus[1] > taus[0] >= 1


@pytest.mark.slow
def test_the_proof_passes(finished: RunConfig, place, capsys, monkeypatch):
    folder = run_dir(finished)
    monkeypatch.chdir(place.folder)
    (folder / "config.yaml").write_text(to_yaml(finished))
    assert lossless([str(folder), "--quick"]) == 0, capsys.readouterr().out
