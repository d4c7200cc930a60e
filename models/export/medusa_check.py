"""Judges a Medusa folder: each mistake that vLLM would not notice, named.

A finding is one sentence.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import ConfigError, Precision
from models.export.check_tensors import numbers_of
from models.export.check_verifier import other_tokens, other_weights, sizes_of
from models.export.layout import CONFIG, ORIGIN, WEIGHTS
from models.export.medusa import DTYPES, MAP, ROWS, filler, medusa_config, medusa_config_of
from models.medusa import MedusaConfig

Shapes = dict[str, tuple[int, ...]]


def check_medusa(folder: Path, verifier: Path | None = None) -> list[str]:
    """All findings: of config.json, then of the tensors; none means that vLLM runs what was
    trained. With the verifier's folder, sizes, weights and tokens are compared with it."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        draft, tensors = medusa_config_of(folder), load_file(folder / WEIGHTS)
    except (ConfigError, SafetensorError, OSError, ValueError) as error:
        return [str(error)]
    dtype = next((one for one in Precision if one.value == config.get("torch_dtype")), None)
    findings = [*keys(config, draft, dtype), *names(tensors, expected(draft), dtype)]
    if not findings:
        findings = [*vocabulary(tensors, draft), *numbers_of(tensors)]
    if verifier is not None:
        findings += against(folder, draft, verifier)
    return findings


def keys(config: dict[str, Any], draft: MedusaConfig, dtype: Precision | None) -> Iterator[str]:
    """Every key against what export would write."""
    if dtype is None:
        found = config.get("torch_dtype")
        yield f"{CONFIG}: torch_dtype={found!r}: must be float32 or bfloat16"
    right = medusa_config(draft, dtype or Precision.float32)
    for key in config.keys() | right.keys():
        ours, wanted = config.get(key), right.get(key)
        if key not in right:
            why = "vLLM has no use"
            if "num" in key and ("heads" in key or "layers" in key):
                why = "vLLM takes it for the number of heads or of blocks"
            yield f"{CONFIG}: {key}: must be absent; {why}"
        elif key not in config:
            yield f"{CONFIG}: {key} missing; vLLM would assume its own default"
        elif key != "torch_dtype" and (ours != wanted or type(ours) is not type(wanted)):
            yield f"{CONFIG}: {key}={json.dumps(ours)}: must be {json.dumps(wanted)}"


def expected(draft: MedusaConfig) -> Shapes:
    """Name -> shape of every tensor in model.safetensors: no more, no less."""
    width, total, size = draft.hidden_size, draft.vocab_size, draft.draft_vocab_size
    shapes: Shapes = {}
    for i in range(draft.heads):
        for j in range(draft.layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (width, width)
            shapes[f"blocks.{i}.layers.{j}.bias"] = (width,)
        shapes["lm_head.weight" if draft.shared_rows else f"lm_heads.{i}.weight"] = (total, width)
    if size < total:
        shapes[MAP] = (size,)
    return shapes


def names(tensors: dict[str, Tensor], right: Shapes, dtype: Precision | None) -> Iterator[str]:
    for name in sorted(right.keys() - tensors.keys()):
        yield f"{WEIGHTS}: {name} missing; vLLM would run with uninitialised or wrong values"
    for name in sorted(tensors.keys() - right.keys()):
        yield f"{WEIGHTS}: {name}: unknown; vLLM would drop it without a word"
    for name in sorted(tensors.keys() & right.keys()):
        found = tensors[name]
        if tuple(found.shape) != right[name]:
            yield f"{WEIGHTS}: {name}: shape {tuple(found.shape)}, must be {right[name]}"
        wanted = torch.int64 if name == MAP else DTYPES[dtype] if dtype else found.dtype
        if found.dtype is not wanted:
            yield f"{WEIGHTS}: {name}: dtype {found.dtype}, must be {wanted}"


def vocabulary(tensors: dict[str, Tensor], draft: MedusaConfig) -> Iterator[str]:
    """token_map must hold ascending ids, and what is outside must never be proposed."""
    if MAP not in tensors:
        return
    ids, total = tensors[MAP], draft.vocab_size
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= total:
        yield f"{WEIGHTS}: {MAP}: must hold ascending ids in 0..{total - 1}, none twice"
        return
    outside = torch.ones(total, dtype=torch.bool)
    outside[ids] = False
    for name in [name for name in sorted(tensors) if name.startswith(ROWS)]:
        rows = tensors[name]
        same = torch.isclose(rows[outside].double(), filler(rows[ids]).double(), 1e-2, 1e-6)
        wrong = int((~same.all(-1)).sum())
        if wrong:
            yield (
                f"{WEIGHTS}: {name}: {wrong} rows outside {MAP} are not the mean of "
                "those inside, and vLLM, which reads all rows, would propose such tokens"
            )


def against(folder: Path, draft: MedusaConfig, verifier: Path) -> Iterator[str]:
    theirs = sizes_of(verifier)
    for field in ("hidden_size", "vocab_size"):
        if theirs[field] != getattr(draft, field):
            yield f"{CONFIG}: {field}={getattr(draft, field)}: the verifier's is {theirs[field]}"
    if (folder / ORIGIN).is_file():
        yield from other_weights(folder, verifier)
    yield from other_tokens(folder, verifier)
