"""The sizes a draft takes from its verifier's config, as published models write them."""

from pathlib import Path
from typing import Any

import pytest
import transformers as library

from conf.schema import Attention, DraftSection, VerifierSection
from models.eagle3 import DraftConfig
from models.facts import VerifierFacts, load_facts
from models.layer_shape import LayerShape

SMALL = {"num_hidden_layers": 8, "vocab_size": 128}


def facts_of(folder: Path, kind: str, **sizes: Any) -> VerifierFacts:
    getattr(library, f"{kind}Config")(**{**SMALL, **sizes}).save_pretrained(folder)
    return load_facts(VerifierSection(str(folder), attention=Attention.eager), folder)


GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64}
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
DEEPSEEK = {  # of V3, whose config calls the 64 rotated channels head_dim
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GEMMA3 = {"hidden_size": 640, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
PHI4_MINI = {  # three quarters of a head rotate: 48 pairs of 128 channels
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    },
}
OLMO = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("kind", "sizes", "shape"),
    [
        ("GptOss", GPT_OSS, LayerShape(4 * 2880, 64, 8, 64, 1e-5)),
        ("Mixtral", MIXTRAL, LayerShape(4 * 4096, 32, 8, 128, 1e-5)),
        ("Qwen3Moe", QWEN3_MOE, LayerShape(6144, 32, 4, 128, 1e-6)),
        ("DeepseekV3", DEEPSEEK, LayerShape(18432, 56, 56, 128, 1e-6)),
        ("Gemma3Text", {**GEMMA3, "intermediate_size": 2048}, LayerShape(2048, 4, 1, 256, 1e-6)),
        ("Phi3", PHI4_MINI, LayerShape(8192, 24, 8, 96, 1e-5)),
        ("Olmo", OLMO, LayerShape(8192, 16, 16, 128, 1e-6)),  # its norms have no epsilon to copy
        ("Falcon", {"hidden_size": 4544}, LayerShape(4 * 4544, 71, 71, 64, 1e-6)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sizes(tmp_path: Path, kind: str, sizes: dict, shape: LayerShape):
    assert facts_of(tmp_path, kind, **sizes).layer == shape


def test_a_knob_wins_over_the_rule(tmp_path: Path):
    facts = facts_of(tmp_path, "GptOss", **GPT_OSS)
    assert DraftConfig.of(DraftSection(intermediate_size=96), facts).intermediate_size == 96
    assert DraftConfig.of(DraftSection(), facts).intermediate_size == 4 * 2880


def test_a_wrapped_text_model_gives_the_sizes(tmp_path: Path):
    text = library.Gemma3TextConfig(**SMALL, **GEMMA3, intermediate_size=2048)
    library.Gemma3Config(text_config=text.to_dict()).save_pretrained(tmp_path)
    facts = load_facts(VerifierSection(str(tmp_path)), tmp_path)
    assert (facts.hidden_size, facts.vocab_size, facts.num_layers) == (640, 128, 8)
    assert facts.layer == LayerShape(2048, 4, 1, 256, 1e-6) and facts.aux_layers == [2, 4, 5]
