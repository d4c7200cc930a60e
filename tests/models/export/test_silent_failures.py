"""The mistakes that an engine loads without a word, each a finding that names its field.

Twelve are known of vLLM. Ten show in the folder alone and are here; layer ids off by one and
another rotary base need the verifier (tests/launch/test_alignment.py).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.export.check import check

CONFIG, WEIGHTS = "config.json", "model.safetensors"
AUX = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[dict, dict], object]  # of config and tensors


def without(name: str) -> Change:
    def lose(config: dict, tensors: dict) -> None:
        (tensors if name in tensors else config).pop(name)

    return lose


def absolute_ids(_config: dict, tensors: dict) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def no_aux_ids(config: dict, _tensors: dict) -> None:
    del config[AUX], config["eagle_config"][AUX]


def stray(name: str, size: int) -> Change:
    return lambda _config, tensors: tensors.update({name: torch.ones(size)})


def no_rope(config: dict, _tensors: dict) -> None:
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        del config[key]


# The mistake -> what makes it of a right folder, and the field that its finding must name.
MISTAKES = {
    "no fc": (without("fc.weight"), "fc.weight"),
    "no final norm": (without("norm.weight"), "norm.weight"),
    "no vocabulary map": (without("d2t"), "d2t"),
    "no head": (without("lm_head.weight"), "lm_head.weight"),
    "absolute ids in the map": (absolute_ids, "d2t"),
    "no layer ids": (no_aux_ids, AUX),
    "residual flag left out": (without("norm_before_residual"), "norm_before_residual"),
    "a norm without its flag": (stray("input_norm.weight", 144), "input_norm.weight"),
    "a bias that nothing expects": (stray("midlayer.mlp.down_proj.bias", 48), "down_proj.bias"),
    "no rotary base": (no_rope, "rope_parameters"),
}


def names(finding: str, field: str) -> bool:
    """Whether ``field`` is what the finding is about: it comes before any explanation."""
    return field in finding.split(";")[0]


@pytest.fixture
def folder(make_head, export_head) -> Path:
    """A right one: pruned vocabulary, layer ids and base that are nobody's default."""
    return export_head(make_head(aux_layers=[1, 3, 6]))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_folder_alone_shows_it(folder: Path, mistake: str):
    assert check(folder) == []
    change, field = MISTAKES[mistake]
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    findings = check(folder)
    assert any(names(finding, field) for finding in findings), findings
