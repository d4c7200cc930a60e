"""Rotary positions: the library's own table and rotation, and the gradient of ours."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from conf.schema import ConfigError
from models.rope import STATIC_TYPES, Rope, Rotary

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


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "made_up"])
def test_a_table_that_changes_with_the_length_is_refused(kind):
    with pytest.raises(ConfigError, match=f"rope_type={kind}: not supported") as refused:
        Rotary(Rope(WIDTH, LIMIT, {"rope_type": kind, "rope_theta": 1e4}))
    assert all(known in str(refused.value) for known in STATIC_TYPES)
