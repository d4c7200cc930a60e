"""A small random head with everything that could get lost on the way: odd widths, no default."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import Precision
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.write import export
from models.layer_shape import LayerShape
from models.verifier import VerifierFacts
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


@pytest.fixture
def facts_of() -> Callable[[DraftConfig], VerifierFacts]:
    return facts_for


@pytest.fixture
def plain_card() -> CardFacts:
    return CARD
