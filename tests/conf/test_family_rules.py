"""The rules on the families of drafts: knobs without effect are refused by name."""

import pytest

from conf.compose import load_config
from conf.schema import ConfigError, DraftFamily, Phrases

NGRAM = ["stages=[prepare,train,eval]", "draft=ngram"]


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(list(words), running=[])
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["draft.norm_output=true"],
            "with draft.family=ngram; set draft.norm_output=false",
        ),
        (["draft.vocab_size=64"], "set draft.vocab_size=full"),
        (["draft.head_init=frozen"], "set draft.head_init=verifier"),
        (["draft.init=here"], "set draft.init=null"),
        (["draft.layers=2"], "set draft.layers=1"),
        (["draft.order=0"], "must be in 2..16"),
        (["draft.order=1", "draft.phrases=both"], "must be in 2..16"),
        (["draft.order=17", "draft.phrases=table"], "must be in 1..16"),
    ],
)
def test_a_knob_that_phrases_would_not_heed_is_named(words: list[str], says: str):
    message = refused(*NGRAM, *words)
    assert message.startswith(words[0].partition("=")[0]), message
    assert says in message and "\n" not in message


def test_vllm_is_told_of_the_context_alone():
    everything = ["draft=ngram"]
    assert "set draft.phrases=context" in refused(*everything)
    context = [*everything, "draft.phrases=context"]
    assert load_config(context, running=[]).draft.phrases is Phrases.context
    message = refused(*context, "export.formats=[vllm,sglang]")
    assert message.startswith("export.formats: sglang") and "export.formats=[vllm]" in message


def test_phrases_mean_nothing_to_other_families():
    assert "draft.family=eagle3" in refused("draft.order=5")
    assert refused("draft.phrases=table").startswith("draft.phrases=table")


def test_zero_3_is_for_eagle3():
    message = refused("draft.family=medusa", "engine.zero_stage=3", "draft.fc_norm=false")
    assert message.startswith("engine.zero_stage=3") and "set engine.zero_stage=2" in message
    kept = load_config([*NGRAM, "engine.zero_stage=3"], running=[])
    assert kept.draft.family is DraftFamily.ngram
