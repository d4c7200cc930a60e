"""Rotary positions: the library's own table and rotation, and the gradient of ours."""

import json

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from conf.schema import ConfigError
from models.rope import STATIC_TYPES, Rope, Rotary, settled, table_for_llama

WIDTH, LIMIT = 16, 4096
PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(WIDTH // 2)],
        "long_factor": [1.0 + i for i in range(WIDTH // 2)],
        "original_max_position_embeddings": 512,
    },
}


def library(parameters: dict, states: Tensor, positions: Tensor) -> Tensor:
    """states [T, H, Dh] at ``positions`` [T], by the verifier's own code."""
    table = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * WIDTH,
            num_attention_heads=4,
            head_dim=WIDTH,
            max_position_embeddings=LIMIT,
            rope_parameters=parameters,
        )
    )
    cos, sin = table(states, positions[None])  # [1, T, Dh]
    query, _ = apply_rotary_pos_emb(states[None], states[None], cos, sin, unsqueeze_dim=2)
    return query[0]


def states_of(rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, WIDTH, dtype=torch.float64, generator=generator).to(dtype)


def test_every_supported_type_is_tested():
    assert set(PARAMETERS) == set(STATIC_TYPES)


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_rotated_as_the_library_rotates_them(parameters, dtype):
    positions = torch.tensor([0, 1, 7, 511, 512, 4095])
    states = states_of(len(positions), dtype)
    found = Rotary(Rope(WIDTH, LIMIT, parameters)).at(positions, dtype).rotate(states)
    wanted = library(parameters, states, positions)
    assert found.dtype == wanted.dtype == dtype
    # In bf16 the library rounds both products and their sum, and we round the sum's operand once.
    bound = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= bound


def test_any_leading_dimensions():
    """[B, T] in decoding, [R] in training."""
    rotary, positions = Rotary(Rope(WIDTH, LIMIT, PARAMETERS["default"])), torch.arange(6)
    states = states_of(6)
    flat = rotary.at(positions, torch.float64).rotate(states)
    folded = rotary.at(positions.view(2, 3), torch.float64).rotate(states.unflatten(0, (2, 3)))
    assert torch.equal(folded.flatten(0, 1), flat)


def test_scores_depend_on_the_distance_alone():
    rotary = Rotary(Rope(WIDTH, LIMIT, PARAMETERS["default"]))
    query, key = states_of(2)[:, None]
    scores = [
        (
            rotary.at(torch.tensor([at + 9]), torch.float64).rotate(query)
            * rotary.at(torch.tensor([at]), torch.float64).rotate(key)
        ).sum(-1)
        for at in (0, 3, 2000)
    ]
    assert torch.allclose(scores[0], scores[1], rtol=0, atol=1e-5)  # the angles are fp32
    assert torch.allclose(scores[0], scores[2], rtol=0, atol=2e-3)
    moved = rotary.at(torch.tensor([8]), torch.float64).rotate(query) * key
    assert float((scores[0] - moved.sum(-1)).abs().max()) > 0.1  # another distance is another score


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
def test_gradcheck(parameters):
    """yarn scales its table, so that the rotation is not orthogonal."""
    rotation = Rotary(Rope(WIDTH, LIMIT, parameters)).at(torch.tensor([0, 3, 900]), torch.float64)
    assert torch.autograd.gradcheck(rotation.rotate, states_of(3).requires_grad_())


def test_gradcheck_of_states_that_lie_apart():
    """Queries are a slice of a wider product, and their gradient a transposed view."""
    rotation = Rotary(Rope(WIDTH, LIMIT, PARAMETERS["default"])).at(torch.arange(2), torch.float64)
    wide = torch.randn(3, 2, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda states: rotation.rotate(states[..., :WIDTH].transpose(0, 1)).transpose(0, 1), wide
    )


def test_rotating_the_wrong_way_back_is_caught():
    """Negative control: gradcheck refuses a backward that turns on in place of back."""

    class Onward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, states, rotation):
            ctx.rotation = rotation
            return rotation.rotate(states)

        @staticmethod
        def backward(ctx, grad):
            return ctx.rotation.rotate(grad), None

    rotation = Rotary(Rope(WIDTH, LIMIT, PARAMETERS["default"])).at(torch.arange(3), torch.float64)
    assert not torch.autograd.gradcheck(
        lambda states: Onward.apply(states, rotation),
        states_of(3).requires_grad_(),
        raise_exception=False,
    )


