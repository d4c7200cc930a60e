"""Reads a head back from a folder that an engine serves."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import ConfigError
from models.eagle3 import Eagle3Draft
from models.export.check import check
from models.export.engines import layout_of
from models.export.layout import (
    CONFIG,
    EMBEDDING,
    MIDLAYER,
    WEIGHTS,
    draft_config_of,
    respell,
)


def read_head(folder: Path, embedding: Tensor | None = None) -> Eagle3Draft:
    """The head in ``folder``, in the dtype it is stored in, for inference.

    ``embedding`` [V, D] is the verifier's; a copy in the file is used without it. Raises
    ConfigError with the first finding when the folder does not pass ``check``, and for an embedding
    of another shape.
    """
    findings = check(folder)
    if findings:
        raise ConfigError(f"{folder}: {findings[0]} ({len(findings)} findings)")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    stored = {respell(name, MIDLAYER): t for name, t in load_file(folder / WEIGHTS).items()}
    if embedding is not None:
        stored[EMBEDDING] = embedding
    if EMBEDDING not in stored:
        raise ConfigError(f"{folder}: holds no embedding; give the verifier's")
    draft = Eagle3Draft(draft_config_of(config, layout_of(config)))
    own, given = tuple(draft.embed_tokens.weight.shape), tuple(stored[EMBEDDING].shape)
    if own != given:
        raise ConfigError(
            f"{folder}: the head is for {own[0]} tokens of width {own[1]}, and the verifier has "
            f"{given[0]} of width {given[1]}; give the verifier it was trained on"
        )
    if "d2t" not in stored:  # the whole vocabulary: no offset anywhere
        stored["d2t"] = torch.zeros_like(draft.d2t)
    if "t2d" not in stored:
        ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
        stored["t2d"] = torch.zeros_like(draft.t2d).index_fill(0, ids, True)
    dtype = stored["fc.weight"].dtype
    draft.to(dtype).load_state_dict(stored)
    return draft.eval().requires_grad_(False)
