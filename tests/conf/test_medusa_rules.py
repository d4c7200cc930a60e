"""draft=medusa brings what the family needs; what it would not heed is refused by name."""

from dataclasses import replace

import pytest

from conf.compose import load_config
from conf.medusa_rules import medusa
from conf.schema import (
    DraftFamily,
    ExportFormat,
    LayerInit,
    RunConfig,
    Stage,
    Supervise,
)


@pytest.fixture(scope="module")
def whole() -> RunConfig:
    return load_config(["draft=medusa", "verifier=qwen3_8b"], [])


def test_the_group_files_are_enough(whole: RunConfig):
    assert list(medusa(whole)) == []
    tiny = load_config(["draft=tiny_medusa"], [])
    assert (tiny.draft.family, tiny.draft.vocab_size) == (DraftFamily.medusa, 4096)


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        ("draft.fc_norm", True, "set draft.fc_norm=false"),
        ("draft.intermediate_size", 64, "set draft.intermediate_size=null"),
        ("draft.layer_init", LayerInit.verifier, "set draft.layer_init=random"),
        ("draft.init", "runs/x/best", "draft.init=null"),
        ("draft.layers", 0, "1 or more"),
        ("ttt.supervise", Supervise.any, "take ttt.supervise=span"),
        ("engine.recompute", True, "set engine.recompute=false"),
        ("export.formats", [ExportFormat.vllm, ExportFormat.sglang], "export.formats=[vllm]"),
        ("eval.valid_depth", 9, "ttt.depth=9"),
        ("eval.n_draft", 9, "take at most"),
        ("eval.n_sweep", [1, 9], "ttt.depth=9"),
        ("eval.trees", ["2x1x1x1x1x1x1x1x1"], "9 levels"),
        ("eval.trees", ["dynamic:nodes=9,depth=9,top_k=1"], "9 levels"),
    ],
)
def test_what_it_would_not_heed_is_refused(whole: RunConfig, knob: str, value, says: str):
    section, name = knob.split(".")
    changed = replace(getattr(whole, section), **{name: value})
    cfg = replace(whole, **{section: changed})
    (message,) = medusa(cfg)
    assert message.startswith(knob) and says in message
    other = replace(cfg, draft=replace(cfg.draft, family=DraftFamily.eagle3))
    assert list(medusa(other)) == []  # the rules are this family's alone


def test_shapes_are_judged_where_they_are_measured(whole: RunConfig):
    deep = replace(whole, eval=replace(whole.eval, n_draft=9), stages=[Stage.train])
    assert list(medusa(deep)) == []
    elsewhere = replace(whole, eval=replace(whole.eval, n_draft=9, head="some/head"))
    assert list(medusa(elsewhere)) == []
