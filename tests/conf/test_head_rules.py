"""The rules on draft.init and eval.head: heads that must be there, and where they may not lie."""

from pathlib import Path

import pytest

from conf.compose import load_config, to_yaml
from conf.schema import ConfigError, RunConfig
from conf.settings import refuse_other_settings


def load(*words: str, stages: str = "train") -> RunConfig:
    return load_config([f"stages=[{stages}]", *words])


@pytest.mark.parametrize("file", ["draft.json", "config.json"])
def test_a_head_that_is_there_passes(tmp_path: Path, file: str):
    (tmp_path / file).write_text("{}")
    assert load(f"draft.init={tmp_path}").draft.init == str(tmp_path)
    words = [f"eval.head={tmp_path}", f"eval.prompts={tmp_path / file}"]
    assert load(*words, stages="eval").eval.head == str(tmp_path)


def test_a_head_that_is_not_there_is_named_by_the_stage_that_reads_it(tmp_path: Path):
    for knob, stages in (("draft.init", "train"), ("eval.head", "eval")):
        with pytest.raises(ConfigError, match=rf"{knob}=.*: no folder with draft\.json or config"):
            load(f"{knob}={tmp_path}", f"eval.prompts={__file__}", stages=stages)
        load(f"{knob}={tmp_path}", stages="capture")


def test_a_run_cannot_start_from_itself(tmp_path: Path):
    best = tmp_path / "one" / "best"
    best.mkdir(parents=True)
    (best / "draft.json").write_text("{}")
    words = [f"run.root={tmp_path}", f"draft.init={best}"]
    with pytest.raises(ConfigError, match=r"run\.name=one writes; choose another run\.name"):
        load("run.name=one", *words)
    load("run.name=two", *words)


def test_a_run_keeps_the_head_it_started_from(tmp_path: Path):
    words = [f"run.root={tmp_path}", "run.name=one"]
    heads = [tmp_path / name for name in ("a", "b")]
    for head in heads:
        head.mkdir()
        (head / "draft.json").write_text("{}")
    first = load(*words, f"draft.init={heads[0]}")
    (tmp_path / "one" / "best").mkdir(parents=True)
    (tmp_path / "one" / "config.yaml").write_text(to_yaml(first))
    refuse_other_settings(first)
    for other in (load(*words), load(*words, f"draft.init={heads[1]}")):
        with pytest.raises(ConfigError, match=rf"was made with draft\.init={heads[0]}"):
            refuse_other_settings(other)


def test_a_start_and_chance_exclude_each_other(tmp_path: Path):
    (tmp_path / "draft.json").write_text("{}")
    words = [f"draft.init={tmp_path}", "draft.head_init=random"]
    with pytest.raises(ConfigError, match=r"draft\.head_init=random: draft\.init brings"):
        load(*words)


def test_a_job_that_trains_measures_what_it_trained(tmp_path: Path):
    (tmp_path / "draft.json").write_text("{}")
    words = [f"eval.head={tmp_path}", f"eval.prompts={__file__}"]
    with pytest.raises(ConfigError, match=r"eval\.head=.*another run\.name"):
        load(*words, stages="train,eval")
