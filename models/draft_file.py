"""A draft on disk, in Eyrie's own layout: draft.json beside draft.safetensors."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from conf.runtime import write_atomically
from conf.schema import ConfigError, DraftFamily
from models.drafts import AnyConfig, Draft
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.medusa import MedusaConfig, MedusaDraft
from models.model_folder import read_model, write_model
from models.phrases import PhraseConfig, PhraseTable
from models.small_model import ModelConfig

CONFIG, WEIGHTS = "draft.json", "draft.safetensors"


def save_draft(folder: Path, config: AnyConfig, state: dict[str, Tensor]) -> None:
    """Write weights, then config: a folder with a draft.json is whole."""
    if isinstance(config, ModelConfig):
        write_model(folder, config, state)
        write_atomically(folder / CONFIG, config.to_json() + "\n")
        return
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, config.to_json() + "\n")


def family_of(text: str) -> DraftFamily:
    """What a draft.json describes; files without a family are EAGLE-3's. Raises ConfigError."""
    try:
        named = json.loads(text).get("family", DraftFamily.eagle3.value)
        return DraftFamily(named)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{CONFIG}: not a draft of this version ({error})") from error


def read_config(folder: Path) -> AnyConfig:
    """Of any family. Raises ConfigError when the folder has none, or none of this version."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give a best/ folder written by training")
    text = (folder / CONFIG).read_text()
    match family_of(text):
        case DraftFamily.eagle3:
            return DraftConfig.from_json(text)
        case DraftFamily.ngram:
            return PhraseConfig.from_json(text)
        case DraftFamily.eagle1:
            return Eagle1Config.from_json(text)
        case DraftFamily.medusa:
            return MedusaConfig.from_json(text)
        case DraftFamily.model:
            return ModelConfig.from_json(text)
        case other:
            raise ConfigError(
                f"{folder}: holds a draft of the family {other.value}, which this version cannot "
                "run; give another head"
            )


def build_draft(config: AnyConfig) -> Draft:
    """With weights that are yet to come."""
    match config:
        case DraftConfig():
            return Eagle3Draft(config)
        case PhraseConfig():
            return PhraseTable(config)
        case Eagle1Config():
            return Eagle1Draft(config)
        case MedusaConfig():
            return MedusaDraft(config)
        case ModelConfig():
            raise AssertionError("a model has a folder of its own")


def load_draft(
    folder: Path, device: torch.device, dtype: torch.dtype, embedding: Tensor | None = None
) -> Draft:
    """Read a draft for inference. Raises ConfigError when the folder holds none, or a broken one.

    ``embedding`` [V, D] is the verifier's own, shared as serving engines share it: the file has
    the frozen copy that training read, rounded to the training precision.
    """
    config = read_config(folder)
    if isinstance(config, ModelConfig):
        small = read_model(folder, config, dtype).to(device).eval()
        return small.requires_grad_(False)
    draft = build_draft(config)
    try:
        draft.load_state_dict(load_file(folder / WEIGHTS))
    except (RuntimeError, OSError, SafetensorError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"{folder}/{WEIGHTS}: not the weights of its {CONFIG} ({reason})"
        ) from error
    draft = draft.to(device=device, dtype=dtype).eval()
    own = draft.embed_tokens if isinstance(draft, Eagle3Draft) else None
    if own is not None and embedding is not None and embedding.shape == own.weight.shape:
        own.weight = nn.Parameter(embedding)
    return draft.requires_grad_(False)  # another width is for the caller to refuse by name
