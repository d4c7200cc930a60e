"""What no draft can have: impossible sizes, layer ids and rotary tables, a sentence each.

Files say anything; without these rules some of it ends far away, in an allocation or in a NaN.
"""

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from conf.schema import MOST_LAYERS, ConfigError
from models.rope import STATIC_TYPES

if TYPE_CHECKING:
    from models.eagle1 import Eagle1Config
    from models.eagle3 import DraftConfig

LARGEST = 2**24  # of any width, count or vocabulary; positions go to 2**31
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
)
ORIGINAL = "original_max_position_embeddings"
ROPE_NEEDS = {  # by type, what its table cannot do without
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
}


def refuse_unfit(draft: "DraftConfig | Eagle1Config") -> None:
    """Raise ConfigError for values of a draft.json that are of another kind, or impossible."""
    for field, kind in get_type_hints(type(draft)).items():
        value, kinds = getattr(draft, field), get_origin(kind) or kind
        if not isinstance(value, (int, float) if kinds is float else kinds):
            raise ConfigError(
                f"draft.json: {field}={value!r}: must be of kind {kinds.__name__}; give the "
                "file as training wrote it"
            )
    for fault in faults(draft):
        raise ConfigError(f"draft.json: {fault}; give the file as training wrote it")


def faults(draft: "DraftConfig | Eagle1Config") -> Iterator[str]:
    """Each names the field, its value and the rule."""
    sizes = dict.fromkeys(SIZES, LARGEST) | {"max_positions": 2**31, "layers": MOST_LAYERS}
    for name, most in sizes.items():
        value = getattr(draft, name, 1)  # a family of one layer has no number of them
        if type(value) is not int or not 1 <= value <= most:
            yield f"{name}={value!r}: must be a whole number in 1..{most}"
            return
    yield from misfits(draft)
    ids = draft.aux_layers
    if not ids or sorted(set(ids)) != ids or not all(1 <= n <= LARGEST for n in ids):
        yield f"aux_layers={ids!r}: must be ascending, unique ids in 1..{LARGEST}"
    yield from rope_faults(draft.rope, draft.head_dim)


def misfits(draft: "DraftConfig | Eagle1Config") -> Iterator[str]:
    """Sizes that are possible each by itself, and not together."""
    if draft.draft_vocab_size > draft.vocab_size:
        yield (
            f"draft_vocab_size={draft.draft_vocab_size}: above vocab_size={draft.vocab_size}, "
            "which is the verifier's"
        )
    if draft.num_heads % draft.num_kv_heads:
        yield (
            f"num_key_value_heads={draft.num_kv_heads}: must divide "
            f"num_attention_heads={draft.num_heads}"
        )
    if draft.head_dim % 2:
        yield f"head_dim={draft.head_dim}: must be even, positions rotate pairs"


def rope_faults(table: object, head_dim: int) -> Iterator[str]:
    """Of rope_parameters, as drafts have them."""
    if not isinstance(table, dict) or not is_positive(table.get("rope_theta")):
        yield f"rope_parameters={table!r}: must name rope_type and a rope_theta > 0"
        return
    kind = table.get("rope_type")
    if not isinstance(kind, str) or kind not in STATIC_TYPES:
        yield f"rope_type={kind!r}: must be one of {', '.join(STATIC_TYPES)}"
        return
    needs = ROPE_NEEDS.get(kind, ())
    lacking = [key for key in needs if table.get(key) is None]
    if lacking:
        yield f"rope_parameters of type {kind} lacks {', '.join(lacking)}"
        return
    for key in needs:
        value = table[key]
        listed = key in ("short_factor", "long_factor")
        whole = isinstance(value, list | tuple) and len(value) == head_dim // 2
        if listed and not (whole and all(map(is_positive, value))):
            yield f"rope_parameters.{key}: must be {head_dim // 2} numbers above 0"
        elif not listed and not is_positive(value):
            yield f"rope_parameters.{key}={value!r}: must be a number above 0"
    if kind == "llama3" and not table["low_freq_factor"] < table["high_freq_factor"]:
        yield "rope_parameters.low_freq_factor: must be below high_freq_factor"


def is_positive(value: Any) -> bool:
    """A finite number above 0; True is none, and 10**400 is no float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < 1e300 and isfinite(value)
