"""The rotary table of a published head, in either spelling that config.json files have."""

import json
from typing import Any

from conf.schema import ConfigError
from models.draft_limits import ORIGINAL, ROPE_NEEDS, is_positive, rope_faults
from models.rope import STATIC_TYPES, Rope, settled, table_for_llama

THETA = "rope_theta"
LLAMA_THETA = 10000.0  # what every reader takes where a file has no base
OTHER_NAMES = {"su": "longrope", "mrope": "default"}  # of text alone the three positions are one


def rope_of(
    place: str, layer: dict[str, Any], head_dim: int, limit: int, assumed: list[str]
) -> dict[str, Any]:
    """rope_parameters as a draft has them, from that key or from rope_theta and rope_scaling.

    ``assumed`` gets a sentence where the base is missing. Raises ConfigError for a type that the
    draft lacks (by name), for a key that its type needs, and for two spellings that differ.
    """
    new, old = (spelt(place, key, layer.get(key)) for key in ("rope_parameters", "rope_scaling"))
    if new and old and new["rope_type"] != old["rope_type"]:
        raise ConfigError(
            f"{place}: rope_parameters is of type {new['rope_type']}, rope_scaling of type "
            f"{old['rope_type']}; mend the one that is wrong"
        )
    table = new or old or {"rope_type": "default"}
    bases = [base for base in (table.get(THETA), layer.get(THETA)) if base is not None]
    for base in bases:
        if not is_positive(base):
            raise ConfigError(f"{place}: {THETA}={base!r}: must be a number above 0")
    if len(set(bases)) > 1:
        raise ConfigError(
            f"{place}: {THETA}={bases[1]}, and rope_parameters has {bases[0]}; mend the one that "
            "is wrong"
        )
    if not bases:
        assumed.append(f"{THETA} is not in config.json: {LLAMA_THETA:g} is assumed")
    table[THETA] = bases[0] if bases else LLAMA_THETA
    refuse_part(place, table, layer)
    kind = table["rope_type"]
    if ORIGINAL in ROPE_NEEDS.get(kind, ()) and ORIGINAL not in table and layer.get(ORIGINAL):
        table[ORIGINAL] = layer[ORIGINAL]
    table.pop("partial_rotary_factor", None)
    for fault in rope_faults(table, head_dim):
        raise ConfigError(f"{place}: {fault}; mend it")
    return settled(Rope(head_dim, limit, table))


def spelt(place: str, key: str, value: object) -> dict[str, Any]:
    """One of the two objects with today's names, a type always; empty where there is none."""
    if not value:
        return {}
    partial = value.get("partial_rotary_factor") if isinstance(value, dict) else None
    table = table_for_llama(value) if isinstance(value, dict) else None
    if table is None:
        raise ConfigError(
            f"{place}: {key}={json.dumps(value)}: must be one rotary table, of all layers"
        )
    kept = {name: entry for name, entry in table.items() if entry is not None}
    named = kept.get("rope_type", "default")
    kept["rope_type"] = kind = OTHER_NAMES.get(named, named) if isinstance(named, str) else named
    if not isinstance(kind, str) or kind not in STATIC_TYPES:
        raise ConfigError(
            f"{place}: {key}: rope_type={kind} is not supported by the draft; supported are "
            f"{', '.join(STATIC_TYPES)}"
        )
    return kept if partial is None else kept | {"partial_rotary_factor": partial}


def refuse_part(place: str, table: dict[str, Any], layer: dict[str, Any]) -> None:
    for part in (table.get("partial_rotary_factor"), layer.get("partial_rotary_factor")):
        if part not in (None, 1):
            raise ConfigError(
                f"{place}: partial_rotary_factor={part}: rotates a part of each head, and a draft "
                "here rotates all of it; give such a head"
            )
