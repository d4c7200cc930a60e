"""A verifier's folder that cannot be used: one sentence that names verifier.path, early."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers as library
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma3nTextConfig,
    GPT2Config,
    GPTNeoXConfig,
    PhiConfig,
    PreTrainedConfig,
)

from conf.schema import ConfigError, VerifierSection
from models import verifier as module
from models.architecture import refuse_structure
from models.facts import load_facts, load_tokenizer
from models.verifier import Verifier, load_ends, weights_fingerprint

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}


@pytest.fixture
def folder(tiny_verifier: Path, tmp_path: Path) -> Path:
    """A copy of the tiny verifier, to be broken."""
    return shutil.copytree(tiny_verifier, tmp_path / "verifier")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def save_model(folder: Path, config: PreTrainedConfig) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def refusal(call, folder: Path, **section: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(VerifierSection(path=str(folder), **section), folder.parent)  # pyright: ignore
    text = str(caught.value)
    assert text.startswith(f"verifier.path={folder}: ") and "\n" not in text
    return text


def load(section: VerifierSection, cache: Path) -> Verifier:
    return Verifier.load(section, cache, CPU, torch.float32)


def test_a_folder_without_weights_is_refused_before_anything_is_loaded(folder: Path, monkeypatch):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    monkeypatch.setattr("models.placement.from_files", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(module, "load_facts", lambda *_: pytest.fail("read the config"))
    assert "holds no model.safetensors" in refusal(load, folder)
    assert "holds no .safetensors" in refusal(lambda *_: weights_fingerprint(folder), folder)


def test_damaged_weights_are_named(folder: Path):
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"model\.safetensors: is damaged"):
        load(VerifierSection(path=str(folder)), folder)


def test_an_architecture_the_library_lacks(folder: Path):
    edit_config(folder, model_type="nobody_knows_this")
    for call in (load_facts, load):
        assert "config.json cannot be loaded" in refusal(call, folder)


def test_a_config_that_is_no_json(folder: Path):
    (folder / "config.json").write_text("{")
    assert "config.json cannot be loaded" in refusal(load_facts, folder)


def test_code_that_comes_with_the_weights_needs_leave(folder: Path):
    edit_config(folder, model_type="own_kind", auto_map={"AutoConfig": "code.OwnConfig"})
    text = refusal(load_facts, folder)
    assert text.endswith("let it run with verifier.trust_remote_code=true")


def test_a_missing_tokenizer(folder: Path):
    for path in folder.glob("*token*"):
        path.unlink()
    assert "its tokenizer cannot be loaded" in refusal(load_tokenizer, folder)
    assert "its tokenizer cannot be loaded" in refusal(load, folder)


def test_a_verifier_without_rotary_positions(folder: Path):
    GPT2Config(n_layer=8).save_pretrained(folder)
    text = refusal(load_facts, folder)
    assert "its kind, gpt2, has no rope_parameters" in text


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("OPT", {}, "opt, has no rope_parameters"),
        ("Bloom", {}, "bloom, has no max_position_embeddings, rope_parameters"),
        ("Falcon", {"alibi": True}, "falcon, takes its positions from ALiBi"),
        ("Mamba", {}, "mamba, has no num_attention_heads"),
        ("Jamba", {}, "jamba, has no rope_parameters"),
        ("T5", {}, "t5, is an encoder and a decoder"),
        ("T5Gemma", {}, "is an encoder and a decoder"),
    ],
)
def test_kinds_that_a_llama_layer_cannot_follow(folder: Path, kind: str, sizes: dict, reason: str):
    getattr(library, f"{kind}Config")(**sizes).save_pretrained(folder)
    for call in (load_facts, load):
        assert reason in refusal(call, folder)


def test_rotary_tables_that_the_draft_cannot_have(folder: Path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    edit_config(folder, rope_parameters=dynamic)
    assert "its kind, llama, has a rotary table of type dynamic" in refusal(load_facts, folder)
    tables = {"near_attention": dynamic, "far_attention": dynamic}
    edit_config(folder, rope_parameters=tables)
    reason = "rotary tables of its own for near_attention and far_attention"
    assert reason in refusal(load_facts, folder)


def test_fewer_layers_than_the_default_ids_need(folder: Path):
    edit_config(folder, num_hidden_layers=6)
    with pytest.raises(
        ConfigError, match=r"verifier\.aux_layers=null: the default needs 7 .* has 6"
    ):
        load_facts(VerifierSection(str(folder)), folder)
    assert load_facts(VerifierSection(str(folder), aux_layers=[1, 2, 6]), folder).num_layers == 6


def test_negative_layer_ids_count_from_the_last(folder: Path):
    edit_config(folder, num_hidden_layers=6)
    for given, meant in (([-1], [6]), ([2, -2], [2, 5]), ([-6, -1], [1, 6])):
        section = VerifierSection(str(folder), aux_layers=given)
        assert load_facts(section, folder).aux_layers == meant
    for wrong in ([-7], [0], [-1, 2], [6, -1]):
        with pytest.raises(ConfigError, match=rf"aux_layers=\[{wrong[0]}.*unique ids in 1..6"):
            load_facts(VerifierSection(str(folder), aux_layers=wrong), folder)


def test_quantised_weights_whose_package_is_not_there(folder: Path):
    """The sentence blames the weights, not the attention."""
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    text = refusal(load, folder)
    assert "its weights are quantised with awq, and the library says: " in text
    assert text.endswith("install that or give the unquantised weights")


def test_a_quantisation_that_the_library_skips(folder: Path):
    """It would go on with random numbers where the packed weights are none of the model's."""
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    stored[name.replace("weight", "packed")] = stored.pop(name)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "nobody_knows"})
    assert f"1 weights of the model are not in its files, {name} for one" in refusal(load, folder)


