"""Judges a folder in vLLM's EAGLE-3 layout: each mistake that an engine would not notice, named.

Reads JSON and safetensors alone; no model is built. A finding is one sentence.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conf.schema import ConfigError, Precision
from models.eagle3 import DraftConfig
from models.export.vllm_layout import (
    CONFIG,
    EMBEDDING,
    KEY_OF_SIZE,
    LAYER,
    LAYER_ALIAS,
    NORM_FLAGS,
    STORED,
    WEIGHTS,
    TensorSpec,
    TokenIds,
    architecture_of,
    config_for,
    draft_config_of,
    expected_tensors,
    plain_name,
)
from models.rope import STATIC_TYPES
from models.verifier import read_tensor, tensor_files

POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
AUX = KEY_OF_SIZE["aux_layers"]
ABSENT = object()


def check(folder: Path, verifier: Path | None = None) -> list[str]:
    """All findings, the gravest first; an empty list means that vLLM reads what was trained.

    With the verifier's folder, sizes, layer ids and a stored embedding are compared with it.
    """
    config, findings = read_config(folder)
    if findings:
        return findings
    findings += sizes(config)
    if findings:
        return findings
    draft = draft_config_of(config)
    findings += keys(config, draft)
    if config.get("torch_dtype") not in [kind.value for kind in STORED]:
        return findings  # the tensors cannot be judged without a dtype; the key is a finding
    expected = expected_tensors(draft, Precision(config["torch_dtype"]))
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            findings += tensors(file, draft, expected)
            findings += vocabulary(file, draft)
            findings += numbers(file)
            if verifier is not None:
                findings += against_verifier(file, draft, verifier)
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


def sizes(config: dict[str, Any]) -> Iterator[str]:
    """The keys that carry information: all there, of the right kind, possible together."""
    missing = [key for key in KEY_OF_SIZE.values() if key not in config]
    for key in missing:
        yield f"{CONFIG}: {key} missing; an engine would assume its own default"
    for key in set(POSITIVE) - set(missing):
        if type(config[key]) is not int or config[key] < 1:
            yield f"{CONFIG}: {key}={config[key]!r}: must be an integer of at least 1"
    for flag in set(NORM_FLAGS) - set(missing):
        if type(config[flag]) is not bool:
            yield f"{CONFIG}: {flag}={config[flag]!r}: must be true or false"
    if missing:
        return
    eps = config["rms_norm_eps"]
    if not isinstance(eps, float) or not 0 < eps < 1:
        yield f"{CONFIG}: rms_norm_eps={eps!r}: must be a number between 0 and 1"
    ids = config[AUX]
    whole = isinstance(ids, list) and ids and all(type(n) is int and n >= 1 for n in ids)
    if not whole or sorted(set(ids)) != ids:
        yield f"{CONFIG}: {AUX}={ids!r}: must be ascending, unique ids of at least 1"
    yield from rope(config["rope_parameters"])


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


def keys(config: dict[str, Any], draft: DraftConfig) -> Iterator[str]:
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
    stored = config.get("torch_dtype")
    if stored not in [kind.value for kind in STORED]:
        yield f"{CONFIG}: torch_dtype={stored!r}: must be float32 or bfloat16"
    tokens = TokenIds(config.get("bos_token_id"), config.get("eos_token_id"))
    right = config_for(draft, tokens, Precision.float32) | {"torch_dtype": stored}
    for key, value in right.items():
        found = config.get(key, ABSENT)
        if found is ABSENT:
            yield f"{CONFIG}: {key} missing; write {key}={json.dumps(value)}"
        elif found != value or isinstance(found, bool) != isinstance(value, bool):
            yield f"{CONFIG}: {key}={json.dumps(found)}: must be {json.dumps(value)}"
    for key in config.keys() - right.keys():
        quantised = "quantization" in key or "compression" in key
        plain = f"not a key of {architecture_of(draft)}"
        why = "the head would be read as quantised" if quantised else plain
        yield f"{CONFIG}: {key}: must be absent; {why}"


def tensors(file: Any, draft: DraftConfig, expected: dict[str, TensorSpec]) -> Iterator[str]:
    """Names, shapes and dtypes against the exact set; the embedding alone is optional."""
    if (file.metadata() or {}).get("format") != "pt":
        yield f'{WEIGHTS}: metadata must be {{"format": "pt"}}'
    present: dict[str, str] = {}
    for name in sorted(file.keys()):
        plain = plain_name(name)
        if plain in present:
            yield f"{WEIGHTS}: {name}: there twice, also as {present[plain]}"
        present[plain] = name
    optional = {**expected, EMBEDDING: TensorSpec((draft.vocab_size, draft.hidden_size), "")}
    for name in sorted(expected.keys() - present.keys()):
        yield f"{WEIGHTS}: {name} missing; vLLM would run with uninitialised or wrong values"
    for name in sorted(present.keys() - optional.keys()):
        yield f"{WEIGHTS}: {present[name]}: unknown{reason(name)}"
    for name in sorted(present.keys() & optional.keys()):
        piece = file.get_slice(present[name])
        shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
        spec = optional[name]
        if shape != spec.shape:
            yield f"{WEIGHTS}: {present[name]}: shape {shape}, must be {spec.shape}"
        if spec.dtype and dtype != spec.dtype:
            yield f"{WEIGHTS}: {present[name]}: dtype {dtype}, must be {spec.dtype}"


def reason(name: str) -> str:
    """What an unknown tensor would do, where it is known."""
    if name.endswith(".bias"):
        return "; vLLM drops a bias without a word"
    if name.startswith("input_norm."):
        return "; norm_before_fc is false and vLLM would drop it without a word"
    if name.startswith("fc_norm."):
        return "; fc_norm is false, or there are fewer aux layers"
    if name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
        return "; architectures names a draft class that norms neither query nor key"
    if name.startswith("model."):
        return "; names carry no model. prefix"
    if name in ("d2t", "t2d"):
        return "; draft_vocab_size equals vocab_size, so there is no map"
    return f"; the layer's tensors begin with {LAYER} or {LAYER_ALIAS}"


def vocabulary(file: Any, draft: DraftConfig) -> Iterator[str]:
    """d2t must hold offsets that reach ascending, unique verifier ids, those that t2d marks."""
    size, total = draft.draft_vocab_size, draft.vocab_size
    if size >= total or "d2t" not in file.keys():  # noqa: SIM118  a file, not a dict
        return
    d2t = file.get_tensor("d2t")
    if d2t.dtype is not torch.int64 or tuple(d2t.shape) != (size,):
        return  # already a finding
    targets = d2t + torch.arange(size)
    member = marked(file, total)
    absolute = member is not None and torch.equal(d2t, member.nonzero().flatten())
    hint = "; it seems to hold absolute ids" if absolute else ""
    outside = int(((targets < 0) | (targets >= total)).sum())
    if outside:
        yield (
            f"{WEIGHTS}: d2t: {outside} of {size} ids outside 0..{total - 1}; d2t holds offsets "
            f"(target id - draft id){hint}"
        )
        return
    if bool((targets.diff() <= 0).any()):
        yield f"{WEIGHTS}: d2t: the ids it reaches must ascend without repetition{hint}"
    if member is not None and not torch.equal(member.nonzero().flatten(), targets.unique()):
        yield f"{WEIGHTS}: t2d: marks other tokens than d2t reaches{hint}"


def marked(file: Any, total: int) -> Tensor | None:
    if "t2d" not in file.keys():  # noqa: SIM118
        return None
    t2d = file.get_tensor("t2d")
    return t2d if t2d.dtype is torch.bool and tuple(t2d.shape) == (total,) else None


def numbers(file: Any) -> Iterator[str]:
    for name in sorted(file.keys()):
        tensor = file.get_tensor(name)
        if tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                yield f"{WEIGHTS}: {name}: {bad} of {tensor.numel()} values are not finite"


def against_verifier(file: Any, draft: DraftConfig, folder: Path) -> Iterator[str]:
    """Sizes, layer ids and a stored embedding against the verifier's own files."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give the verifier's folder")
    whole = json.loads(path.read_text(encoding="utf-8"))
    config = whole.get("text_config") or whole
    for field in ("hidden_size", "vocab_size"):
        if config.get(field) != getattr(draft, field):
            yield f"{CONFIG}: {field}={getattr(draft, field)}: the verifier's is {config[field]}"
    layers = config["num_hidden_layers"]
    if draft.aux_layers[-1] > layers:
        yield f"{CONFIG}: {AUX}={draft.aux_layers}: the verifier has {layers} layers"
    if EMBEDDING in file.keys():  # noqa: SIM118
        ours = file.get_tensor(EMBEDDING)
        theirs = read_tensor(folder, tensor_files(folder), f"model.{EMBEDDING}")
        if ours.shape != theirs.shape or not torch.equal(ours, theirs.to(ours.dtype)):
            yield f"{WEIGHTS}: {EMBEDDING}: differs from the verifier's; leave it out"


def holds_embedding(folder: Path) -> bool:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return EMBEDDING in file.keys()  # noqa: SIM118
