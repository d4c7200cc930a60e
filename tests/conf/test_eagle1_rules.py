"""draft=eagle1 brings what the family needs; what it would not heed is refused by name."""

from dataclasses import replace

import pytest

from conf.compose import load_config
from conf.eagle1_rules import eagle1
from conf.schema import (
    FULL,
    ConfigError,
    DraftFamily,
    DraftSection,
    HeadInit,
    LayerInit,
    LossKind,
    RunConfig,
)


@pytest.fixture(scope="module")
def whole() -> RunConfig:
    return load_config(["draft=eagle1", "verifier=qwen3_8b"], [])


def test_the_group_file_is_enough(whole: RunConfig):
    assert (whole.ttt.depth, whole.verifier.aux_layers) == (1, [-1])
    assert (whole.draft.vocab_size, whole.draft.head_init) == (FULL, HeadInit.frozen)
    assert list(eagle1(whole)) == []


@pytest.mark.parametrize(
    ("knob", "value", "remedy"),
    [
        ("ttt.depth", 2, "ttt=one"),
        ("verifier.aux_layers", None, "verifier.aux_layers=[-1]"),
        ("verifier.aux_layers", [2, 15, 27], "verifier.aux_layers=[-1]"),
        ("draft.vocab_size", 4096, "draft.vocab_size=full"),
        ("draft.head_init", HeadInit.verifier, "draft.head_init=frozen"),
        ("draft.init", "runs/x/best", "draft.init=null"),
        ("draft.layers", 2, "draft.layers=1"),
        ("draft.layer_init", LayerInit.verifier, "draft.layer_init=random"),
        ("draft.fc_norm", True, "draft.fc_norm=false"),
        ("draft.qk_norm", True, "draft.qk_norm=false"),
        ("loss.kind", LossKind.tv, "loss.kind=kl"),
        ("engine.recompute", True, "engine.recompute=false"),
    ],
)
def test_what_it_would_not_heed_is_refused(whole: RunConfig, knob: str, value, remedy: str):
    section, name = knob.split(".")
    changed = replace(getattr(whole, section), **{name: value})
    cfg = replace(whole, **{section: changed})
    (message,) = eagle1(cfg)
    assert message.startswith(f"{knob}=") and "eagle1" in message
    assert f"set {remedy}" in message
    other = replace(cfg, draft=replace(cfg.draft, family=DraftFamily.eagle3))
    assert list(eagle1(other)) == []  # the rules are this family's alone


def test_the_family_without_its_file_is_told_what_it_lacks(whole: RunConfig):
    with pytest.raises(ConfigError, match=r"verifier.aux_layers=null.*as draft=eagle1 does"):
        load_config(["draft.family=eagle1"], [])
    bare = replace(RunConfig(), draft=DraftSection(family=DraftFamily.eagle1))
    assert len(list(eagle1(bare))) > 1
