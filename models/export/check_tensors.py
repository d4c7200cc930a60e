"""The tensors of an EAGLE-3 folder against the exact set that its layout asks for."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models.export.layout import (
    EMBEDDING,
    MIDLAYER,
    NUMBERED,
    WEIGHTS,
    HeadConfig,
    Layout,
    TensorSpec,
    respell,
)

OFFSETS = {"I64": torch.int64, "I32": torch.int32}


def tensors(
    file: Any, draft: HeadConfig, layout: Layout, expected: dict[str, TensorSpec]
) -> Iterator[str]:
    """Names, shapes and dtypes against the exact set; the embedding alone may be optional."""
    if (file.metadata() or {}).get("format") != "pt":
        yield f'{WEIGHTS}: metadata must be {{"format": "pt"}}'
    present: dict[str, str] = {}
    for name in sorted(file.keys()):
        plain = respell(name, layout.layer) if layout.both_spellings else name
        if plain in present:
            yield f"{WEIGHTS}: {name}: there twice, also as {present[plain]}"
        present[plain] = name
    optional = {EMBEDDING: TensorSpec((draft.vocab_size, draft.hidden_size), ""), **expected}
    for name in sorted(expected.keys() - present.keys()):
        yield (
            f"{WEIGHTS}: {name} missing; {layout.engine} would run with uninitialised or wrong "
            "values"
        )
    for name in sorted(present.keys() - optional.keys()):
        yield f"{WEIGHTS}: {present[name]}: unknown{reason(name, layout)}"
    for name in sorted(present.keys() & optional.keys()):
        piece = file.get_slice(present[name])
        shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
        spec = optional[name]
        if shape != spec.shape:
            yield f"{WEIGHTS}: {present[name]}: shape {shape}, must be {spec.shape}"
        if spec.dtype and dtype != spec.dtype:
            yield f"{WEIGHTS}: {present[name]}: dtype {dtype}, must be {spec.dtype}"


def reason(name: str, layout: Layout) -> str:
    """What an unknown tensor would do, where it is known."""
    if layout.last_alone and not name.endswith(".bias"):
        return "; vLLM stops there: this head has no norm before or behind its layer, and no rows"
    if name.endswith(".bias"):
        return f"; {layout.engine} has no bias there, and vLLM drops one without a word"
    if name.startswith("input_norm."):
        return "; norm_before_fc is false, and vLLM would drop it without a word"
    if name.startswith("fc_norm."):
        return "; fc_norm is false, or there are fewer aux layers"
    if name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
        return "; model_type names a draft class that norms neither query nor key"
    if re.match(r"layers\.[1-9]\d*\.", name):
        return "; num_hidden_layers names fewer layers, or it is no tensor of a Llama layer"
    if name.startswith("model."):
        return "; names carry no model. prefix"
    if name == "t2d" and not layout.membership:
        return f"; {layout.engine} has no use for it"
    if name in ("d2t", "t2d"):
        return "; draft_vocab_size equals vocab_size, so there is no map"
    spellings = f"{MIDLAYER} or {NUMBERED}" if layout.both_spellings else layout.layer
    return f"; the first layer's tensors begin with {spellings}"


def vocabulary(file: Any, draft: HeadConfig, layout: Layout) -> Iterator[str]:
    """d2t must hold offsets that reach ascending, unique verifier ids, those that t2d marks."""
    size, total = draft.draft_vocab_size, draft.vocab_size
    if size >= total or "d2t" not in file.keys():  # noqa: SIM118  a file, not a dict
        return
    d2t = file.get_tensor("d2t")
    if d2t.dtype is not OFFSETS[layout.offsets] or tuple(d2t.shape) != (size,):
        return  # already a finding
    targets = d2t + torch.arange(size)
    member = marked(file, total)
    absolute = is_absolute(d2t, member)
    hint = "; it seems to hold absolute ids" if absolute else ""
    outside = int(((targets < 0) | (targets >= total)).sum())
    if outside:
        yield (
            f"{WEIGHTS}: d2t: {outside} of {size} ids outside 0..{total - 1}; d2t holds offsets "
            f"(target id - draft id){hint}"
        )
        return
    if absolute and member is None:
        yield f"{WEIGHTS}: d2t: rises at every entry, as absolute ids do; it holds offsets"
    if bool((targets.diff() <= 0).any()):
        yield f"{WEIGHTS}: d2t: the ids it reaches must ascend without repetition{hint}"
    if member is not None and not torch.equal(member.nonzero().flatten(), targets.unique()):
        yield f"{WEIGHTS}: t2d: marks other tokens than d2t reaches{hint}"


def is_absolute(d2t: Tensor, member: Tensor | None) -> bool:
    """Without t2d: offsets of neighbouring ids are equal, absolute ids never are."""
    if member is not None:
        return torch.equal(d2t.long(), member.nonzero().flatten())
    return len(d2t) > 1 and bool((d2t.diff() > 0).all())


def marked(file: Any, total: int) -> Tensor | None:
    if "t2d" not in file.keys():  # noqa: SIM118
        return None
    t2d = file.get_tensor("t2d")
    return t2d if t2d.dtype is torch.bool and tuple(t2d.shape) == (total,) else None


def numbers(file: Any) -> Iterator[str]:
    for name in sorted(file.keys()):
        yield from numbers_of({name: file.get_tensor(name)})


def numbers_of(tensors: dict[str, Tensor]) -> Iterator[str]:
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point():
            bad = int((~torch.isfinite(tensor.float())).sum())
            if bad:
                yield f"{WEIGHTS}: {name}: {bad} of {tensor.numel()} values are not finite"
