"""Sizes and tables that no draft can have are named, in whichever file they stand."""

import json
from dataclasses import asdict, replace

import pytest

from conf.schema import ConfigError
from models.draft_limits import faults
from models.eagle3 import DraftConfig

THETA = {"rope_theta": 1e4}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 256, **THETA},
}
GOOD = DraftConfig(
    *(48, 96, 4, 1, 32, 128, 40, [2, 4, 5], 1e-5, 512, {"rope_type": "default", **THETA}),
    *(False, False, False, False),
)


def test_a_possible_draft_has_no_fault():
    assert list(faults(GOOD)) == []
    assert list(faults(replace(GOOD, rope=LLAMA3))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": -1}, "hidden_size=-1: must be a whole number in 1.."),
        ({"vocab_size": 10**25}, "vocab_size=1000"),
        ({"max_positions": 10**13}, "max_positions=10000000000000"),
        ({"layers": 0}, "layers=0: must be a whole number in 1..16"),
        ({"layers": 10**6}, "layers=1000000: must be"),
        ({"head_dim": 63}, "head_dim=63: must be even"),
        ({"num_kv_heads": 3}, "num_key_value_heads=3: must divide"),
        ({"draft_vocab_size": 129}, "draft_vocab_size=129: above"),
        ({"aux_layers": [10**30]}, "aux_layers=[1000"),
        ({"aux_layers": [4, 2]}, "ascending"),
        ({"rope": {}}, "rope_theta > 0"),
        ({"rope": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta > 0"),
        ({"rope": {"rope_type": "default", "rope_theta": float("inf")}}, "rope_theta > 0"),
        ({"rope": {"rope_type": "default", "rope_theta": 10**400}}, "rope_theta > 0"),
        ({"rope": {"rope_type": "default", "rope_theta": True}}, "rope_theta > 0"),
        ({"rope": {"rope_type": ["default"], **THETA}}, "must be one of"),
        ({"rope": {"rope_type": "linear", "factor": -4, **THETA}}, "factor=-4: must be a number"),
        ({"rope": {"rope_type": "linear", "factor": "x", **THETA}}, "factor='x': must be"),
        ({"rope": {"rope_type": "yarn", "factor": 2.0, **THETA}}, "lacks original_max_position"),
        ({"rope": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below high_freq_factor"),
        (
            {
                "rope": {
                    **{"rope_type": "longrope", "original_max_position_embeddings": 256, **THETA},
                    **{"short_factor": [1.0], "long_factor": [1.0]},
                }
            },
            "short_factor: must be 16 numbers above 0",
        ),
    ],
)
def test_each_impossible_draft_has_one(changes, words):
    found = list(faults(replace(GOOD, **changes)))
    assert any(words in one for one in found), found


def test_a_draft_file_with_one_is_refused():
    text = json.dumps(asdict(GOOD))
    assert DraftConfig.from_json(text) == GOOD
    with pytest.raises(ConfigError, match=r"draft\.json: head_dim=63: must be even"):
        DraftConfig.from_json(json.dumps(asdict(replace(GOOD, head_dim=63))))
    for broken in ("[" * 100_000, "[]", "{", "5"):
        with pytest.raises(ConfigError, match=r"draft\.json"):
            DraftConfig.from_json(broken)
