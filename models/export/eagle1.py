"""EAGLE-1's folder as vLLM reads it (llama_eagle.py of vLLM 0.32.0): no other engine's is written.

vLLM takes embedding and head from the verifier, feeds the state after its final norm, and looks for
no layer ids: the file names the one stream all the same, for whoever else reads it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from conf.schema import ExportFormat
from models.eagle1 import Eagle1Config
from models.export.card import CardFacts
from models.export.layout import NUMBERED, PLAIN_KEYS, PLAIN_SETTING, Layout, Setting

ARCHITECTURE = "EagleLlamaForCausalLM"
NOT_OF_EAGLE1 = (
    "draft_vocab_size",
    "qk_norm",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
KEYS = {name: key for name, key in PLAIN_KEYS.items() if name not in NOT_OF_EAGLE1}


def eagle1_config(draft: Eagle1Config, setting: Setting) -> dict[str, Any]:
    """Every key of config.json, the ones that equal a default too."""
    rope = dict(draft.rope)
    kind = rope.setdefault("rope_type", "default")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
        "torch_dtype": setting.dtype,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "vocab_size": draft.vocab_size,
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,  # of fc, as the family's own code calls it
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # the older spelling of the same table
        "rope_scaling": None if kind == "default" else scaling,
        "logit_scale": 1.0,
        "eagle_aux_hidden_state_layer_ids": draft.aux_layers,
        "bos_token_id": setting.bos,
        "eos_token_id": setting.eos,
    }


def weight_shapes(draft: Eagle1Config) -> dict[str, tuple[int, ...]]:
    """Shape of every trained weight by its name, the head's own and the file's."""
    width, inner = draft.hidden_size, draft.intermediate_size
    query, key = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    return {
        "fc.weight": (width, 2 * width),
        NUMBERED + "self_attn.q_proj.weight": (query, width),
        NUMBERED + "self_attn.k_proj.weight": (key, width),
        NUMBERED + "self_attn.v_proj.weight": (key, width),
        NUMBERED + "self_attn.o_proj.weight": (width, query),
        NUMBERED + "post_attention_layernorm.weight": (width,),
        NUMBERED + "mlp.gate_proj.weight": (inner, width),
        NUMBERED + "mlp.up_proj.weight": (inner, width),
        NUMBERED + "mlp.down_proj.weight": (width, inner),
    }


def nothing_refused(_draft: Eagle1Config) -> Iterator[str]:
    yield from ()


def serve(card: CardFacts, _draft: Eagle1Config, folder: Path) -> list[str]:
    speculative = {"method": "eagle", "model": str(folder), "num_speculative_tokens": card.serve_n}
    return [
        f"vllm serve {quote(card.served_verifier)} "
        f"--speculative-config {quote(json.dumps(speculative))}"
    ]


def is_eagle1(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-1 folder."""
    names = config.get("architectures")
    return isinstance(names, list) and names[:1] == [ARCHITECTURE]


EAGLE1 = Layout(
    ExportFormat.vllm,
    "vLLM",
    KEYS,
    PLAIN_SETTING,
    eagle1_config,
    nothing_refused,
    serve,
    layer=NUMBERED,
    both_spellings=False,
    draft_of=lambda values: Eagle1Config(**{k: v for k, v in values.items() if k != "layers"}),
    shapes=weight_shapes,
    last_alone=True,
)
