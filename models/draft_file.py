"""A draft head on disk, in Eyrie's own layout: draft.json beside draft.safetensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from conf.runtime import write_atomically
from conf.schema import ConfigError
from models.eagle3 import DraftConfig, Eagle3Draft

CONFIG, WEIGHTS = "draft.json", "draft.safetensors"


def save_draft(folder: Path, config: DraftConfig, state: dict[str, Tensor]) -> None:
    """Write weights, then config: a folder with a draft.json is whole."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, config.to_json() + "\n")


def load_draft(folder: Path, device: torch.device, dtype: torch.dtype) -> Eagle3Draft:
    """Read a head for inference. Raises ConfigError when the folder holds none, or a broken one."""
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
    return draft.to(device=device, dtype=dtype).eval().requires_grad_(False)
