"""A verifier's folder that cannot be used: one sentence that names verifier.path, early."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, Gemma3TextConfig, GPT2Config

from conf.schema import ConfigError, VerifierSection
from models import verifier as module
from models.facts import load_facts, load_tokenizer
from models.verifier import Verifier, weights_fingerprint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_verifier: Path, tmp_path: Path) -> Path:
    """A copy of the tiny verifier, to be broken."""
    return shutil.copytree(tiny_verifier, tmp_path / "verifier")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


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
    monkeypatch.setattr(module, "place", lambda *_: pytest.fail("loaded"))
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
    assert "a gpt2 model has no intermediate_size, rope_parameters" in text


def test_a_verifier_with_two_rotary_tables(folder: Path):
    """The draft would silently take the default table, and the export would find none."""
    Gemma3TextConfig(num_hidden_layers=8).save_pretrained(folder)
    text = refusal(load_facts, folder)
    assert "tables of its own for full_attention and sliding_attention" in text


def test_a_model_that_does_not_write(folder: Path):
    config = BertConfig(
        vocab_size=128,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
    )
    BertModel(config).save_pretrained(folder)
    assert "a bert model has no rope_parameters" in refusal(load, folder)
