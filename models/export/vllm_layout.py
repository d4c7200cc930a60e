"""The plain EAGLE-3 layout that vLLM reads: every key of config.json and every tensor, exactly.

vLLM notices few mistakes (a missing tensor, a lost flag and absolute vocabulary ids all load), so
this page is the law that export writes by and check judges by. Read in vLLM 0.32.0.
"""

from dataclasses import dataclass, fields
from typing import Any

from conf.schema import ConfigError, Precision
from models.eagle3 import DraftConfig
from models.verifier import VerifierFacts

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
ARCHITECTURE = "LlamaForCausalLMEagle3"
QK_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"  # the one draft class that norms query and key
LAYER = "midlayer."  # the spelling that every engine takes, SGLang's older revisions included
LAYER_ALIAS = "layers.0."  # the spelling of the speculators library; vLLM takes both
EMBEDDING = "embed_tokens.weight"  # left out: vLLM then shares the verifier's
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
STORED = {Precision.float32: "F32", Precision.bfloat16: "BF16"}  # safetensors' names

KEY_OF_SIZE = {  # DraftConfig field -> config.json key, where both hold the same value
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "rope": "rope_parameters",
    "aux_layers": "eagle_aux_hidden_state_layer_ids",
    **{flag: flag for flag in NORM_FLAGS},
}
# No key says qk_norm: the architecture does.
assert {*KEY_OF_SIZE, "qk_norm"} == {field.name for field in fields(DraftConfig)}


@dataclass(frozen=True)
class TokenIds:
    """Special tokens of the verifier's tokenizer."""

    bos: int | None
    eos: int | list[int] | None

    @classmethod
    def of(cls, facts: VerifierFacts) -> "TokenIds":
        eos = facts.eos_ids
        return cls(facts.bos_id, None if not eos else eos[0] if len(eos) == 1 else list(eos))


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it


def architecture_of(draft: DraftConfig) -> str:
    return QK_ARCHITECTURE if draft.qk_norm else ARCHITECTURE


def config_for(draft: DraftConfig, tokens: TokenIds, dtype: Precision) -> dict[str, Any]:
    """Every key of config.json, the ones that equal a default too: defaults differ by engine."""
    rope = dict(draft.rope)
    kind = rope.setdefault("rope_type", "default")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [architecture_of(draft)],
        "model_type": "qwen3" if draft.qk_norm else "llama",
        "torch_dtype": dtype.value,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "logit_scale": 1.0,
        **{key: getattr(draft, field) for field, key in KEY_OF_SIZE.items()},
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],  # the older spelling of the same table
        "rope_scaling": None if kind == "default" else scaling,
        "target_hidden_size": draft.hidden_size,
        "num_aux_hidden_states": len(draft.aux_layers),
        "eagle_config": {
            # SGLang reads this list alone and counts layer outputs: stream n leaves layer n-1
            "eagle_aux_hidden_state_layer_ids": [n - 1 for n in draft.aux_layers],
            "use_aux_hidden_state": True,
            "norm_before_fc": draft.norm_before_fc,
        },
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
    }


def draft_config_of(config: dict[str, Any]) -> DraftConfig:
    """The head that a config.json describes. Raises ConfigError naming the missing keys."""
    missing = [key for key in KEY_OF_SIZE.values() if key not in config]
    if missing:
        raise ConfigError(f"{CONFIG}: {', '.join(missing)} missing; export the head again")
    qk_norm = config.get("architectures") == [QK_ARCHITECTURE]
    sizes = {field: config[key] for field, key in KEY_OF_SIZE.items()}
    return DraftConfig(**sizes, qk_norm=qk_norm)


def expected_tensors(draft: DraftConfig, dtype: Precision) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every tensor in model.safetensors: no more, no less."""
    width, inner, count = draft.hidden_size, draft.intermediate_size, len(draft.aux_layers)
    query, key = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, count * width),
        LAYER + "input_layernorm.weight": (width,),
        LAYER + "hidden_norm.weight": (width,),
        LAYER + "self_attn.q_proj.weight": (query, 2 * width),
        LAYER + "self_attn.k_proj.weight": (key, 2 * width),
        LAYER + "self_attn.v_proj.weight": (key, 2 * width),
        LAYER + "self_attn.o_proj.weight": (width, query),
        LAYER + "post_attention_layernorm.weight": (width,),
        LAYER + "mlp.gate_proj.weight": (inner, width),
        LAYER + "mlp.up_proj.weight": (inner, width),
        LAYER + "mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (draft.draft_vocab_size, width),
    }
    if draft.norm_before_fc:
        shapes["input_norm.weight"] = (count * width,)
    if draft.fc_norm:
        shapes.update({f"fc_norm.{i}.weight": (width,) for i in range(count)})
    if draft.qk_norm:
        shapes.update({f"{LAYER}self_attn.{name}_norm.weight": (draft.head_dim,) for name in "qk"})
    expected = {name: TensorSpec(shape, STORED[dtype]) for name, shape in shapes.items()}
    if draft.draft_vocab_size < draft.vocab_size:  # with equal sizes vLLM refuses a d2t
        expected["d2t"] = TensorSpec((draft.draft_vocab_size,), "I64")
        expected["t2d"] = TensorSpec((draft.vocab_size,), "BOOL")
    return expected


def plain_name(name: str) -> str:
    """A tensor's name in our spelling: layers.0.* is midlayer.*."""
    return LAYER + name.removeprefix(LAYER_ALIAS) if name.startswith(LAYER_ALIAS) else name
