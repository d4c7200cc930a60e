"""Judges an EAGLE-3 folder: each mistake that an engine would not notice, named.

Reads JSON and safetensors alone; no model is built. A finding is one sentence.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from conf.schema import Precision
from models.eagle3 import DraftConfig
from models.export.check_tensors import numbers, tensors, vocabulary
from models.export.check_verifier import against_verifier
from models.export.engines import layout_of
from models.export.layout import (
    ABSENT,
    CONFIG,
    NORM_FLAGS,
    STORED,
    WEIGHTS,
    Layout,
    draft_config_of,
    expected_tensors,
    setting_of,
    value_at,
)
from models.rope import STATIC_TYPES

POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_positions",
)


def check(folder: Path, verifier: Path | None = None, layout: Layout | None = None) -> list[str]:
    """All findings, the gravest first; an empty list means that the engine reads what was trained.

    ``layout``: of the engine to judge for; the one that the folder is written in by default. With
    the verifier's folder, sizes, layer ids, tokens and a stored embedding are compared with it.
    """
    config, findings = read_config(folder)
    if findings:
        return findings
    layout = layout or layout_of(config)
    findings += sizes(config, layout)
    if findings:
        return findings
    draft = draft_config_of(config, layout)
    findings += [f"{CONFIG}: {words}" for words in layout.refusals(draft)]
    findings += keys(config, draft, layout)
    dtype = setting_of(config, layout).dtype
    if dtype not in [kind.value for kind in STORED]:
        return findings  # the tensors cannot be judged without a dtype; the key is a finding
    expected = expected_tensors(draft, layout, Precision(dtype))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            findings += tensors(file, draft, layout, expected)
            findings += vocabulary(file, draft, layout)
            findings += numbers(file)
            if verifier is not None:
                findings += against_verifier(folder, file, draft, layout, verifier)
    except (SafetensorError, OSError) as error:
        findings.append(f"{WEIGHTS}: cannot be read ({error})")
    return findings


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    path = folder / CONFIG
    if not path.is_file():
        return {}, [f"{CONFIG}: missing in {folder}"]
    if not (folder / WEIGHTS).is_file():
        return {}, [f"{WEIGHTS}: missing in {folder}"]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return {}, [f"{CONFIG}: not JSON ({error})"]
    if not isinstance(config, dict):
        return {}, [f"{CONFIG}: must hold an object"]
    return config, []


def sizes(config: dict[str, Any], layout: Layout) -> Iterator[str]:
    """The keys that carry information: all there, of the right kind, possible together."""
    found = {name: value_at(config, path) for name, path in layout.keys.items()}
    missing = [name for name, value in found.items() if value is ABSENT]
    for name in missing:
        yield f"{CONFIG}: {layout.keys[name]} missing; an engine would assume its own default"
    for name in POSITIVE:
        value = found[name]
        if name not in missing and (type(value) is not int or value < 1):
            yield f"{CONFIG}: {layout.keys[name]}={value!r}: must be an integer of at least 1"
    for flag in NORM_FLAGS:
        if flag not in missing and type(found[flag]) is not bool:
            yield f"{CONFIG}: {layout.keys[flag]}={found[flag]!r}: must be true or false"
    if missing:
        return
    kind, eps, ids = found["qk_norm"], found["rms_norm_eps"], found["aux_layers"]
    if kind not in ("llama", "qwen3"):
        yield f"{CONFIG}: {layout.keys['qk_norm']}={kind!r}: must be llama or qwen3"
    if not isinstance(eps, float) or not 0 < eps < 1:
        yield f"{CONFIG}: {layout.keys['rms_norm_eps']}={eps!r}: must be a number between 0 and 1"
    whole = isinstance(ids, list) and ids and all(type(n) is int and n >= 1 for n in ids)
    if not whole or sorted(set(ids)) != ids:
        yield (
            f"{CONFIG}: {layout.keys['aux_layers']}={ids!r}: must be ascending, unique ids of at "
            "least 1"
        )
    yield from rope(found["rope"])


def rope(parameters: object) -> Iterator[str]:
    if not isinstance(parameters, dict) or not isinstance(
        parameters.get("rope_theta"), int | float
    ):
        yield f"{CONFIG}: rope_parameters={parameters!r}: must name rope_type and rope_theta"
    elif parameters.get("rope_type") not in STATIC_TYPES:
        yield (
            f"{CONFIG}: rope_type={parameters.get('rope_type')!r}: must be one of "
            f"{', '.join(STATIC_TYPES)}"
        )
    elif parameters.get("short_factor") != parameters.get("long_factor"):
        yield (
            f"{CONFIG}: rope_parameters: short_factor and long_factor differ; engines choose "
            "between them by the length they serve, the head has one table"
        )
    elif parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield (
            f"{CONFIG}: partial_rotary_factor={parameters['partial_rotary_factor']}: engines would "
            "rotate a part of each head, training rotates all of it"
        )


def keys(config: dict[str, Any], draft: DraftConfig, layout: Layout) -> Iterator[str]:
    """Every other key follows from those: compare with what export would write."""
    if draft.draft_vocab_size > draft.vocab_size:
        yield (
            f"{CONFIG}: draft_vocab_size={draft.draft_vocab_size}: above "
            f"vocab_size={draft.vocab_size}, which is the verifier's"
        )
    if draft.num_heads % draft.num_kv_heads:
        yield (
            f"{CONFIG}: num_key_value_heads={draft.num_kv_heads}: must divide "
            f"num_attention_heads={draft.num_heads}"
        )
    setting = setting_of(config, layout)
    if setting.dtype not in [kind.value for kind in STORED]:
        key = layout.setting_keys["dtype"]
        yield f"{CONFIG}: {key}={setting.dtype!r}: must be float32 or bfloat16"
    if "verifier" in layout.setting_keys and not setting.verifier:
        key = layout.setting_keys["verifier"]
        yield f"{CONFIG}: {key}={setting.verifier!r}: must name the verifier, which is loaded by it"
    tokens = setting.draft_tokens
    if "draft_tokens" in layout.setting_keys and (type(tokens) is not int or tokens < 1):
        key = layout.setting_keys["draft_tokens"]
        yield f"{CONFIG}: {key}={tokens!r}: must be an integer of at least 1"
    yield from differences(config, layout.config_for(draft, setting), "", layout)


def differences(
    found: dict[str, Any], right: dict[str, Any], within: str, layout: Layout
) -> Iterator[str]:
    """Keys of ``found`` that are missing, wrong or too many; a nested object is compared by key."""
    for key, value in right.items():
        path, other = within + key, found.get(key, ABSENT)
        if other is ABSENT:
            yield f"{CONFIG}: {path} missing; write {path}={json.dumps(value)}"
        elif isinstance(value, dict) and isinstance(other, dict) and key != "rope_parameters":
            yield from differences(other, value, f"{path}.", layout)
        elif other != value or isinstance(other, bool) != isinstance(value, bool):
            yield f"{CONFIG}: {path}={json.dumps(other)}: must be {json.dumps(value)}"
    for key in found.keys() - right.keys():
        quantised = "quantization" in key or "compression" in key
        why = "the head would be read as quantised" if quantised else f"{layout.engine} has no use"
        yield f"{CONFIG}: {within}{key}: must be absent; {why}"
