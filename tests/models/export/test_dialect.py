"""Published config.json files, invented here: each dialect gives the head that it describes."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.schema import ConfigError
from models.eagle3 import DraftConfig
from models.export.dialect import described
from models.rope import Rope, Rotary

AUX = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture
def judge(make_head, facts_of, publish):
    """judge(change) -> what the official file is taken for once ``change`` has edited it."""

    def read(change: Callable[[dict], object] = dict, layers: int = 8, **head: object):
        draft = make_head(**head)
        files = publish(draft)
        change(files.config)
        return described(files.write(), replace(facts_of(draft.config), num_layers=layers))

    return read


def drop(*keys: str) -> Callable[[dict], object]:
    return lambda config: [config.pop(key) for key in keys]


def put(**values: object) -> Callable[[dict], object]:
    return lambda config: config.update(values)


def nest(config: dict) -> None:
    """The same file as speculators writes it."""
    layer = {key: config.pop(key) for key in list(config) if key not in (AUX, "draft_vocab_size")}
    layer.pop("architectures")
    config |= {"speculators_model_type": "eagle3", "speculators_config": {"algorithm": "eagle3"}}
    config["transformer_layer_config"] = layer


def test_a_plain_file_has_no_flags_and_old_rope(judge, make_head):
    found = judge()
    assert found.draft == make_head().config
    assert found.assumed == [f"{', '.join(FLAGS)} not in config.json: false is assumed"]


def test_speculators_nests_the_layer_and_leaves_one_flag_true(judge, make_head):
    """User report B65: vLLM takes norm_before_residual for true in such a file."""
    found = judge(nest)
    assert found.draft == replace(make_head().config, norm_before_residual=True)
    assert "norm_before_residual is not in config.json: true is assumed" in found.assumed[0]
    said = judge(lambda config: (nest(config), config.update(dict.fromkeys(FLAGS, False))))
    assert said.draft == make_head().config and said.assumed == []


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("dialect", [dict, nest])
def test_every_flag_is_read(judge, dialect, flag):
    """User report B65."""
    values = dict.fromkeys(FLAGS, False) | {flag: True}
    found = judge(lambda config: (dialect(config), config.update(values)))
    assert {name: getattr(found.draft, name) for name in FLAGS} == values
    assert found.assumed == []


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        (put(use_aux_norm=True), "fc_norm"),
        (put(eagle_config={"norm_before_fc": True}), "norm_before_fc"),
        (put(eagle_config={"return_hidden_post_norm": True}), "norm_output"),
    ],
)
def test_other_names_of_flags(judge, change, flag):
    found = judge(change).draft
    assert [name for name in FLAGS if getattr(found, name)] == [flag]


@pytest.mark.parametrize(
    ("nested", "flag"),
    [("norm_before_fc", "norm_before_fc"), ("return_hidden_post_norm", "norm_output")],
)
def test_flags_that_contradict_are_refused(judge, nested, flag):
    """vLLM and TensorRT-LLM would run two different heads."""
    with pytest.raises(ConfigError, match=f"{flag}=false: contradicts"):
        judge(put(eagle_config={nested: True}, **{flag: False}))


# ---- layer ids -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [
        ([2, 4, 5], None, [2, 4, 5]),
        (None, [1, 3, 4], [2, 4, 5]),  # layer outputs
        ([2, 4, 5], [1, 3, 4], [2, 4, 5]),
        ([2, 4, 5], [], [2, 4, 5]),
        (None, None, [2, 4, 5]),  # 8 layers: 2, 8 // 2, 8 - 3
        ([8], None, [8]),  # the stream after the last layer
        (None, [0], [1]),
    ],
)
def test_layer_ids_in_both_meanings(judge, top, nested, expected):
    found = judge(put(**{AUX: top, "eagle_config": {AUX: nested}}))
    assert found.draft.aux_layers == expected
    said = [line for line in found.assumed if AUX in line]
    assert len(said) == (0 if top else 1)
    if not top:
        assert ("layer outputs" if nested else "default for 8 layers") in said[0]


@pytest.mark.parametrize(
    ("top", "nested", "words"),
    [
        ([2, 4, 5], [2, 4, 5], r"contradicts eagle_config.* must be \[1, 3, 4\]"),
        ([2, 5, 4], None, "ascending"),
        ([2, 4, 4], None, "without repetition"),
        ([0, 4, 5], None, r"1\.\.8"),
        ([2, 4, 9], None, r"1\.\.8"),
        (None, [1, 3, 8], r"1\.\.8"),
        (["2"], None, "must be a list of layer ids"),
        ([True], None, "must be a list of layer ids"),
    ],
)
def test_impossible_layer_ids_are_refused(judge, top, nested, words):
    with pytest.raises(ConfigError, match=words):
        judge(put(**{AUX: top, "eagle_config": {AUX: nested}}))


def test_default_ids_need_seven_layers_and_three_states(judge):
    with pytest.raises(ConfigError, match=f"{AUX} missing, and its default needs a verifier of 7"):
        judge(drop(AUX), layers=6)
    with pytest.raises(ConfigError, match="num_aux_hidden_states=2: must be 3"):
        judge(lambda config: (config.pop(AUX), config.update(num_aux_hidden_states=2)))


# ---- rope ------------------------------------------------------------------------------------


def table(draft: DraftConfig, position: int = 10_000) -> torch.Tensor:
    rotary = Rotary(Rope(draft.head_dim, draft.max_positions, draft.rope))
    turned = rotary.at(torch.tensor([position]), torch.float32)
    return torch.cat([turned.cos, turned.sin], -1).flatten()


def library_table(config: dict, position: int = 10_000) -> torch.Tensor:
    read = LlamaConfig(**{key: value for key, value in config.items() if key != AUX})
    cos, sin = LlamaRotaryEmbedding(read)(torch.zeros(1), torch.tensor([[position]]))
    half = cos.shape[-1] // 2
    return torch.cat([cos[..., :half], sin[..., :half]], -1).flatten()


SPELLINGS = [
    put(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}),
    put(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}),
    lambda config: (
        config.pop("rope_scaling"),
        config.pop("rope_theta"),
        config.update(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
    ),
    put(
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **LLAMA3},
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    ),
    put(rope_theta=5e5, rope_parameters={"rope_type": "llama3", **LLAMA3}),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dialect", [dict, nest])
def test_every_spelling_of_rope_is_one_table(judge, spelling, dialect):
    """User reports B46 and B47: the library's own table, at a far position."""
    found = judge(lambda config: (spelling(config), dialect(config)), max_positions=16384)
    assert found.draft.rope == {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    written = {
        "head_dim": 32,
        "max_position_embeddings": 16384,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "llama3", **LLAMA3},
    }
    assert torch.equal(table(found.draft), library_table(written))
    other = table(replace(found.draft, rope={"rope_type": "default", "rope_theta": 5e5}))
    assert not torch.equal(table(found.draft), other)


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        (YARN, YARN),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_type": "mrope", "mrope_section": [1, 2]}, {"rope_type": "default"}),
        (None, {"rope_type": "default"}),
    ],
)
def test_other_types_of_rope(judge, scaling, rope):
    found = judge(put(rope_theta=1e6, rope_scaling=scaling))
    assert found.draft.rope == {**rope, "rope_theta": 1e6}


