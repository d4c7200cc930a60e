"""An EAGLE-3 folder against the files of the verifier that it is for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from conf.runtime import say
from conf.schema import ConfigError
from models.export.layout import CONFIG, EMBEDDING, ORIGIN, WEIGHTS, HeadConfig, Layout
from models.token_strings import first_other, tokens_in
from models.verifier import read_tensor, tensor_files, weights_fingerprint


def against_verifier(
    folder: Path, file: Any, draft: HeadConfig, layout: Layout, verifier: Path
) -> Iterator[str]:
    """Sizes, layer ids, tokens and a stored embedding against the verifier's own files."""
    theirs = sizes_of(verifier)
    for field in ("hidden_size", "vocab_size"):
        if theirs[field] != getattr(draft, field):
            yield f"{CONFIG}: {field}={getattr(draft, field)}: the verifier's is {theirs[field]}"
    layers, aux = theirs["num_hidden_layers"], layout.keys["aux_layers"]
    if draft.aux_layers[-1] > layers:
        yield f"{CONFIG}: {aux}={draft.aux_layers}: the verifier has {layers} layers"
    elif draft.aux_layers[-1] == layers and not layout.last_stream:
        yield f"{CONFIG}: {aux}={draft.aux_layers}: {layout.engine} takes ids below {layers} alone"
    if layout.last_alone and draft.aux_layers != [layers]:
        yield f"{CONFIG}: {aux}={draft.aux_layers}: must be [{layers}], the verifier's last layer"
    if draft.max_positions < theirs.get("max_position_embeddings", 0):
        say(
            f"{layout.keys['max_positions']}={draft.max_positions} is below the verifier's "
            f"{theirs['max_position_embeddings']}: acceptance beyond it is untested"
        )
    if (folder / ORIGIN).is_file():
        yield from other_weights(folder, verifier)
    yield from other_tokens(folder, verifier)
    if EMBEDDING in file.keys():  # noqa: SIM118
        ours = file.get_tensor(EMBEDDING)
        table = read_tensor(verifier, tensor_files(verifier), f"model.{EMBEDDING}")
        if ours.shape != table.shape or not torch.equal(ours, table.to(ours.dtype)):
            remedy = "write a copy of that" if layout.embedding else "leave it out"
            yield f"{WEIGHTS}: {EMBEDDING}: differs from the verifier's; {remedy}"


def sizes_of(verifier: Path) -> dict[str, int]:
    """Whole numbers of the verifier's config.json, or of its text part. Raises ConfigError."""
    path = verifier / CONFIG
    if not path.is_file():
        raise ConfigError(f"{verifier}: holds no {CONFIG}; give the verifier's folder")
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        config = whole.get("text_config") or whole
        found = {key: value for key, value in config.items() if type(value) is int}
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not a model's ({error}); give the verifier's folder") from error
    missing = [
        key for key in ("hidden_size", "vocab_size", "num_hidden_layers") if key not in found
    ]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} missing; give a language model's folder")
    return found


def other_weights(folder: Path, verifier: Path) -> Iterator[str]:
    """Whether the verifier is the one that an export of ours names."""
    ours, theirs = learnt_weights(folder), weights_fingerprint(verifier)
    if ours is not None and ours != theirs:
        yield (
            f"{ORIGIN}: fingerprint={ours}: the verifier's is {theirs}, the head learnt from other "
            "weights; give those, or train a head for these"
        )


def learnt_weights(folder: Path) -> str | None:
    """Fingerprint of the verifier that an export of ours learnt from; None where none is named."""
    path = folder / ORIGIN
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_text(encoding="utf-8"))
        found = named.get("fingerprint")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not as export wrote it ({error}); export again") from error
    return found if isinstance(found, str) else None


def other_tokens(folder: Path, verifier: Path) -> Iterator[str]:
    """The first token that head and verifier spell differently at one id."""
    ours, theirs = tokens_in(folder), tokens_in(verifier)
    if ours is None or theirs is None:
        say(f"{folder if ours is None else verifier}: holds no tokens; they were not compared")
        return
    index = first_other(ours, theirs)
    if index is not None:
        yield (
            f"tokens: id {index} is {ours[index]!r} for the head and {theirs[index]!r} for the "
            "verifier; give the verifier it was trained on"
        )


def holds_embedding(folder: Path) -> bool:
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return EMBEDDING in file.keys()  # noqa: SIM118
