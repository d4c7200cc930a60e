"""The rules of draft.family=model: one step, no knob of a head, and vLLM alone."""

import pytest

from conf.compose import load_config
from conf.schema import ConfigError, DraftFamily

MODEL = ["stages=[capture]", "draft=model"]


@pytest.mark.parametrize("name", ["model", "tiny_model"])
def test_the_groups_bring_all_that_the_family_needs(name: str):
    cfg = load_config(["stages=[capture]", f"draft={name}"])
    assert cfg.draft.family is DraftFamily.model and cfg.ttt.depth == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("ttt.depth=7", r"ttt\.depth=7: .* set ttt=one"),
        ("draft.vocab_size=100", r"draft\.vocab_size=100: has no effect .* set .*=full"),
        ("draft.fc_norm=true", r"draft\.fc_norm=true: has no effect"),
        ("draft.width=100", r"draft\.width=100: must be a multiple of 64"),
        ("draft.layers=0", r"draft\.layers=0: must be"),
        ("ttt.feed=own", r"ttt\.feed=own: has an effect for .*eagle3 alone"),
        ("engine.zero_stage=3", r"engine\.zero_stage=3: .* set engine\.zero_stage=2"),
        ("engine.attention=plain", r"engine\.attention=plain: has no effect"),
        ("engine.recompute=true", r"engine\.recompute=true: has no effect"),
    ],
)
def test_what_has_no_effect_is_refused(word: str, said: str):
    with pytest.raises(ConfigError, match=said):
        load_config([*MODEL, word])


def test_other_engines_are_refused_before_the_training():
    words = ["draft=model", "export.formats=[vllm,sglang]"]
    with pytest.raises(ConfigError, match=r"export\.formats: sglang: .* for vLLM alone"):
        load_config(["stages=[export]", *words])
    load_config(["stages=[capture]", *words])


def test_the_model_in_init_has_sizes_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["stages=[train]", "draft=model", f"draft.init={tmp_path}"]
    load_config(words)
    with pytest.raises(ConfigError, match=r"draft\.width=128: the model in draft\.init has"):
        load_config([*words, "draft.width=128"])


def test_a_head_has_no_width():
    with pytest.raises(ConfigError, match=r"draft\.width=64: has no effect .*=eagle3"):
        load_config(["stages=[capture]", "draft.width=64"])
