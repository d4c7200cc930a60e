"""A run folder belongs to what shaped its head, once a stage has succeeded in it."""

from pathlib import Path

import pytest

from conf.compose import load_config, to_yaml
from conf.runtime import run_dir
from conf.schema import ConfigError, RunConfig
from conf.settings import refuse_other_settings


def make_run(tmp_path: Path, *words: str, made: bool = True) -> RunConfig:
    cfg = load_config(["stages=[train]", f"run.root={tmp_path}", *words])
    folder = run_dir(cfg)
    (folder / "best").mkdir(parents=True) if made else folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(cfg))
    return cfg


def again(tmp_path: Path, *words: str) -> RunConfig:
    return load_config(["stages=[train]", f"run.root={tmp_path}", *words])


def test_another_value_is_refused_with_both(tmp_path: Path):
    make_run(tmp_path, "ttt.depth=3")
    with pytest.raises(
        ConfigError, match=r"ttt\.depth=4: run\.name=demo was made with ttt\.depth=3"
    ):
        refuse_other_settings(again(tmp_path, "ttt.depth=4"))


@pytest.mark.parametrize(
    "word",
    [
        "run.seed=1",
        "eval.valid_depth=2",
        "data.template_kwargs.thinking=true",
        "optim.lr=1e-5",
        "optim.packs_per_step=3",
        "optim.micro_batch_tokens=64",
    ],
)
def test_all_that_shapes_the_head_counts(tmp_path: Path, word: str):
    make_run(tmp_path)
    with pytest.raises(ConfigError, match=word.partition("=")[0].replace(".", r"\.")):
        refuse_other_settings(again(tmp_path, word))


@pytest.mark.parametrize(
    "word",
    [
        "eval.n_draft=2",
        "engine.threads=1",
        "engine.timeout_minutes=5",
        "data.workers=2",
        "verifier.attention=eager",
        "log.every=5",
        "engine.attention=plain",
        "engine.compile=true",
        "engine.recompute=true",
        "capture.mode=online",
        "capture.batch_tokens=64",
        "capture.shard_mib=1",
        "capture.tolerance=0.1",
    ],
)
def test_what_only_measures_may_change(tmp_path: Path, word: str):
    make_run(tmp_path)
    refuse_other_settings(again(tmp_path, word))


def test_a_run_that_never_got_anywhere_may_be_corrected(tmp_path: Path):
    make_run(tmp_path, "verifier.path=no/such-model", made=False)
    refuse_other_settings(again(tmp_path, "verifier.path=some/model"))
