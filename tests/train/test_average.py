"""The average of the weights, against its definition, and the exchange with them."""

import pytest
import torch
from torch import nn

from train.average import Average

DECAY = 0.5


def walked(steps: int, dtype: torch.dtype) -> tuple[Average, list[torch.Tensor]]:
    """An average over so many random weights, and all of these from the first on."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 2, generator=generator).to(dtype) for _ in range(steps + 1)]
    weight = nn.Parameter(values[0].clone())
    average = Average([weight], DECAY)
    for value in values[1:]:
        weight.data.copy_(value)
        average.add()
    return average, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_the_definition(dtype: torch.dtype):
    average, values = walked(12, dtype)
    expected = values[0].double()
    for n, value in enumerate(values[1:], start=1):
        decay = min(DECAY, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value.double()
    assert torch.allclose(average.means[0].double(), expected, rtol=0, atol=1e-6)
    constant = values[0].double()
    for value in values[1:]:
        constant = DECAY * constant + (1 - DECAY) * value.double()
    assert not torch.allclose(average.means[0].double(), constant, rtol=0, atol=1e-6)  # control


def test_weights_come_back_bit_for_bit_even_after_an_error():
    average, values = walked(3, torch.bfloat16)
    weight = average.parameters[0]
    with pytest.raises(ZeroDivisionError), average.in_place():
        assert torch.equal(weight, average.means[0].bfloat16())
        assert not torch.equal(weight, values[-1])
        raise ZeroDivisionError
    assert torch.equal(weight, values[-1])


def test_a_loaded_average_goes_on(tmp_path):
    average, values = walked(5, torch.float32)
    torch.save(average.state(), tmp_path / "average.pt")
    other = Average([nn.Parameter(values[-1].clone())], DECAY)
    other.load(torch.load(tmp_path / "average.pt", weights_only=True))
    for one in (average, other):
        one.add()
    assert torch.equal(average.means[0], other.means[0])
    forgetful = Average([nn.Parameter(values[-1].clone())], DECAY)
    forgetful.add()
    assert not torch.equal(average.means[0], forgetful.means[0])  # negative control
