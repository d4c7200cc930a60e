"""A small random head with everything that could get lost on the way: odd widths, no default."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from conf.schema import Precision
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.read import read_head
from models.export.write import export
from models.layer_shape import LayerShape
from models.verifier import VerifierEnds, VerifierFacts
from models.vocab import DraftVocab

BASE = DraftConfig(
    hidden_size=48,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,  # not hidden_size / num_heads
    vocab_size=128,
    draft_vocab_size=40,
    aux_layers=[2, 4, 5],
    rms_norm_eps=1e-5,
    max_positions=512,
    rope={"rope_type": "default", "rope_theta": 50000.0},
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
)
CARD = CardFacts("org/verifier", "org/verifier", "bfloat16", "0123abcd", DataFacts("answers.jsonl"))


def facts_for(config: DraftConfig) -> VerifierFacts:
    return VerifierFacts(
        path="org/verifier",
        architectures=["LlamaForCausalLM"],
        hidden_size=config.hidden_size,
        num_layers=8,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        layer=LayerShape(
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
        ),
        rope=dict(config.rope),
        aux_layers=list(config.aux_layers),
        bos_id=1,
        eos_ids=[2, 7],
    )


def random_head(**changes: object) -> Eagle3Draft:
    """Every parameter random, the norms too, so that a lost tensor shows."""
    config = replace(BASE, **changes)
    generator = torch.Generator().manual_seed(3)
    draft = Eagle3Draft(config).eval().requires_grad_(False)
    for parameter in draft.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    counts = torch.randint(0, 1000, (config.vocab_size,), generator=generator)
    vocab = DraftVocab.from_counts(counts, config.draft_vocab_size)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft


@pytest.fixture
def make_head() -> Callable[..., Eagle3Draft]:
    return random_head


@pytest.fixture
def export_head(tmp_path: Path) -> Callable[[Eagle3Draft], Path]:
    """Export a head in float32 to a fresh folder."""

    def write(draft: Eagle3Draft, dtype: Precision = Precision.float32) -> Path:
        return export(draft, facts_for(draft.config), tmp_path / "vllm", CARD, dtype)

    return write


def ends_for(draft: Eagle3Draft) -> VerifierEnds:
    """The draft's embedding, and a head of the whole vocabulary, as a verifier has them."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(draft.embed_tokens.weight.shape, generator=generator)
    return VerifierEnds(draft.embed_tokens.weight.detach(), rows, LlamaConfig())


@pytest.fixture
def ends_of() -> Callable[[Eagle3Draft], VerifierEnds]:
    return ends_for


@pytest.fixture
def read_back() -> Callable[[Path, Eagle3Draft], Eagle3Draft]:
    """Import a folder for the verifier of ``draft``."""
    return lambda folder, draft: read_head(folder, facts_for(draft.config), ends_for(draft))


@dataclass
class Published:
    """A head as others publish it: what config.json says, and the tensors."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def write(self, pickled: bool = False) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.config))
        for name in ("model.safetensors", "pytorch_model.bin"):
            (self.folder / name).unlink(missing_ok=True)
        if pickled:
            torch.save(self.tensors, self.folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, self.folder / "model.safetensors")
        return self.folder


@pytest.fixture
def publish(tmp_path: Path) -> Callable[[Eagle3Draft], Published]:
    """An invented official file: one flat config with the old rope spelling, no flag, no ids."""

    def make(draft: Eagle3Draft) -> Published:
        sizes = draft.config
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": sizes.layers,
            "hidden_act": "silu",
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": sizes.vocab_size,
            "draft_vocab_size": sizes.draft_vocab_size,
            "max_position_embeddings": sizes.max_positions,
            "rms_norm_eps": sizes.rms_norm_eps,
            "rope_theta": sizes.rope["rope_theta"],
            "rope_scaling": None,
            "eagle_aux_hidden_state_layer_ids": list(sizes.aux_layers),
        }
        state = {n: t.clone() for n, t in draft.state_dict().items() if n != "embed_tokens.weight"}
        return Published(folder, config, state)

    return make


@pytest.fixture
def facts_of() -> Callable[[DraftConfig], VerifierFacts]:
    return facts_for


@pytest.fixture
def plain_card() -> CardFacts:
    return CARD
