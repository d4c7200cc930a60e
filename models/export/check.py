"""Judges an EAGLE-3 folder: each mistake that an engine would not notice, named.

Reads JSON and safetensors alone; no model is built. A finding is one sentence.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from conf.schema import MOST_LAYERS, Precision
from models.draft_limits import LARGEST, SIZES, misfits, rope_faults
from models.export.check_tensors import numbers, tensors, vocabulary
from models.export.check_verifier import against_verifier
from models.export.dialect import LLAMA_EPS, LLAMA_LIMIT
from models.export.dialect_rope import LLAMA_THETA
from models.export.eagle1 import EAGLE1, is_eagle1
from models.export.engines import layout_of
from models.export.layout import (
    ABSENT,
    CONFIG,
    NORM_FLAGS,
    STORED,
    WEIGHTS,
    HeadConfig,
    Layout,
    expected_tensors,
    fields_of,
    setting_of,
    value_at,
)
from models.export.speculators import SPECULATORS
from models.export.vllm import VLLM

NEEDED = {"hidden_size", "intermediate_size", "num_heads", "vocab_size"}  # no default stands in
POSITIVE = dict.fromkeys((*SIZES, "max_positions"), 2**31) | {"layers": MOST_LAYERS}


def check(folder: Path, verifier: Path | None = None, layout: Layout | None = None) -> list[str]:
    """All findings: of config.json, then of the tensors; none means that the engine reads what was
    trained. What a folder leaves out is a finding, and the rest is judged all the same.

    ``layout``: of the engine to judge for; the one that the folder is written in by default. With
    the verifier's folder, sizes, layer ids, tokens and a stored embedding are compared with it.
    """
    config, findings = read_config(folder)
    if findings:
        return findings
    if layout is not None and is_eagle1(config) and layout.format is not EAGLE1.format:
        return [f"{CONFIG}: architectures: an EAGLE-1 head, which {layout.engine} is not given"]
    layout = layout_for(config, layout)
    found = fields_of(config, layout)
    wrong, missing = [*kinds(found, layout)], [n for n, v in found.items() if v is ABSENT]
    findings += [*absent(config, missing, layout), *wrong]
    if wrong or set(missing) & NEEDED:
        return findings
    draft = layout.draft_of(assumed(config, found, layout))
    findings += [f"{CONFIG}: {words}" for words in layout.refusals(draft)]
    said = tuple(f"{CONFIG}: {layout.keys[name]} missing;" for name in missing)
    findings += [one for one in keys(config, draft, layout) if not one.startswith(said)]
    expected = expected_tensors(draft, layout, dtype_of(config, layout))
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


def layout_for(config: dict[str, Any], wanted: Layout | None) -> Layout:
    """The engine's own, but for vLLM, which reads EAGLE-1's and speculators' as they are."""
    written = layout_of(config)
    read_too = wanted is VLLM and written in (EAGLE1, SPECULATORS)
    return written if wanted is None or read_too else wanted


def dtype_of(config: dict[str, Any], layout: Layout) -> Precision | None:
    """None: a finding of ``keys``, and the weights are judged by name and shape alone."""
    stored = setting_of(config, layout).dtype
    return Precision(stored) if stored in [kind.value for kind in STORED] else None


def read_config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    path = folder / CONFIG
    if not path.is_file():
        return {}, [f"{CONFIG}: missing in {folder}"]
    if not (folder / WEIGHTS).is_file():
        return {}, [f"{WEIGHTS}: missing in {folder}"]
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, [f"{CONFIG}: not JSON ({error})"]
    if not isinstance(config, dict):
        return {}, [f"{CONFIG}: must hold an object"]
    return config, []


def absent(config: dict[str, Any], missing: list[str], layout: Layout) -> Iterator[str]:
    for name in missing:
        why = "an engine would assume its own default"
        outputs = value_at(config, f"eagle_config.{layout.keys[name]}")
        if name == "rope" and isinstance(value_at(config, "rope_theta"), int | float):
            why = "rope_theta alone is the older spelling; write both"
        if name == "aux_layers" and isinstance(outputs, list):
            why = f"vLLM would take {outputs} of eagle_config for streams, one layer early"
        yield f"{CONFIG}: {layout.keys[name]} missing; {why}"


