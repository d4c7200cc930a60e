"""EAGLE-1's folder: exact tensors and keys, out and in again, each silent mistake named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from conf.schema import ConfigError, ExportFormat, Precision
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.export.check import check
from models.export.eagle1 import EAGLE1
from models.export.engines import LAYOUTS, layout_for
from models.export.read_eagle1 import eagle1_config_of, is_eagle1_folder, read_eagle1
from models.export.write import export
from models.final_norm import FinalNorm
from models.verifier import VerifierEnds

CONFIG = Eagle1Config(
    hidden_size=48,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,  # not hidden_size / num_heads
    vocab_size=128,
    aux_layers=[8],
    rms_norm_eps=1e-5,
    max_positions=512,
    rope={"rope_type": "default", "rope_theta": 50000.0},
)
LAYER = {
    "self_attn.q_proj": (128, 48),
    "self_attn.k_proj": (32, 48),
    "self_attn.v_proj": (32, 48),
    "self_attn.o_proj": (48, 128),
    "post_attention_layernorm": (48,),
    "mlp.gate_proj": (96, 48),
    "mlp.up_proj": (96, 48),
    "mlp.down_proj": (48, 96),
}


@pytest.fixture
def draft() -> Eagle1Draft:
    generator = torch.Generator().manual_seed(3)
    draft = Eagle1Draft(CONFIG).eval().requires_grad_(False)
    for parameter in draft.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.fixture
def ends(draft: Eagle1Draft) -> VerifierEnds:
    norm = FinalNorm(draft.final_norm.weight.detach(), CONFIG.rms_norm_eps)
    return VerifierEnds(draft.embed_tokens.weight, draft.lm_head.weight, LlamaConfig(), norm)


@pytest.fixture
def written(tmp_path: Path, facts_of, plain_card) -> Callable[..., Path]:
    def write(draft: Eagle1Draft, name: str = "one", dtype=Precision.float32) -> Path:
        facts = replace(facts_of(CONFIG), num_layers=8)
        return export(draft, facts, tmp_path / name, plain_card, dtype, EAGLE1)

    return write


def test_the_tensor_set_and_the_bits_are_exact(draft, written):
    folder = written(draft)
    stored = load_file(folder / "model.safetensors")
    wanted = {f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    wanted |= {"fc.weight": (48, 96)}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == wanted
    state = draft.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in stored.items())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [8]
    assert check(folder) == check(folder, layout=LAYOUTS[ExportFormat.vllm]) == []
    card = (folder / "README.md").read_text()
    assert '"method": "eagle"' in card and "# EAGLE-1 draft head" in card


@pytest.mark.parametrize("dtype", list(Precision))
def test_out_and_in_and_out_again(draft, ends, written, dtype: Precision):
    first = written(draft, "one", dtype)
    assert is_eagle1_folder(first) and eagle1_config_of(first) == CONFIG
    back = read_eagle1(first, ends)
    second = written(back, "two", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    theirs, exact = back.state_dict(), dtype is Precision.float32
    for name, tensor in draft.state_dict().items():
        own = name.split(".")[0] in ("embed_tokens", "lm_head", "final_norm")
        rounded = tensor if exact or own else tensor.bfloat16().float()
        assert torch.equal(theirs[name], rounded), name


def spoilt_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight missing"),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "up_proj.weight missing"),
        (lambda t: t.update({"fc.bias": torch.ones(48)}), "fc.bias.*drops one without a word"),
        (lambda t: t.update({"norm.weight": torch.ones(48)}), "norm.weight: unknown; vLLM stops"),
        (lambda t: t.update({"lm_head.weight": torch.ones(128, 48)}), "lm_head.*vLLM stops"),
        (
            lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(48)}),
            "input_layernorm.weight: unknown; vLLM stops",
        ),
        (lambda t: t.update({"fc.weight": torch.ones(48, 48)}), r"fc.weight: shape \(48, 48\)"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight"),
    ],
)
def test_a_wrong_tensor_is_found(draft, ends, written, change, words: str):
    folder = written(draft)
    spoilt_tensors(folder, change)
    with pytest.raises(ConfigError, match=words):
        read_eagle1(folder, ends)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 2, "num_hidden_layers=2: must be 1"),
        ("bias", True, "bias=true: must be false"),
        ("rms_norm_eps", 2.0, "rms_norm_eps"),
        ("rope_theta", 1e4, "rope_theta"),
        ("draft_vocab_size", 64, "draft_vocab_size: must be absent"),
        ("eagle_aux_hidden_state_layer_ids", [9, 8], "ascending"),
    ],
)
def test_a_wrong_key_is_found(draft, written, key: str, value: object, words: str):
    folder = written(draft)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert any(words in finding for finding in check(folder)), check(folder)
    without = {name: one for name, one in config.items() if name != key}
    (folder / "config.json").write_text(json.dumps(without))
    assert (check(folder) == []) == (key == "draft_vocab_size")


def test_the_verifiers_last_layer_is_compared(draft, written, tiny_verifier: Path):
    folder = written(draft)
    found = check(folder, tiny_verifier)  # of eight layers, and another width
    assert any("hidden_size=48" in one for one in found)
    assert not any("last layer" in one for one in found)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [7]
    (folder / "config.json").write_text(json.dumps(config))
    assert any("must be [8]" in one for one in check(folder, tiny_verifier))


@pytest.mark.parametrize("kind", [kind for kind in ExportFormat if kind is not ExportFormat.vllm])
def test_no_other_engine_is_given_one(draft, written, kind: ExportFormat):
    with pytest.raises(ConfigError, match=f"--to {kind.value}.*take --to vllm"):
        layout_for(CONFIG, LAYOUTS[kind])
    (finding,) = check(written(draft), layout=LAYOUTS[kind])
    assert "an EAGLE-1 head" in finding
