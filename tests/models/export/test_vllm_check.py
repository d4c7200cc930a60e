"""Every mistake that an engine would load without a word is a finding here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema import ConfigError, Precision
from models.export.check import check
from models.export.layout import expected_tensors
from models.export.vllm import VLLM
from models.export.write import export
from models.verifier import weights_fingerprint

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 50000.0}

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict], object], form: str = "pt") -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": form})


def one_finding(folder: Path, *words: str) -> None:
    findings = check(folder)
    assert findings, "nothing was found"
    assert any(all(word in finding for word in words) for finding in findings), findings


@pytest.fixture
def folder(make_head, export_head) -> Path:
    return export_head(make_head(fc_norm=True))


@pytest.mark.parametrize(
    "flags", [{}, {"norm_before_fc": True, "fc_norm": True, "qk_norm": True}], ids=str
)
def test_every_tensor_is_missed(make_head, export_head, flags):
    draft = make_head(**flags)
    folder = export_head(draft)
    whole = load_file(folder / WEIGHTS)
    for name in whole:
        rest = {key: tensor for key, tensor in whole.items() if key != name}
        save_file(rest, folder / WEIGHTS, metadata={"format": "pt"})
        assert check(folder) == [
            f"{WEIGHTS}: {name} missing; vLLM would run with uninitialised or wrong values"
        ]


def test_every_wrong_shape_and_dtype_is_seen(folder):
    whole = load_file(folder / WEIGHTS)
    for name, tensor in whole.items():
        longer = {**whole, name: torch.cat([tensor, tensor[:1]])}
        save_file(longer, folder / WEIGHTS, metadata={"format": "pt"})
        one_finding(folder, name, "shape")
        save_file(whole | {name: tensor.to(torch.float16)}, folder / WEIGHTS, {"format": "pt"})
        one_finding(folder, name, "dtype F16")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("fc.bias", "bias"),
        ("midlayer.self_attn.q_proj.bias", "bias"),
        ("input_norm.weight", "norm_before_fc is false"),
        ("midlayer.self_attn.q_norm.weight", "norms neither query nor key"),
        ("fc_norm.3.weight", "fewer aux layers"),
        ("model.norm.weight", "prefix"),
        ("midlayer.self_attn.rotary_emb.inv_freq", "unknown"),
        ("layers.1.input_layernorm.weight", "num_hidden_layers names fewer layers"),
        ("mask_hidden", "unknown"),
    ],
)
def test_unknown_tensors_are_findings(folder, name, word):
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(48)}))
    one_finding(folder, name, "unknown", word)


def test_both_spellings_of_the_layer_are_read_but_not_both_at_once(folder):
    def respell(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    edit_tensors(folder, respell)
    assert check(folder) == []
    edit_tensors(
        folder, lambda tensors: tensors.update({"midlayer.hidden_norm.weight": torch.ones(48)})
    )
    one_finding(folder, "midlayer.hidden_norm.weight", "there twice")


def absolute(tensors: dict) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(40)


def out_of_range(tensors: dict) -> None:
    tensors["d2t"][-1] = 128


def negative(tensors: dict) -> None:
    tensors["d2t"][0] = -1


def repeated(tensors: dict) -> None:
    tensors["d2t"][5] = tensors["d2t"][4] - 1


def unordered(tensors: dict) -> None:
    ids = tensors["d2t"] + torch.arange(40)
    tensors["d2t"] = ids.flip(0) - torch.arange(40)


def other_members(tensors: dict) -> None:
    tensors["t2d"] = ~tensors["t2d"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (absolute, ("d2t", "absolute ids")),
        (out_of_range, ("d2t", "1 of 40 ids outside 0..127")),
        (negative, ("d2t", "1 of 40 ids outside")),
        (repeated, ("d2t", "ascend without repetition")),
        (unordered, ("d2t", "ascend without repetition")),
        (other_members, ("t2d", "marks other tokens")),
        (lambda t: t.update(d2t=t["d2t"].int()), ("d2t", "dtype I32")),
    ],
)
def test_a_wrong_vocabulary_map_is_seen(folder, change, words):
    edit_tensors(folder, change)
    one_finding(folder, *words)


def test_absolute_ids_that_stay_in_range_are_seen(make_head, export_head):
    """Small ids: twice the id is still a verifier id, ascending and unique."""
    draft = make_head()
    ids = torch.arange(0, 80, 2)
    draft.d2t.copy_(ids - torch.arange(40))
    draft.t2d.zero_()[ids] = True
    folder = export_head(draft)
    edit_tensors(folder, absolute)
    one_finding(folder, "absolute ids")


def test_a_map_beside_a_full_vocabulary_is_a_finding(make_head, export_head):
    folder = export_head(make_head(draft_vocab_size=128))
    edit_tensors(folder, lambda t: t.update(d2t=torch.zeros(128, dtype=torch.int64)))
    one_finding(folder, "d2t", "unknown", "equals vocab_size")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_seen(folder, bad):
    edit_tensors(folder, lambda tensors: tensors["norm.weight"].__setitem__(7, bad))
    one_finding(folder, "norm.weight", "1 of 48 values are not finite")


def test_every_key_is_missed(folder):
    text = (folder / CONFIG).read_text()
    for key in json.loads(text):
        edit_config(folder, lambda config, key=key: config.pop(key))
        one_finding(folder, key)
        (folder / CONFIG).write_text(text)


def test_every_key_of_eagle_config_is_missed(folder):
    text = (folder / CONFIG).read_text()
    for key in json.loads(text)["eagle_config"]:
        edit_config(folder, lambda config, key=key: config["eagle_config"].pop(key))
        one_finding(folder, "eagle_config")
        (folder / CONFIG).write_text(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc_norm": False}, ("fc_norm.0.weight", "unknown", "fc_norm is false")),
        ({"norm_before_fc": True}, ("input_norm.weight", "missing")),
        ({"norm_output": 0}, ("norm_output=0", "true or false")),
        ({"norm_before_residual": None}, ("norm_before_residual", "true or false")),
        ({"eagle_aux_hidden_state_layer_ids": [5, 4, 2]}, ("[5, 4, 2]", "ascending")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, ("[2, 4, 4]", "unique")),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4, 5]}, ("[0, 4, 5]", "at least 1")),
        ({"eagle_aux_hidden_state_layer_ids": []}, ("eagle_aux_hidden_state_layer_ids=[]",)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, ("fc.weight", "(48, 144)", "(48, 96)")),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, ("eagle_config", "must be")),
        ({"num_aux_hidden_states": 2}, ("num_aux_hidden_states=2", "must be 3")),
        ({"rope_theta": 10000.0}, ("rope_theta=10000.0", "must be 50000.0")),
        ({"rope_parameters": {"rope_type": "default"}}, ("rope_parameters", "rope_theta")),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            ("'spiral'", "must be one of"),
        ),
        (
            {"rope_parameters": {**DEFAULT_ROPE, "long_factor": [2.0] * 16}},
            ("short_factor and long_factor differ",),
        ),
        (
            {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
            ("partial_rotary_factor=0.5", "rotate a part"),
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
            ("rope_parameters", "rope_theta > 0"),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            ("type yarn lacks factor, original_max_position_embeddings",),
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            ("type longrope lacks short_factor, long_factor",),
        ),
        ({"head_dim": 12}, ("q_proj", "(128, 96)", "(48, 96)")),
        ({"head_dim": None}, ("head_dim=None", "at least 1")),
        ({"hidden_size": 64}, ("fc.weight", "shape")),
        ({"target_hidden_size": None}, ("target_hidden_size=null", "must be 48")),
        ({"vocab_size": 40}, ("t2d", "unknown")),
        ({"draft_vocab_size": 200}, ("draft_vocab_size=200", "above")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads=3", "divide")),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings=true", "must be false")),
        ({"tie_word_embeddings": 0}, ("tie_word_embeddings=0", "must be false")),
        ({"attention_bias": True}, ("attention_bias=true",)),
        ({"architectures": ["LlamaForCausalLM"]}, ("architectures", "LlamaForCausalLMEagle3")),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, ("architectures", "Llama")),
        ({"model_type": "qwen3"}, ("midlayer.self_attn.k_norm.weight", "missing")),
        ({"model_type": "qwen3"}, ("architectures", "must be", "Eagle3Qwen3ForCausalLM")),
        ({"model_type": "mistral"}, ("model_type='mistral'", "llama or qwen3")),
        ({"torch_dtype": "float16"}, ("torch_dtype='float16'",)),
        ({"torch_dtype": "bfloat16"}, ("fc.weight", "dtype F32, must be BF16")),
        ({"rms_norm_eps": 0}, ("rms_norm_eps=0",)),
        ({"quantization_config": {"bits": 8}}, ("quantization_config", "must be absent")),
        ({"compression_config": {}}, ("compression_config", "quantised")),
        ({"layer_types": ["sliding_attention"]}, ("layer_types", "must be absent")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_changed_key_is_seen(folder, change, words):
    edit_config(folder, lambda config: config.update(change))
    one_finding(folder, *words)


def test_lost_rope_is_seen(folder):
    def forget(config: dict) -> None:
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(key)

    edit_config(folder, forget)
    one_finding(folder, "rope_parameters missing")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (CONFIG, None, ("config.json: missing",)),
        (WEIGHTS, None, ("model.safetensors: missing",)),
        (CONFIG, "{", ("not JSON",)),
        (CONFIG, "[]", ("must hold an object",)),
        (WEIGHTS, "no tensors here", ("cannot be read",)),
    ],
)
def test_missing_and_broken_files_are_findings(folder, name, content, words):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    one_finding(folder, *words)


def test_truncated_weights_and_foreign_metadata_are_findings(folder):
    edit_tensors(folder, lambda tensors: None, form="tf")
    one_finding(folder, "metadata")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    one_finding(folder, "cannot be read")


def test_an_embedding_must_be_the_verifiers(make_head, export_head, tmp_path):
    draft = make_head()
    folder = export_head(draft)
    (folder / "eyrie.json").unlink()  # as of a head that others wrote
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    sizes = {"hidden_size": 48, "vocab_size": 128, "num_hidden_layers": 8}
    (verifier / CONFIG).write_text(json.dumps(sizes))
    theirs = {"model.embed_tokens.weight": draft.embed_tokens.weight.clone()}
    save_file(theirs, verifier / WEIGHTS)

    edit_tensors(folder, lambda t: t.update(theirs) or t.pop("model.embed_tokens.weight"))
    assert check(folder, verifier) == []
    own = {"embed_tokens.weight": draft.embed_tokens.weight.clone()}
    edit_tensors(folder, lambda tensors: tensors.update(own))
    assert check(folder, verifier) == []
    own["embed_tokens.weight"][0, 0] += 1
    edit_tensors(folder, lambda tensors: tensors.update(own))
    assert check(folder) == []
    findings = check(folder, verifier)
    assert len(findings) == 1
    assert "embed_tokens.weight: differs" in findings[0]


@pytest.mark.parametrize("content", ["[]", "{", '{"hidden_size": 48}', '{"text_config": 5}'])
def test_a_verifier_that_is_none_is_named(folder, tmp_path, content):
    place = tmp_path / "verifier"
    place.mkdir()
    with pytest.raises(ConfigError, match=r"holds no config.json; give the verifier's folder"):
        check(folder, place)
    (place / CONFIG).write_text(content)
    with pytest.raises(ConfigError, match=r"config.json: .*give"):
        check(folder, place)


def test_other_weights_than_those_learnt_from_are_a_finding(
    make_head, facts_of, plain_card, tmp_path, tiny_verifier
):
    """User report B69, by the fingerprint that the export carries."""
    draft = make_head()
    card = replace(plain_card, verifier_fingerprint=weights_fingerprint(tiny_verifier))
    folder = export(draft, facts_of(draft.config), tmp_path / "own", card)
    assert not any("fingerprint" in one for one in check(folder, tiny_verifier))
    other = export(draft, facts_of(draft.config), tmp_path / "other", plain_card)
    assert any("eyrie.json: fingerprint=0123abcd" in one for one in check(other, tiny_verifier))


def test_sizes_and_layers_are_compared_with_the_verifier(folder, tmp_path):
    (folder / "eyrie.json").unlink()
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    sizes = {"hidden_size": 64, "vocab_size": 129, "num_hidden_layers": 4}
    (verifier / CONFIG).write_text(json.dumps({"text_config": sizes}))
    findings = check(folder, verifier)
    assert len(findings) == 3
    assert all(str(value) in " ".join(findings) for value in sizes.values())


def test_expected_tensors_are_what_the_model_has(make_head):
    """The list is written by hand; the module must agree with it for every combination of flags."""
    fed_back = {"fc_norm": True, "norm_output": True}
    for flags in ({}, {"norm_before_fc": True}, fed_back, {"qk_norm": True}):
        draft = make_head(**flags)
        names = set(expected_tensors(draft.config, VLLM, Precision.float32))
        assert names | {"embed_tokens.weight"} == set(draft.state_dict())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bos_token_id": "x"}, ("bos_token_id='x'", "token ids below 128")),
        ({"eos_token_id": [-7]}, ("eos_token_id=[-7]", "token ids below 128")),
        ({"vocab_size": 10**25}, ("vocab_size", "possible")),
        ({"head_dim": 63}, ("head_dim=63", "must be even")),
        ({"eagle_aux_hidden_state_layer_ids": [10**30]}, ("layer_ids", "ascending")),
        ({"rope_parameters": {**DEFAULT_ROPE, "rope_theta": float("inf")}}, ("rope_theta > 0",)),
    ],
)
def test_values_that_nothing_can_be_are_seen(folder, change, words):
    edit_config(folder, lambda config: config.update(change))
    one_finding(folder, *words)


def test_deep_nesting_and_eight_bits_are_findings(folder):
    edit_tensors(folder, lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}))
    one_finding(folder, "fc.weight", "dtype F8_E4M3")
    (folder / CONFIG).write_text('{"a":' * 100_000)
    one_finding(folder, "not JSON")
