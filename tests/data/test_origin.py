"""How far the verifier agrees with the data: found, said, required before training."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import JobError, RunConfig
from data.manifest import read_manifest, write_manifest
from data.origin import Agreement, agreement_of, data_facts, find_agreement, require_agreement
from data.preview import agreement_line


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    config = RunConfig()
    config.run.cache = str(tmp_path / "cache")
    config.verifier.path = "some/verifier"
    config.data.path = ["answers.jsonl"]
    return config


def captured(cfg: RunConfig, write_cache, samples, agreed: int) -> Path:
    """A cache of random states whose manifest says how many tokens were agreed on."""
    folder = write_cache(Path(cfg.run.cache) / "capture-0", samples)
    manifest = read_manifest(folder)
    shards = [replace(shard, agreed=0) for shard in manifest.shards]
    shards[0] = replace(shards[0], agreed=agreed)
    write_manifest(folder, replace(manifest, shards=shards))
    return folder


def test_counts_are_those_of_all_shards(cfg, write_cache, some_samples, prepared):
    folder = captured(cfg, write_cache, some_samples, agreed=7)
    found = agreement_of(read_manifest(folder))
    assert len(read_manifest(folder).shards) > 1
    assert found.tokens == sum(len(sample.input_ids) for sample in some_samples)
    assert found.supervised == sum(int(sample.loss_mask.sum()) for sample in some_samples)
    assert found.agreed == 7
    assert find_agreement(cfg, prepared) == found


def test_captures_of_other_data_or_another_verifier_are_not_meant(
    cfg, write_cache, some_samples, prepared
):
    assert find_agreement(cfg, prepared) is None
    folder = captured(cfg, write_cache, some_samples, agreed=7)
    assert find_agreement(cfg, replace(prepared, fingerprint="other")) is None
    cfg.verifier.path = "other/verifier"
    assert find_agreement(cfg, prepared) is None
    cfg.verifier.path = "some/verifier"
    (folder / "manifest.json").write_text("{")
    assert find_agreement(cfg, prepared) is None


def test_the_preview_says_it_or_how_to_get_it(cfg, write_cache, some_samples, prepared):
    assert "run torchrun -m data.capture" in agreement_line(cfg, prepared)
    captured(cfg, write_cache, some_samples, agreed=0)
    assert "is 0.0% of the supervised tokens" in agreement_line(cfg, prepared)


def test_training_stops_below_the_limit_unless_forced(cfg):
    poor = Agreement(tokens=1000, supervised=400, agreed=50)
    with pytest.raises(JobError) as stopped:
        require_agreement(cfg, poor)
    message = str(stopped.value)
    assert message.startswith("capture.min_agreement=0.15: the verifier's top choice is 12.5%")
    assert "answers.jsonl" in message
    assert "capture.min_agreement=0" in message
    assert "40.0% of 1,000 tokens supervised" in str(poor)
    assert "agrees with 12.5%" in str(poor)
    cfg.capture.min_agreement = 0.0
    require_agreement(cfg, poor)
    cfg.capture.min_agreement = 0.15
    require_agreement(cfg, replace(poor, agreed=60))  # at the limit


def test_the_card_gets_the_figures(cfg, write_cache, some_samples, prepared):
    assert data_facts(cfg, prepared).agreement is None
    captured(cfg, write_cache, some_samples, agreed=7)
    facts = data_facts(cfg, prepared)
    supervised = sum(int(sample.loss_mask.sum()) for sample in some_samples)
    assert facts.agreement == pytest.approx(7 / supervised)
    assert facts.samples == sum(not sample.held_out for sample in some_samples)
    assert facts.origin == "answers.jsonl"