def test_longrope_is_settled_and_may_keep_its_limit_outside(judge):
    short, long = [1.0] * 16, [1.0 + i for i in range(16)]
    scaling = {"type": "su", "short_factor": short, "long_factor": long}
    change = put(rope_scaling=scaling, original_max_position_embeddings=256)
    rope = judge(change).draft.rope  # its limit of 512 lies above
    assert rope["rope_type"] == "longrope" and rope["short_factor"] == rope["long_factor"] == long


def test_a_missing_base_is_said(judge):
    found = judge(drop("rope_theta", "rope_scaling"))
    assert found.draft.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert "rope_theta is not in config.json: 10000 is assumed" in found.assumed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type=dynamic is not supp"),
        (put(rope_scaling={"type": "llama3", "factor": 2.0}), "llama3 lacks low_freq_factor"),
        (put(rope_scaling={"type": "yarn", "factor": 2.0}), "yarn lacks original_max_position"),
        (put(rope_scaling={"type": "linear", "factor": None}), "linear lacks factor"),
        (put(rope_parameters={"rope_theta": 1.0}), r"rope_theta=50000\.0, and .* has 1\.0"),
        (put(rope_parameters={"rope_type": "default"}, rope_scaling=YARN), "type default, rope_sc"),
        (put(partial_rotary_factor=0.5), "partial_rotary_factor=0.5: rotates a part"),
        (put(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (put(rope_parameters={"sliding_attention": {}}), "must be one rotary table"),
        (put(rope_theta="1e4"), "must be a number above 0"),
    ],
)
def test_other_rotary_tables_are_refused_by_name(judge, change, words):
    """User report B48."""
    with pytest.raises(ConfigError, match=words):
        judge(change)


# ---- sizes -------------------------------------------------------------------------------------


