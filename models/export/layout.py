"""What an EAGLE-3 folder is: its files, its tensors, and where config.json holds what.

Engines notice few mistakes (a missing tensor, a lost flag and absolute vocabulary ids all load), so
a layout is the law that export writes by and check judges by. One module an engine has its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from conf.schema import ConfigError, ExportFormat, Precision
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.export.card import CardFacts
from models.facts import VerifierFacts

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
ORIGIN = "eyrie.json"  # what the head was made from; no engine reads it
MIDLAYER, NUMBERED = "midlayer.", "layers.0."  # two spellings of the first decoder layer
EMBEDDING = "embed_tokens.weight"  # left out where the engine then shares the verifier's
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
STORED = {Precision.float32: "F32", Precision.bfloat16: "BF16"}  # safetensors' names
ABSENT = object()
HeadConfig = DraftConfig | Eagle1Config  # of the families that are written by a layout


@dataclass(frozen=True)
class Setting:
    """What config.json says beside the head itself: where it runs, and for whom."""

    dtype: str  # of the stored weights: float32 or bfloat16
    bos: int | None
    eos: int | list[int] | None
    verifier: str = ""  # hub name or folder that an engine can open
    verifier_architectures: list[str] = field(default_factory=list)
    draft_tokens: int = 1  # num_speculative_tokens

    @classmethod
    def of(cls, facts: VerifierFacts, card: CardFacts, dtype: Precision) -> "Setting":
        eos = facts.eos_ids
        return cls(
            dtype=dtype.value,
            bos=facts.bos_id,
            eos=None if not eos else eos[0] if len(eos) == 1 else list(eos),
            verifier=card.served_verifier,
            verifier_architectures=list(facts.architectures),
            draft_tokens=card.serve_n,
        )


@dataclass(frozen=True)
class Layout:
    """How one engine wants a head. Paths into config.json are dotted."""

    format: ExportFormat
    engine: str  # as its makers write it
    keys: dict[str, str]  # field of DraftConfig -> where config.json holds it
    setting_keys: dict[str, str]  # field of Setting -> the same
    config_for: Callable[[Any, Setting], dict[str, Any]]  # Any: its family's config
    refusals: Callable[[Any], Iterator[str]]  # what the engine would run otherwise
    serve: Callable[[CardFacts, Any, Path], list[str]]  # lines for a shell
    layer: str = MIDLAYER
    both_spellings: bool = True  # the first layer's other prefix is read as well
    offsets: str = "I64"  # dtype of d2t
    membership: bool = True  # t2d is in the file, too
    embedding: bool = False  # and a copy of the verifier's, which the engine does not look up
    last_stream: bool = True  # the stream after the verifier's last layer can be an aux state
    last_alone: bool = False  # and it is the only one
    draft_of: Callable[[dict[str, Any]], HeadConfig] = lambda values: draft_of(values)
    shapes: Callable[[Any], dict[str, tuple[int, ...]]] = lambda draft: weight_shapes(draft)


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it; empty: any


PLAIN_KEYS = {  # DraftConfig field -> key, for every engine that reads one flat config.json
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
    "qk_norm": "model_type",  # qwen3 normalises query and key, llama does not
    "layers": "num_hidden_layers",
    **{flag: flag for flag in NORM_FLAGS},
}
PLAIN_SETTING = {"dtype": "torch_dtype", "bos": "bos_token_id", "eos": "eos_token_id"}
assert set(PLAIN_KEYS) == {field.name for field in fields(DraftConfig)}


def value_at(config: dict[str, Any], path: str) -> Any:
    """The value at a dotted path, a number for an entry of a list; ABSENT where there is none."""
    found: Any = config
    for name in path.split("."):
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return ABSENT
    return found


def fields_of(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Field of DraftConfig -> what config.json has for it, ABSENT where it has nothing."""
    return {name: value_at(config, path) for name, path in layout.keys.items()}


def draft_config_of(config: dict[str, Any], layout: Layout) -> HeadConfig:
    """The head that a config.json describes. Raises ConfigError naming the missing keys."""
    values = fields_of(config, layout)
    missing = [layout.keys[name] for name, value in values.items() if value is ABSENT]
    if missing:
        raise ConfigError(f"{CONFIG}: {', '.join(missing)} missing; export the head again")
    return layout.draft_of(values)


def draft_of(values: dict[str, Any]) -> DraftConfig:
    return DraftConfig(**{**values, "qk_norm": values["qk_norm"] == "qwen3"})


def setting_of(config: dict[str, Any], layout: Layout) -> Setting:
    """The rest of it: what is absent is None, and a finding of ``check``."""
    found = {name: value_at(config, path) for name, path in layout.setting_keys.items()}
    values: dict[str, Any] = {name: None if v is ABSENT else v for name, v in found.items()}
    return Setting(**values)


def expected_tensors(
    draft: HeadConfig, layout: Layout, dtype: Precision | None
) -> dict[str, TensorSpec]:
    """Name -> shape and dtype of every tensor in model.safetensors: no more, no less.

    Without ``dtype`` that of the weights is left open.
    """
    stored = STORED[dtype] if dtype else ""
    expected = {
        respell(name, layout.layer): TensorSpec(shape, stored)
        for name, shape in layout.shapes(draft).items()
    }
    if draft.draft_vocab_size < draft.vocab_size:  # with equal sizes vLLM refuses a d2t
        expected["d2t"] = TensorSpec((draft.draft_vocab_size,), layout.offsets)
        if layout.membership:
            expected["t2d"] = TensorSpec((draft.vocab_size,), "BOOL")
    if layout.embedding:
        expected[EMBEDDING] = TensorSpec((draft.vocab_size, draft.hidden_size), "")
    return expected


def weight_shapes(draft: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight but the embedding, by the name that the head itself has for it."""
    width, count = draft.hidden_size, len(draft.aux_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, count * width),
        MIDLAYER + "hidden_norm.weight": (width,),
        **layer_shapes(draft, MIDLAYER, 2 * width),
        "norm.weight": (width,),
        "lm_head.weight": (draft.draft_vocab_size, width),
    }
    for n in range(1, draft.layers):
        shapes |= layer_shapes(draft, f"layers.{n}.", width)
    if draft.norm_before_fc:
        shapes["input_norm.weight"] = (count * width,)
    if draft.fc_norm:
        shapes.update({f"fc_norm.{i}.weight": (width,) for i in range(count)})
    return shapes


def layer_shapes(draft: DraftConfig, prefix: str, read: int) -> dict[str, tuple[int, ...]]:
    """Of a decoder layer whose attention reads vectors ``read`` wide."""
    width, inner = draft.hidden_size, draft.intermediate_size
    query, key = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (query, read),
        "self_attn.k_proj.weight": (key, read),
        "self_attn.v_proj.weight": (key, read),
        "self_attn.o_proj.weight": (width, query),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if draft.qk_norm:
        shapes |= {f"self_attn.{n}_norm.weight": (draft.head_dim,) for n in "qk"}
    return {prefix + name: shape for name, shape in shapes.items()}


def respell(name: str, layer: str) -> str:
    """``name`` with the first layer's prefix spelt as ``layer``: engines differ in that alone."""
    for prefix in (MIDLAYER, NUMBERED):
        if name.startswith(prefix):
            return layer + name.removeprefix(prefix)
    return name
