"""The small model's configuration and folder: sizes by the knobs, its tokens, weights whole."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from conf.schema import ConfigError, DraftSection, VerifierSection
from models.facts import VerifierFacts, load_facts
from models.model_folder import (
    read_model,
    refuse_other_model,
    refuse_untrainable,
    write_model,
)
from models.small_model import ModelConfig, SmallModel

IDS = torch.tensor([[5, 9, 40, 41]])
PLACES = torch.arange(4)[None]


@pytest.fixture
def facts(tiny_verifier: Path, tmp_path: Path) -> VerifierFacts:
    return load_facts(VerifierSection(path=str(tiny_verifier)), tmp_path)


@pytest.fixture
def small(facts: VerifierFacts) -> SmallModel:
    torch.manual_seed(0)
    return SmallModel.new(ModelConfig.of(DraftSection(width=64, layers=2), facts))


def saved(folder: Path, tokenizer: Path, rows: int = 128, **more: Any) -> Path:
    """A model of the library's, with a tokenizer, as somebody publishes it."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    layout = LlamaConfig(vocab_size=rows, num_hidden_layers=1, **sizes, **more)
    LlamaForCausalLM(layout).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def test_a_new_model_has_the_sizes_that_were_asked_for(facts: VerifierFacts):
    wide = replace(facts, hidden_size=4096, vocab_size=50)
    for knobs, width, heads, mlp in (
        ({"width": 128}, 128, 4, 512),
        ({"width": 512, "intermediate_size": 96}, 512, 8, 96),
        ({}, 1024, 16, 4096),  # a quarter of the verifier's
    ):
        layout = ModelConfig.of(DraftSection(layers=3, max_positions=64, **knobs), wide).layout
        found = [layout[n] for n in ("hidden_size", "num_attention_heads", "intermediate_size")]
        assert found == [width, heads, mlp]
        assert layout["num_hidden_layers"] == 3 and layout["vocab_size"] == 50
        assert layout["max_position_embeddings"] == 64 and layout["tie_word_embeddings"]
        assert layout["pad_token_id"] is None  # the library would not train its row
    assert ModelConfig.of(DraftSection(), facts).layout["hidden_size"] == 64  # of a narrow verifier


def test_a_folder_is_the_librarys_and_ours(small: SmallModel, tmp_path: Path):
    write_model(tmp_path, small.config, small.state_dict())
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not (tmp_path / ".writing").exists()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = read_model(tmp_path, ModelConfig.from_json(small.config.to_json()), torch.float32)
    wanted = small.logits(small(IDS, PLACES))
    assert torch.equal(theirs(IDS).logits, wanted)
    assert torch.equal(ours.logits(ours(IDS, PLACES)), wanted)
    half = {name: tensor.bfloat16() for name, tensor in small.state_dict().items()}
    write_model(tmp_path, small.config, half)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_config_says_itself(small: SmallModel):
    text = small.config.to_json()
    assert json.loads(text)["family"] == "model"
    assert ModelConfig.from_json(text) == small.config
    for wrong in (
        "[]",
        "{}",
        text.replace('"vocab_size": 128,\n  "max', '"vocab_size": 0,\n  "max'),
    ):
        with pytest.raises(ConfigError, match=r"draft\.json"):
            ModelConfig.from_json(wrong)


def test_a_published_model_is_taken_as_it_is(facts, tiny_verifier: Path, tmp_path: Path):
    """More rows than the verifier are padding, and are never proposed."""
    folder = saved(tmp_path / "more", tiny_verifier, rows=136, max_position_embeddings=99)
    config = ModelConfig.of(DraftSection(init=str(folder)), facts)
    assert config.max_positions == 99 and config.draft_vocab_size == 128
    draft = read_model(folder, config, torch.float32)
    assert draft.rows == 136 and draft.logits(draft(IDS, PLACES)).shape[-1] == 128
    refuse_other_model(folder, AutoTokenizer.from_pretrained(tiny_verifier))


def test_other_tokens_are_refused_by_name(tiny_verifier: Path, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    folder = saved(tmp_path / "other", tiny_verifier)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"draft\.init=.*token \d+ is 'b' and the verifier's 'a'"):
        refuse_other_model(folder, tokenizer)
    few = saved(tmp_path / "few", tiny_verifier, rows=100)
    with pytest.raises(ConfigError, match="100 rows, and the verifier's tokenizer 128 tokens"):
        refuse_other_model(few, tokenizer)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        refuse_other_model(tmp_path, tokenizer)


def test_models_that_cannot_be_one_are_refused(facts, small, tiny_verifier, tmp_path: Path):
    GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=128).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r"draft\.init=.*not rotary"):
        ModelConfig.of(DraftSection(init=str(tmp_path / "gpt2")), facts)
    folder = saved(tmp_path / "whole", tiny_verifier)
    config = ModelConfig.of(DraftSection(init=str(folder)), facts)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"draft\.init=.*cannot be loaded"):
        read_model(folder, config, torch.float32)
    write_model(folder, config, {"lm.model.norm.weight": torch.ones(32)})
    with pytest.raises(ConfigError, match="weights of the model are not in its files"):
        read_model(folder, config, torch.float32)
    refuse_untrainable(small)
    small.library.logit_scale = 2.0
    with pytest.raises(ConfigError, match="has logit_scale, which training does not know"):
        refuse_untrainable(small)
