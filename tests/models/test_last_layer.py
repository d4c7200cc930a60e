"""Layers that start as the verifier's last one compute what it computes; others are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from conf.runtime import note_once
from conf.schema import ConfigError, DraftSection, VerifierSection
from models import last_layer
from models.eagle3 import INIT_STD, DraftConfig, Eagle3Draft
from models.facts import load_facts
from models.last_layer import refuse_other_layer, take_last_layer
from models.memory import DraftCache

WIDTH, ROWS = 64, 9
SIZES = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 2,
}
KINDS = {
    "llama": LlamaConfig(**SIZES, initializer_range=0.2),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, initializer_range=0.2),
}


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., VerifierSection]:
    """A verifier with random weights, norms too; without ``weights`` its config alone."""

    def make(config: PreTrainedConfig, weights: bool = False) -> VerifierSection:
        config.save_pretrained(tmp_path)
        if weights:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.data.normal_(1.0, 0.3)
            model.save_pretrained(tmp_path)
        return VerifierSection(path=str(tmp_path))

    return make


def draft_for(section: VerifierSection, **knobs: object) -> Eagle3Draft:
    facts = load_facts(section, Path(section.path))
    torch.manual_seed(1)
    draft = Eagle3Draft(DraftConfig.of(DraftSection(vocab_size=128, **knobs), facts))
    for module in draft.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.normal_(std=INIT_STD)
    return draft.requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_what_the_verifiers_last_one_does(kind: str, section):
    """The first one, too, once its half for the embedding is silenced."""
    verifier = section(KINDS[kind], weights=True)
    draft = draft_for(verifier, layers=2, qk_norm=kind == "qwen3")
    take_last_layer(draft, verifier, Path(verifier.path))
    model = AutoModelForCausalLM.from_pretrained(verifier.path).eval()
    theirs = model.model.layers[-1]
    hidden = 3 * torch.randn(1, ROWS, WIDTH)
    positions = torch.arange(ROWS)[None]
    rotary = model.model.rotary_emb(hidden, positions)
    mask = torch.full((ROWS, ROWS), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        wanted = theirs(hidden, attention_mask=mask, position_embeddings=rotary)
    first, second = draft.stack
    silent = torch.zeros(1, ROWS, sum(first.self_attn.sizes))
    for layer, share in ((second, None), (first, silent)):
        found = layer(share, hidden, positions, DraftCache(ROWS), known=False)
        assert torch.allclose(found, wanted, rtol=0, atol=1e-4)
        assert not torch.allclose(found, hidden, rtol=0, atol=1e-1)


def test_what_reads_the_embedding_and_all_outside_the_layers_stays(section):
    verifier = section(KINDS["llama"], weights=True)
    draft, before = (draft_for(verifier, layers=2) for _ in range(2))
    take_last_layer(draft, verifier, Path(verifier.path))
    was = before.state_dict()
    changed = {name for name, t in draft.state_dict().items() if not torch.equal(t, was[name])}
    layers = {name for name in was if name.startswith(("midlayer.", "layers."))}
    assert changed == layers - {"midlayer.input_layernorm.weight"}
    for name in "qkv":
        weight = draft.get_parameter(f"midlayer.self_attn.{name}_proj.weight")
        old = was[f"midlayer.self_attn.{name}_proj.weight"]
        assert torch.equal(weight[:, :WIDTH], old[:, :WIDTH])
        assert torch.equal(
            weight[:, WIDTH:], draft.get_parameter(f"layers.1.self_attn.{name}_proj.weight")
        )


SMALL = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
OTHERS = {
    "another width of the MLP": (KINDS["llama"], {"intermediate_size": 80}, r"\(96, 64\).*\(80, 6"),
    "norms in the draft alone": (KINDS["llama"], {"qk_norm": True}, r"no self_attn\.k_norm\.weig"),
    "norms in the verifier alone": (
        KINDS["qwen3"],
        {},
        r"layer has self_attn\.k_norm\.wei",
    ),
    "another activation": (GemmaConfig(**SIZES, head_dim=16), {}, "hidden_act=gelu"),
    "a mixture": (MixtralConfig(**SIZES), {}, r"has no mlp\.down_proj\.weight"),
    "norms elsewhere": (Olmo2Config(**SIZES), {}, r"has no input_layernorm\.weight"),
    "other names": (GPTNeoXConfig(**SMALL), {}, r"has no mlp\.down_proj\.weight"),
}


@pytest.mark.parametrize(("config", "knobs", "words"), OTHERS.values(), ids=OTHERS)
def test_another_layer_is_refused_by_what_differs(config, knobs, words, section):
    verifier = section(config)
    facts = load_facts(verifier, Path(verifier.path))
    draft = DraftConfig.of(DraftSection(vocab_size=128, **knobs), facts)
    with pytest.raises(ConfigError, match=words) as refused:
        refuse_other_layer(verifier, Path(verifier.path), draft)
    text = str(refused.value)
    assert text.startswith("draft.layer_init=verifier: ") and text.endswith("layer_init=random")
    assert "\n" not in text


def test_norms_are_told_by_what_they_compute():
    right = torch.nn.RMSNorm(WIDTH, eps=1e-6)
    assert last_layer.is_rms_norm(right)
    gemma = AutoModelForCausalLM.from_config(GemmaConfig(**SIZES, head_dim=16)).model.norm
    assert not last_layer.is_rms_norm(gemma)  # it adds 1 to its weight
    assert not last_layer.is_rms_norm(torch.nn.LayerNorm(WIDTH))
    assert not last_layer.is_rms_norm(torch.nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert not last_layer.is_rms_norm(None)


def test_biases_stay_out_and_are_named(section, capsys: pytest.CaptureFixture[str]):
    note_once.cache_clear()
    verifier = section(Qwen2Config(**SIZES), weights=True)
    take_last_layer(draft_for(verifier), verifier, Path(verifier.path))
    assert "self_attn.q_proj.bias" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["gone", "quantised"])
def test_files_without_the_weight_are_refused(fault: str, section):
    verifier = section(KINDS["llama"], weights=True)
    path = Path(verifier.path) / "model.safetensors"
    tensors, name = load_file(path), "model.layers.6.mlp.up_proj.weight"
    tensor = tensors.pop(name)
    if fault == "quantised":
        tensors[name] = tensor.to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name}.*quantised"):
        take_last_layer(draft_for(verifier), verifier, Path(verifier.path))