@pytest.mark.parametrize("kind", ["dynamic", "made_up"])
def test_a_table_that_changes_with_the_length_is_refused(kind):
    with pytest.raises(ConfigError, match=f"rope_type={kind}: not supported") as refused:
        Rotary(Rope(WIDTH, LIMIT, {"rope_type": kind, "rope_theta": 1e4}))
    assert all(known in str(refused.value) for known in STATIC_TYPES)


def cosines(parameters: dict, positions: Tensor, limit: int = LIMIT) -> Tensor:
    return Rotary(Rope(WIDTH, limit, parameters)).at(positions, torch.float64).cos


def test_longrope_is_the_verifiers_far_out():
    """Phi-3's own module at position 10,000, scale included; the short factors are elsewhere."""
    parameters, limit = PARAMETERS["longrope"], 131072
    config = Phi3Config(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=limit,
        original_max_position_embeddings=512,
        rope_parameters=dict(parameters),
        pad_token_id=0,
    )
    positions = torch.tensor([3, 511, 10_000])
    cos, _ = Phi3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float64), positions[None])
    rope = Rope(WIDTH, limit, parameters)
    for known in (parameters, settled(rope)):
        found = cosines(known, positions, limit)[:, 0]
        assert torch.allclose(found, cos[0, :, : WIDTH // 2], rtol=0, atol=1e-6)
    short = {**parameters, "long_factor": parameters["short_factor"]}
    assert not torch.allclose(
        cosines(short, positions, limit), cosines(parameters, positions, limit)
    )


@pytest.mark.parametrize(("limit", "kept"), [(512, "short_factor"), (513, "long_factor")])
def test_settled_longrope_is_one_table_at_every_length(limit: int, kept: str):
    """Whichever list an engine reads by whatever length, and whichever key it scales by."""
    parameters = settled(Rope(WIDTH, limit, PARAMETERS["longrope"]))
    factors = PARAMETERS["longrope"][kept]
    assert parameters["short_factor"] == parameters["long_factor"] == factors
    scale = Rotary(Rope(WIDTH, limit, PARAMETERS["longrope"])).scaling
    assert parameters["attention_factor"] == parameters["short_mscale"] == scale
    assert parameters["long_mscale"] == scale and (scale > 1) == (limit > 512)
    positions = torch.tensor([0, 5, 500])
    assert torch.equal(cosines(parameters, positions), cosines(parameters, positions, limit))
    assert settled(Rope(WIDTH, limit, parameters)) == parameters


def test_a_scale_of_its_own_is_kept():
    """Phi-3.5-MoE names one for each list."""
    own = {**PARAMETERS["longrope"], "short_mscale": 1.25, "long_mscale": 1.5}
    assert settled(Rope(WIDTH, LIMIT, own))["attention_factor"] == 1.5
    assert settled(Rope(WIDTH, 512, own))["attention_factor"] == 1.25


@pytest.mark.parametrize("kind", sorted(set(PARAMETERS) - {"longrope"}))
def test_other_tables_are_settled_already(kind: str):
    assert settled(Rope(WIDTH, LIMIT, PARAMETERS[kind])) == PARAMETERS[kind]


def test_of_several_tables_the_draft_takes_that_of_full_attention():
    near, far = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 1e6))
    assert table_for_llama({"sliding_attention": near, "full_attention": far}) == far
    assert table_for_llama({"main": near, "compress": far}) is None


def test_keys_that_a_llama_layer_has_not_are_left_out():
    table = PARAMETERS["yarn"]
    more = {"partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12], "type": "yarn"}
    assert table_for_llama({**table, **more}) == table
    older = {"type" if key == "rope_type" else key: value for key, value in table.items()}
    assert table_for_llama(older) == table and table_for_llama({"rope_theta": 5.0}) == {
        "rope_type": "default",
        "rope_theta": 5.0,
    }


def test_old_and_new_spelling_are_one_table(tmp_path):
    """rope_theta beside rope_scaling, as files before rope_parameters have it."""
    new = {"rope_parameters": PARAMETERS["yarn"]}
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 8.0}}
    old["rope_scaling"]["original_max_position_embeddings"] = 512
    tables = []
    for spelling in (new, old):
        config = {"model_type": "llama", "max_position_embeddings": LIMIT, **spelling}
        (tmp_path / "config.json").write_text(json.dumps(config))
        tables.append(table_for_llama(AutoConfig.from_pretrained(tmp_path).rope_parameters))
    assert tables[0] == tables[1] == PARAMETERS["yarn"]
