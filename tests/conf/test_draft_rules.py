"""The rules on the decoder layers of a draft: how many, and what they start from."""

from pathlib import Path

import pytest

from conf.compose import load_config
from conf.schema import MOST_LAYERS, ConfigError, LayerInit, RunConfig


def load(*words: str) -> RunConfig:
    return load_config(["stages=[train]", "draft.fit_rows=null", *words])


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["draft=medusa"], r"=4096: .* linear start with draft\.family=medusa; set draft\.family="),
        (
            ["draft.head_init=random"],
            r"=4096: .* with draft\.head_init=random; set draft\.head_init=",
        ),
        (["draft.layer_init=verifier"], r"=4096: .* with draft\.layer_init=verifier; set draft\."),
        (["draft.fit_rows=0"], r"=0: must be at least 1; try draft\.fit_rows=16384, or null"),
    ],
)
def test_a_linear_start_needs_its_place(words: list[str], message: str):
    assert load("draft.fit_rows=4096").draft.fit_rows == 4096
    with pytest.raises(ConfigError, match=rf"draft\.fit_rows{message}"):
        load("draft.fit_rows=4096", *words)
