"""Reads an EAGLE-1 head back from the folder that an export wrote."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from conf.schema import ConfigError
from models.draft_limits import faults
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.export.check import check
from models.export.dialect import read_config
from models.export.eagle1 import EAGLE1, is_eagle1
from models.export.layout import CONFIG, WEIGHTS, draft_config_of
from models.verifier import VerifierEnds

WHOLE = "give the folder as launch.export wrote it"


def is_eagle1_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and is_eagle1(read_config(folder).top)


def eagle1_config_of(folder: Path) -> Eagle1Config:
    """Sizes and rope. Raises ConfigError naming the key."""
    draft = draft_config_of(read_config(folder).top, EAGLE1)
    assert isinstance(draft, Eagle1Config)
    for fault in faults(draft):
        raise ConfigError(f"{folder / CONFIG}: {fault}; {WHOLE}")
    return draft


def read_eagle1(folder: Path, ends: VerifierEnds) -> Eagle1Draft:
    """The head in ``folder`` for inference, in the precision and on the device of ``ends``, whose
    embedding, head and final norm it takes.

    Raises ConfigError with the first thing that is wrong with the folder.
    """
    for finding in check(folder):
        raise ConfigError(f"{folder}: {finding}")
    config = eagle1_config_of(folder)
    with torch.device("meta"):  # its shapes alone; the weights are the file's and the verifier's
        draft = Eagle1Draft(config)
    draft.load_state_dict(load_file(folder / WEIGHTS), strict=False, assign=True)
    draft.share(ends)
    draft = draft.to(device=ends.embedding.device, dtype=ends.embedding.dtype)
    return draft.eval().requires_grad_(False)
