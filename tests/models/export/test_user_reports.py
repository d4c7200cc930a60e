"""What users of other tools hit with exported heads, by the number of the report."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conf.schema import Precision
from models.eagle3 import DraftConfig
from models.export.check import check
from models.export.engines import LAYOUTS
from models.export.layout import draft_config_of, value_at
from models.export.write import export

EVERY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.format.value)


@pytest.fixture
def write(make_head, facts_of, plain_card, tmp_path: Path):
    """write(layout, dtype) -> a folder of the same head in that layout."""

    def folder(layout, dtype: Precision = Precision.bfloat16, **card: object) -> Path:
        draft = make_head()
        facts = facts_of(draft.config)
        place = tmp_path / layout.format.value
        return export(draft, facts, place, replace(plain_card, **card), dtype, layout)

    return folder


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@EVERY
def test_both_vocabulary_sizes_are_there(write, layout):
    """B36: one field for two things gave the embedding the draft's size."""
    folder = write(layout)
    draft = draft_config_of(config_in(folder), layout)
    assert (draft.vocab_size, draft.draft_vocab_size) == (128, 40)
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors["lm_head.weight"]) == 40 == len(tensors["d2t"])
    if "embed_tokens.weight" in tensors:
        assert len(tensors["embed_tokens.weight"]) == 128


def paths_of(value: object, within: str = "") -> list[str]:
    """Dotted paths of every key in a config."""
    if not isinstance(value, dict):
        return []
    return [
        path
        for key, inner in value.items()
        for path in [f"{within}{key}", *paths_of(inner, f"{within}{key}.")]
    ]


@EVERY
@pytest.mark.parametrize("key", ["architectures", "attention_bias", "model_type"])
def test_every_engine_has_its_own_convention(write, layout, key):
    """B67: architecture, bias flag or layer type differ; each is exact, at its place."""
    folder = write(layout)
    assert check(folder, layout=layout) == []
    config = config_in(folder)
    path = next(one for one in paths_of(config) if one.split(".")[-1] == key)
    *way, last = path.split(".")
    holder = value_at(config, ".".join(way)) if way else config
    holder[last] = "another"
    (folder / "config.json").write_text(json.dumps(config))
    assert any(key in finding for finding in check(folder, layout=layout))


@EVERY
@pytest.mark.parametrize("dtype", list(Precision))
def test_a_head_has_its_own_precision_and_no_quantisation(write, layout, dtype):
    """B68: a head inherited the verifier's quantisation."""
    folder = write(layout, dtype)
    config = config_in(folder)
    assert value_at(config, layout.setting_keys["dtype"]) == dtype.value
    assert not [path for path in paths_of(config) if "quant" in path or "compress" in path]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    assert any("quantization_config" in one for one in check(folder, layout=layout))


@EVERY
def test_the_card_names_the_weights_and_the_precision_of_the_states(write, layout):
    """B69: acceptance collapses on a rotated or quantised verifier."""
    card = (write(layout, revision="0a1b2c3d", licence="apache-2.0") / "README.md").read_text()
    assert "weights fingerprint 0123abcd" in card
    assert "revision 0a1b2c3d" in card
    assert "states captured in bfloat16, after 2, 4, 5 decoder layers" in card
    assert "license: apache-2.0" in card.split("---")[1]


@EVERY
def test_a_folder_is_self_contained(write, layout, tmp_path: Path, monkeypatch):
    """B70: conversion took another tokenizer, or asked a hub."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([f"t{i}" for i in range(128)]))

    def no_network(*_args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    folder = write(layout, tokens=tokens)
    assert json.loads((folder / "tokens.json").read_text())[7] == "t7"
    assert check(folder, layout=layout) == []
    draft = draft_config_of(config_in(folder), layout)
    assert isinstance(draft, DraftConfig) and draft.aux_layers == [2, 4, 5]
