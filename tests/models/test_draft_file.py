"""A head on disk: what was written comes back, and files of earlier versions still load."""

import json
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError, DraftSection, VerifierSection
from models.draft_file import CONFIG, load_draft, save_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.verifier import load_facts

CPU = torch.device("cpu")


def write(folder: Path, qk_norm: bool, layers: int = 1) -> Eagle3Draft:
    """A small head in ``folder``, every parameter random."""
    config = DraftConfig(
        *(
            24,
            32,
            4,
            2,
            8,
            40,
            16,
            [1, 2, 3],
            1e-5,
            64,
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        *(False, False, True, False, qk_norm, layers),
    )
    torch.manual_seed(0)
    draft = Eagle3Draft(config)
    for parameter in draft.parameters():
        parameter.data.normal_()
    save_draft(folder, config, draft.state_dict())
    return draft


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_the_configuration_is_the_heads(flag: str, tiny_verifier: Path, tmp_path: Path):
    facts = load_facts(VerifierSection(path=str(tiny_verifier)), tmp_path)
    config = DraftConfig.of(DraftSection(**{flag: True}), facts)
    assert {name: getattr(config, name) for name in FLAGS} == {name: name == flag for name in FLAGS}


def without(folder: Path, *fields: str) -> None:
    """draft.json as it was written before the fields were there."""
    older = json.loads((folder / CONFIG).read_text())
    for field in fields:
        del older[field]
    (folder / CONFIG).write_text(json.dumps(older))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_head_comes_back_bit_for_bit(tmp_path: Path, qk_norm: bool, layers: int):
    draft = write(tmp_path, qk_norm, layers)
    back = load_draft(tmp_path, CPU, torch.float32)
    assert back.config == draft.config
    ours, theirs = draft.state_dict(), back.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    norms = {f"midlayer.self_attn.{name}_norm.weight" for name in "qk"}
    assert norms & ours.keys() == (norms if qk_norm else set())
    assert all(ours[name].shape == (8,) for name in norms & ours.keys())
    assert any(name.startswith("layers.1.") for name in ours) == (layers == 2)


@pytest.mark.parametrize("fields", [("layers",), ("layers", "qk_norm")])
def test_files_of_earlier_versions_load_as_heads_of_one_layer(tmp_path: Path, fields):
    draft = write(tmp_path, qk_norm=False)
    without(tmp_path, *fields)
    assert load_draft(tmp_path, CPU, torch.float32).config == draft.config


def test_norms_without_their_flag_are_refused(tmp_path: Path):
    """Dropping them without a word would be another head."""
    write(tmp_path, qk_norm=True)
    without(tmp_path, "qk_norm")
    with pytest.raises(ConfigError, match=r"not the weights of its draft\.json"):
        load_draft(tmp_path, CPU, torch.float32)


def test_layers_without_their_number_are_refused(tmp_path: Path):
    write(tmp_path, qk_norm=False, layers=2)
    without(tmp_path, "layers")
    with pytest.raises(ConfigError, match=r"not the weights of its draft\.json"):
        load_draft(tmp_path, CPU, torch.float32)


def test_a_flag_of_another_kind_is_refused(tmp_path: Path):
    write(tmp_path, qk_norm=True)
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / CONFIG).write_text(text.replace('"qk_norm": true', '"qk_norm": 1'))
    with pytest.raises(ConfigError, match=r"qk_norm=1: must be of kind bool"):
        load_draft(tmp_path, CPU, torch.float32)