def test_widths_of_heads_are_read_and_not_computed(judge):
    """User report B42: those of Gemma-3-270M."""
    sizes = {"hidden_size": 640, "head_dim": 256, "num_heads": 4, "num_kv_heads": 1}
    assert judge(**sizes).draft.head_dim == 256
    guessed = judge(drop("head_dim"), **sizes)
    assert guessed.draft.head_dim == 160
    assert "head_dim is not in config.json: 160 is assumed" in guessed.assumed


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("draft_vocab_size", "draft_vocab_size", 128),
        ("num_key_value_heads", "num_kv_heads", 4),
        ("rms_norm_eps", "rms_norm_eps", 1e-6),
        ("max_position_embeddings", "max_positions", 2048),  # user report B49
        ("vocab_size", "vocab_size", 128),
    ],
)
@pytest.mark.parametrize("how", ["absent", "null"])
def test_what_is_absent_is_assumed_and_said(judge, key, value, expected, how):
    found = judge(drop(key) if how == "absent" else put(**{key: None}))
    assert getattr(found.draft, value) == expected
    assert len([line for line in found.assumed if line.startswith(f"{key} is not in")]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("hidden_size", "num_attention_heads"), "hidden_size, num_attention_heads missing"),
        (put(intermediate_size="96"), 'intermediate_size="96": must be an integer'),
        (put(hidden_size=True), "hidden_size=true: must be an integer"),
        (put(draft_vocab_size=129), "draft_vocab_size=129: must be in 1..vocab_size=128"),
        (put(rms_norm_eps="x"), "rms_norm_eps"),
        (put(fc_norm="yes"), 'fc_norm="yes": must be true or false'),
        (put(num_key_value_heads=3), "num_key_value_heads=3: must divide"),
        (put(eagle_config=[1]), "eagle_config must be objects"),
        (put(architectures=5), "architectures=5: must be a list"),
        (put(layer_types=5), "layer_types=5: must be a list"),
        (put(head_dim=63), "head_dim=63: must be even"),
        (put(intermediate_size=10**16), "intermediate_size=10000000000000000: must be"),
        (put(mask_token_id=0), "mask_token_id: a head for parallel drafting"),
        (put(rope_parameters={"rope_type": ["a"], "rope_theta": 1e4}), "rope_type"),
        (
            put(rope_parameters={"rope_type": "linear", "rope_theta": 50000.0, "factor": 0}),
            "factor=0",
        ),
        (put(transformer_layer_config=1), "transformer_layer_config and eagle_config must be"),
    ],
)
def test_impossible_values_are_refused_by_name(judge, change, words):
    with pytest.raises(ConfigError, match=words):
        judge(change)


# ---- heads that are none of ours ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put(num_hidden_layers=32), r"[^_]layers=32: must be a whole number in 1\.\.16"),
        (put(target_hidden_size=96), "target_hidden_size=96: differs from hidden_size=48"),
        (put(layer_types=["sliding_attention"], sliding_window=64), "sliding_window=64"),
        (put(use_sliding_window=True, sliding_window=64), "sliding_window=64"),
        (put(quantization_config={"bits": 4}), "quantization_config: the head is quantised"),
        (put(architectures=["EagleLlamaForCausalLM"]), "an EAGLE-1 head"),
        (put(architectures=["MedusaModel"], model_type="medusa"), "a Medusa head"),
        (put(model_type="deepseek_v3"), "model_type=deepseek_v3"),
        (put(parallel_drafting=True), "parallel drafting"),
        (put(ptd_token_id=7), "parallel drafting"),
        (put(hidden_act="gelu"), "hidden_act=gelu: must be silu"),
        (put(logit_scale=0.5), "logit_scale=0.5"),
        (put(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=false"),
        (put(eagle_config={"next_layer_regular": False}), "not EAGLE-3's"),
        (
            lambda config: (nest(config), config.update(speculators_model_type="peagle")),
            "speculators_model_type=peagle",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(judge, change, words):
    with pytest.raises(ConfigError, match=words) as refused:
        judge(change)
    assert "\n" not in str(refused.value) and "; give" in str(refused.value)


def test_keys_that_change_nothing_change_nothing(judge, make_head):
    harmless = put(
        target_hidden_size=48,
        sliding_window=64,
        use_sliding_window=False,
        layer_types=["full_attention"],
        quantization_config=None,
        attention_bias=True,  # the tensors say whether there is one
        tie_word_embeddings=True,
        logit_scale=1.0,
        eagle_config=None,
        model_type="mistral",
    )
    assert judge(harmless).draft == make_head().config


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "must hold an object")])
def test_a_broken_file_is_one_sentence(make_head, facts_of, publish, text, words):
    folder = publish(make_head()).write()
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        described(folder, facts_of(make_head().config))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        described(folder, facts_of(make_head().config))


def test_the_file_is_left_as_it_was(make_head, facts_of, publish):
    files = publish(make_head())
    nest(files.config)
    before = json.dumps(files.config)
    described(files.write(), facts_of(make_head().config))
    assert (files.folder / "config.json").read_text() == before