def test_a_head_with_a_bias(folder: Path):
    """Training would read the matrix alone, and learn from other logits."""
    save_model(folder, PhiConfig(**SIZES))
    assert "PhiForCausalLM has a bias on its head" in refusal(load, folder)


def test_layers_under_another_name(folder: Path):
    save_model(folder, GPTNeoXConfig(**SIZES))
    model = load(VerifierSection(str(folder)), folder).model
    model.gpt_neox.blocks = model.gpt_neox.layers
    del model.gpt_neox.layers
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM keeps its 8 decoder layers where"):
        refuse_structure(VerifierSection(str(folder)), model, 8)


def test_several_streams_side_by_side(folder: Path):
    """Gemma 3n's layers hand on four."""
    more = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    save_model(folder, Gemma3nTextConfig(**SIZES, **more, vocab_size_per_layer_input=128))
    loaded = load(VerifierSection(str(folder)), folder)
    with pytest.raises(ConfigError, match=r"hand on \(4, 2, 5\) rows for \(2, 5\) tokens"):
        loaded.states(torch.ones(2, 5, dtype=torch.int64))


def test_an_embedding_under_another_name(folder: Path):
    """embed_in and embed_out in GPT-NeoX; and a prefix of an older library's."""
    save_model(folder, GPTNeoXConfig(**SIZES))
    section = VerifierSection(str(folder))
    wanted = load_ends(section, folder, torch.float32)
    loaded = load(section, folder)
    assert torch.equal(wanted.embedding, loaded.embedding)
    assert torch.equal(wanted.head, loaded.head.weight)
    stored = load_file(folder / "model.safetensors")
    assert "embed_out.weight" in stored
    moved = {name.replace("gpt_neox.", "neox.model."): t for name, t in stored.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    found = load_ends(section, folder, torch.float32)
    assert torch.equal(found.embedding, wanted.embedding) and torch.equal(found.head, wanted.head)


def test_an_embedding_that_is_not_there_or_there_twice(folder: Path):
    stored = load_file(folder / "model.safetensors")
    table = stored.pop("model.embed_tokens.weight")
    for names in (["an.embed.table"], ["a.embed_tokens.weight", "b.embed_tokens.weight"]):
        more = {name: table.clone() for name in names}
        save_file({**stored, **more}, folder / "model.safetensors", metadata={"format": "pt"})
        text = refusal(lambda *given: load_ends(*given, torch.float32), folder)
        assert "no tensor model.embed_tokens.weight" in text and all(n in text for n in names)
    cut = {**stored, "model.embed_tokens.weight": table[:-1].clone()}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    text = refusal(lambda *given: load_ends(*given, torch.float32), folder)
    assert "is (127, 64), its config says (128, 64)" in text


def test_a_model_that_does_not_write(folder: Path):
    config = BertConfig(
        vocab_size=128,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
    )
    BertModel(config).save_pretrained(folder)
    assert "its kind, bert, has no rope_parameters" in refusal(load, folder)
