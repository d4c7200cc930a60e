"""A draft head on disk, in Eyrie's own layout: draft.json beside draft.safetensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from conf.runtime import write_atomically
from conf.schema import ConfigError
from models.eagle3 import DraftConfig, Eagle3Draft

CONFIG, WEIGHTS = "draft.json", "draft.safetensors"


def save_draft(folder: Path, config: DraftConfig, state: dict[str, Tensor]) -> None:
    """Write weights, then config: a folder with a draft.json is whole."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, config.to_json() + "\n")


def load_draft(
    folder: Path, device: torch.device, dtype: torch.dtype, embedding: Tensor | None = None
) -> Eagle3Draft:
    """Read a head for inference. Raises ConfigError when the folder holds none, or a broken one.

    ``embedding`` [V, D] is the verifier's own, shared as serving engines share it: the file has
    the frozen copy that training read, rounded to the training precision.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give a best/ folder written by training")
    config = DraftConfig.from_json((folder / CONFIG).read_text())
    draft = Eagle3Draft(config)
    try:
        draft.load_state_dict(load_file(folder / WEIGHTS))
    except (RuntimeError, OSError, SafetensorError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"{folder}/{WEIGHTS}: not the weights of its {CONFIG} ({reason})"
        ) from error
    draft = draft.to(device=device, dtype=dtype).eval()
    if embedding is not None and embedding.shape == draft.embed_tokens.weight.shape:
        draft.embed_tokens.weight = nn.Parameter(embedding)
    return draft.requires_grad_(False)  # another width is for the caller to refuse by name
