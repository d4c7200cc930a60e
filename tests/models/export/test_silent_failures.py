"""The mistakes that vLLM loads without a word, each a finding that names its field.

Twelve are known. Ten show in the folder alone and are here, in every layout; layer ids off by one
and another rotary base need the verifier (tests/launch/test_alignment.py).
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.schema import Precision
from models.export.check import check
from models.export.engines import LAYOUTS
from models.export.layout import CONFIG, WEIGHTS, Layout
from models.export.write import export

AUX = "eagle_aux_hidden_state_layer_ids"
ROPE = ("rope_theta", "rope_parameters", "rope_scaling")
Change = Callable[[dict, dict], object]  # of config and tensors


def without_key(*keys: str) -> Change:
    """Wherever in config.json they stand."""

    def lose(config: dict, _tensors: dict) -> None:
        for holder in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key in keys:
                holder.pop(key, None)

    return lose


def without_tensor(name: str) -> Change:
    return lambda _config, tensors: tensors.pop(name)


def stray_tensor(name: str, size: int) -> Change:
    return lambda _config, tensors: tensors.update({name: torch.ones(size)})


def stray_bias(_config: dict, tensors: dict) -> None:
    weight = next(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[weight.replace(".weight", ".bias")] = torch.ones(len(tensors[weight]))


def absolute_ids(_config: dict, tensors: dict) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]), dtype=tensors["d2t"].dtype)


# The mistake -> what makes it of a right folder, and the field that its finding must name.
MISTAKES: dict[str, tuple[Change, str]] = {
    "no fc": (without_tensor("fc.weight"), "fc.weight"),
    "no final norm": (without_tensor("norm.weight"), "norm.weight"),
    "no vocabulary map": (without_tensor("d2t"), "d2t"),
    "no head": (without_tensor("lm_head.weight"), "lm_head.weight"),
    "absolute ids in the map": (absolute_ids, "d2t"),
    "no layer ids": (without_key(AUX), AUX),
    "residual flag left out": (without_key("norm_before_residual"), "norm_before_residual"),
    "a norm without its flag": (stray_tensor("input_norm.weight", 144), "input_norm.weight"),
    "a bias that nothing expects": (stray_bias, "mlp.down_proj.bias"),
    "no rotary base": (without_key(*ROPE), "rope_parameters"),
}
assert len(MISTAKES) == 10


def is_about(finding: str, field: str) -> bool:
    """Whether the finding names the field before it explains anything, and as a whole word."""
    subject = finding.split(";")[0].split(" ")
    return any(word.strip(":").split("=")[0].endswith(field) for word in subject)


@pytest.fixture(params=LAYOUTS.values(), ids=lambda layout: layout.format.value)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def folder(make_head, facts_of, plain_card, layout: Layout, tmp_path: Path) -> Path:
    """A right one: pruned vocabulary, layer ids and base that are nobody's default."""
    draft = make_head(aux_layers=[1, 3, 6])
    facts = facts_of(draft.config)
    return export(draft, facts, tmp_path / "head", plain_card, Precision.float32, layout)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_folder_alone_shows_it(folder: Path, layout: Layout, mistake: str):
    assert check(folder) == []
    change, field = MISTAKES[mistake]
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for findings in (check(folder), check(folder, None, layout)):
        assert any(is_about(finding, field) for finding in findings), findings


LEFT_OUT = ("norm_output", "fc_norm", "rms_norm_eps", "rope_parameters", "torch_dtype")


@pytest.mark.parametrize("mistake", [name for name in MISTAKES if name != "no rotary base"])
def test_a_folder_that_leaves_keys_out_is_judged_all_the_same(make_head, export_head, mistake):
    """As published heads are: few flags, the older RoPE spelling, no dtype."""
    folder = export_head(make_head(aux_layers=[1, 3, 6]))
    change, field = MISTAKES[mistake]
    config = json.loads((folder / CONFIG).read_text())
    for key in LEFT_OUT:
        del config[key]
    tensors = load_file(folder / WEIGHTS)
    change(config, tensors)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    findings = check(folder)
    assert any(is_about(finding, field) for finding in findings), findings
    assert all(any(key in finding for finding in findings) for key in LEFT_OUT)
