"""The rules on the decoder layers of a draft: how many, and what they start from."""

from pathlib import Path

import pytest

from conf.compose import load_config
from conf.schema import MOST_LAYERS, ConfigError, LayerInit, RunConfig


def load(*words: str) -> RunConfig:
    return load_config(["stages=[train]", *words])


@pytest.mark.parametrize("layers", [1, 2, MOST_LAYERS])
def test_some_layers_pass(layers: int):
    assert load(f"draft.layers={layers}").draft.layers == layers


@pytest.mark.parametrize("layers", [0, -1, MOST_LAYERS + 1])
def test_none_and_too_many_are_refused(layers: int):
    with pytest.raises(ConfigError, match=rf"draft\.layers={layers}: must be in 1\.\.16; try"):
        load(f"draft.layers={layers}")


def test_the_verifiers_layer_is_for_the_family_that_has_such_layers():
    assert load("draft.layer_init=verifier").draft.layer_init is LayerInit.verifier
    with pytest.raises(ConfigError, match=r"layer_init=verifier: has no effect with .*=medusa"):
        load("draft.layer_init=verifier", "draft.family=medusa")


def test_two_starts_of_the_layers_exclude_each_other(tmp_path: Path):
    (tmp_path / "draft.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"layer_init=verifier: draft\.init brings the weights"):
        load("draft.layer_init=verifier", f"draft.init={tmp_path}")
