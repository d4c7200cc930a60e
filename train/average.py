"""An exponential average of the weights that are trained, kept beside them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Average:
    """mean += (1 - decay) * (weight - mean) after every step, in fp32 or wider.

    At step n the decay is at most (1 + n) / (10 + n), or the average of a short run would be of
    its random beginning. Costs a copy of the weights, and one more while they are exchanged.
    """

    def __init__(self, parameters: list[nn.Parameter], decay: float):
        self.parameters = parameters
        self.decay = decay
        self.steps = 0
        self.means = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in parameters
        ]

    @torch.no_grad()
    def add(self) -> None:
        """Take in the weights as they are now."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for mean, parameter in zip(self.means, self.parameters, strict=True):
            mean.lerp_(parameter.to(mean.dtype), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages stand in for the weights, which come back bit for bit."""
        weights = [p.detach().clone() for p in self.parameters]
        self.put(self.means)
        try:
            yield
        finally:
            self.put(weights)

    @torch.no_grad()
    def put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    def state(self) -> dict[str, Any]:
        """For torch.save, and to be read back as weights alone."""
        return {"steps": self.steps, "means": self.means}

    def load(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        for mean, value in zip(self.means, state["means"], strict=True):
            mean.copy_(value)
