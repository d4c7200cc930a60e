"""Medusa heads for vLLM: written, checked, read back to the bit; what vLLM would not notice."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from conf.schema import ConfigError, DraftSection, ExportFormat, Precision
from models.draft_file import load_draft, save_draft
from models.export.card import CardFacts, DataFacts
from models.export.medusa import MAP, is_medusa, read_medusa, serve_medusa
from models.export.medusa_check import check_medusa
from models.export.medusa_write import export_medusa
from models.heads import config_of, load_head
from models.layer_shape import LayerShape
from models.medusa import MedusaConfig, MedusaDraft
from models.verifier import VerifierEnds, VerifierFacts
from models.vocab import DraftVocab

WIDTH, VOCAB, HEADS = 24, 64, 3
CARD = CardFacts("org/verifier", "org/verifier", "bfloat16", "0123abcd", DataFacts("answers.jsonl"))
FACTS = VerifierFacts(
    path="org/verifier",
    architectures=["LlamaForCausalLM"],
    hidden_size=WIDTH,
    num_layers=8,
    vocab_size=VOCAB,
    max_positions=512,
    layer=LayerShape(48, 2, 1, 12, 1e-5),
    rope={"rope_type": "default", "rope_theta": 1e4},
    aux_layers=[2, 4, 5],
    bos_id=1,
    eos_ids=[2],
)
ENDS = VerifierEnds(torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH), LlamaConfig())
KINDS = [(20, False), (20, True), (VOCAB, False), (VOCAB, True)]


def random_heads(size: int = 20, shared: bool = False, layers: int = 2) -> MedusaDraft:
    draft = MedusaDraft(MedusaConfig(WIDTH, VOCAB, size, HEADS, layers, shared))
    generator = torch.Generator().manual_seed(5)
    for parameter in draft.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    ids = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    vocab = DraftVocab.of_ids(ids, VOCAB)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft.eval().requires_grad_(False)


def as_vllm_runs(folder: Path, last: Tensor) -> Tensor:
    """The heads' choices [heads, R] from the files alone, by vLLM's own steps (medusa.py, 0.32)."""
    config = json.loads((folder / "config.json").read_text())
    tensors, chosen = load_file(folder / "model.safetensors"), []
    for i in range(config["num_heads"]):
        x = last
        for j in range(config["num_hidden_layers"]):
            weight = tensors[f"blocks.{i}.layers.{j}.weight"]
            bias = tensors[f"blocks.{i}.layers.{j}.bias"]
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        name = "lm_head.weight" if config["original_lm_head"] else f"lm_heads.{i}.weight"
        chosen.append((x @ tensors[name].T).argmax(-1))
    return torch.stack(chosen)


@pytest.mark.parametrize(("size", "shared"), KINDS)
def test_it_is_read_back_to_the_bit_and_runs_as_ours(tmp_path: Path, size: int, shared: bool):
    draft, folder = random_heads(size, shared), tmp_path / "vllm"
    export_medusa(draft, FACTS, folder, CARD, Precision.float32)
    assert check_medusa(folder) == [] and is_medusa(folder)
    for back in (read_medusa(folder, FACTS, ENDS), load_head(folder, FACTS, ENDS)):
        assert isinstance(back, MedusaDraft) and back.config == draft.config
        assert back.state_dict().keys() == draft.state_dict().keys()
        for name, tensor in draft.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name
    last = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(6))
    ours = [draft.to_target_ids(draft.logits(last, k).argmax(-1)) for k in range(HEADS)]
    assert torch.equal(as_vllm_runs(folder, last), torch.stack(ours))
    assert config_of(folder, FACTS) == draft.config


def test_bfloat16_is_ours_rounded(tmp_path: Path):
    draft = random_heads()
    export_medusa(draft, FACTS, tmp_path / "vllm", CARD, Precision.bfloat16)
    back = read_medusa(tmp_path / "vllm", FACTS, ENDS).state_dict()
    for name, tensor in draft.state_dict().items():
        rounded = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(back[name], rounded), name


def test_its_own_layout_is_read_back_to_the_bit(tmp_path: Path):
    draft = random_heads(shared=True)
    save_draft(tmp_path, draft.config, draft.state_dict())
    back = load_draft(tmp_path, torch.device("cpu"), torch.float32, torch.zeros(VOCAB, WIDTH))
    assert back.config == draft.config
    same = zip(back.state_dict().values(), draft.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_the_card_and_the_line_that_serves_it(tmp_path: Path):
    draft = random_heads()
    lines = serve_medusa(replace(CARD, draft_tokens=9), draft.config, tmp_path)
    assert '"method": "medusa"' in lines[0] and '"num_speculative_tokens": 3' in lines[0]
    export_medusa(draft, FACTS, tmp_path / "vllm", CARD)
    text = (tmp_path / "vllm" / "README.md").read_text()
    assert "# Medusa heads for verifier" in text and "EAGLE" not in text
    assert "20 of 64 tokens" in text


@pytest.mark.parametrize("kind", [one for one in ExportFormat if one is not ExportFormat.vllm])
def test_other_engines_refuse_it_by_name(tmp_path: Path, kind: ExportFormat):
    with pytest.raises(ConfigError, match=f"--to {kind.value}: Medusa heads.*--to vllm"):
        export_medusa(random_heads(), FACTS, tmp_path / "x", CARD, kind=kind)
    assert not (tmp_path / "x").exists()


def test_another_verifier_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="width 24"):
        export_medusa(random_heads(), replace(FACTS, hidden_size=32), tmp_path / "x", CARD)
    export_medusa(random_heads(), FACTS, tmp_path / "x", CARD)
    with pytest.raises(ConfigError, match="width 24"):
        read_medusa(tmp_path / "x", replace(FACTS, hidden_size=32), ENDS)


def config_change(**changes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return spoil


def tensor_change(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


SPOILT = {
    "a bias that is dropped": (config_change(medusa_fc_bias=False), "medusa_fc_bias=false"),
    "a key that is taken for the heads": (config_change(num_attention_heads=4), "number of heads"),
    "another key": (config_change(rope_theta=1e4), "rope_theta: must be absent"),
    "a map that stops vLLM": (config_change(truncated_vocab_size=20), "truncated_vocab_size"),
    "no number of heads": (config_change(num_heads=None), "num_heads missing"),
    "fewer heads": (config_change(num_heads=2), "lm_heads.2.weight: unknown"),
    "no precision": (config_change(torch_dtype="float16"), "float32 or bfloat16"),
    "a lost block": (
        tensor_change(lambda t: t.pop("blocks.1.layers.0.weight")),
        "blocks.1.layers.0.weight missing",
    ),
    "a row outside": (tensor_change(lambda t: t["lm_heads.0.weight"].mul_(1.5)), ""),
    "rows outside": (
        tensor_change(lambda t: t["lm_heads.0.weight"].index_fill_(0, outside(t), 0.0)),
        "are not the mean",
    ),
    "a map that falls": (tensor_change(lambda t: t[MAP].copy_(t[MAP].flip(0))), "ascending"),
    "no number": (
        tensor_change(lambda t: t["blocks.0.layers.1.bias"].fill_(float("nan"))),
        "not finite",
    ),
    "another shape": (
        tensor_change(lambda t: t.update({"blocks.0.layers.1.bias": torch.zeros(3)})),
        "shape (3,)",
    ),
}


def outside(tensors: dict[str, Tensor]) -> Tensor:
    member = torch.zeros(VOCAB, dtype=torch.bool)
    member[tensors[MAP]] = True
    return (~member).nonzero().flatten()


@pytest.mark.parametrize(("spoil", "says"), SPOILT.values(), ids=SPOILT.keys())
def test_what_vllm_would_not_notice_is_found(tmp_path: Path, spoil, says: str):
    folder = tmp_path / "vllm"
    export_medusa(random_heads(), FACTS, folder, CARD, Precision.float32)
    spoil(folder)
    found = check_medusa(folder)
    assert any(says in one for one in found) if says else found == []  # all rows alike: in order


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 0}, "heads=0"),
        ({"layers": 1.5}, "kind int"),
        ({"draft_vocab_size": 65}, "above 64"),
        ({"family": "medusae"}, "family"),
        ({"more": 1}, "not a draft of this version"),
    ],
)
def test_impossible_configurations_are_one_sentence(change: dict, says: str):
    config = MedusaConfig(WIDTH, VOCAB, 20, HEADS, 1, False)
    text = json.dumps({**json.loads(config.to_json()), **change})
    with pytest.raises(ConfigError, match=says):
        MedusaConfig.from_json(text)
    assert MedusaConfig.of(DraftSection(vocab_size=20), FACTS, HEADS) == config