def kinds(found: dict[str, Any], layout: Layout) -> Iterator[str]:
    """Values that are there and of a kind that no head can have."""

    def named(name: str) -> str:
        return f"{CONFIG}: {layout.keys[name]}={found[name]!r}"

    there = {name for name, value in found.items() if value is not ABSENT}
    for name, most in POSITIVE.items():
        if name in there and (type(found[name]) is not int or not 1 <= found[name] <= most):
            yield f"{named(name)}: must be an integer of at least 1, and possible"
    for flag in NORM_FLAGS:
        if flag in there and type(found[flag]) is not bool:
            yield f"{named(flag)}: must be true or false"
    eps, ids = found["rms_norm_eps"], found["aux_layers"]
    if "qk_norm" in there and found["qk_norm"] not in ("llama", "qwen3"):
        yield f"{named('qk_norm')}: must be llama or qwen3"
    if "rms_norm_eps" in there and (not isinstance(eps, float) or not 0 < eps < 1):
        yield f"{named('rms_norm_eps')}: must be a number between 0 and 1"
    whole = isinstance(ids, list) and ids and all(type(n) is int and 1 <= n <= LARGEST for n in ids)
    if "aux_layers" in there and (not whole or sorted(set(ids)) != ids):
        yield f"{named('aux_layers')}: must be ascending, unique ids of at least 1"
    if "rope" in there:
        width = found["head_dim"] if type(found["head_dim"]) is int else 0
        yield from rope(found["rope"], width)


def assumed(config: dict[str, Any], found: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """``found`` with what vLLM would take for a key that is missing, so that the rest is judged."""
    outputs = value_at(config, f"eagle_config.{layout.keys['aux_layers']}")
    count = value_at(config, "num_aux_hidden_states")
    plain = [n for n in outputs if type(n) is int] if isinstance(outputs, list) else []
    base = value_at(config, "rope_theta")
    theta = base if isinstance(base, int | float) else LLAMA_THETA
    default = {
        "num_kv_heads": found["num_heads"],
        "head_dim": found["hidden_size"] // found["num_heads"],
        "draft_vocab_size": found["vocab_size"],
        "rms_norm_eps": LLAMA_EPS,
        "max_positions": LLAMA_LIMIT,
        "rope": {"rope_type": "default", "rope_theta": theta},
        "aux_layers": plain or [*range(1, 1 + (count if type(count) is int else 3))],
        "qk_norm": "llama",
        "layers": 1,
        **dict.fromkeys(NORM_FLAGS, False),
        **({"norm_before_residual": True} if layout is SPECULATORS else {}),
    }
    return {name: default[name] if value is ABSENT else value for name, value in found.items()}


def rope(parameters: object, head_dim: int) -> Iterator[str]:
    """Values that no table can have, and what engines would compute otherwise."""
    yield from (f"{CONFIG}: {fault}" for fault in rope_faults(parameters, head_dim))
    table = parameters if isinstance(parameters, dict) else {}
    if table.get("short_factor") != table.get("long_factor"):
        yield (
            f"{CONFIG}: rope_parameters: short_factor and long_factor differ; engines choose "
            "between them by the length they serve, the head has one table"
        )
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        yield (
            f"{CONFIG}: partial_rotary_factor={table['partial_rotary_factor']}: engines would "
            "rotate a part of each head, training rotates all of it"
        )


def keys(config: dict[str, Any], draft: HeadConfig, layout: Layout) -> Iterator[str]:
    """Every other key follows from those: compare with what export would write."""
    yield from (f"{CONFIG}: {misfit}" for misfit in misfits(draft))
    setting = setting_of(config, layout)
    if setting.dtype not in [kind.value for kind in STORED]:
        key = layout.setting_keys["dtype"]
        yield f"{CONFIG}: {key}={setting.dtype!r}: must be float32 or bfloat16"
    for name, value in (("bos", setting.bos), ("eos", setting.eos)):
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(n) is int and 0 <= n < draft.vocab_size for n in ids):
            key = layout.setting_keys[name]
            yield f"{CONFIG}: {key}={value!r}: must be token ids below {draft.vocab_size}, or null"
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
