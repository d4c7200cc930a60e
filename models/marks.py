"""Marks: the names under which a profile shows the parts of a training step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

PREFIX = "eyrie/"
# The parts in the order of their work; an indented one is inside the part above it.
PARTS = {
    "data": "waiting for the loader",
    "transfer": "batches to the device",
    "forward": "forward, of which",
    "keys": "  fuse, keys and values of step 0",
    "attention": "  attention and its projections",
    "mlp": "  MLP",
    "loss": "  draft head, teacher and loss, with their gradients",
    "backward": "backward",
    "optimizer": "optimizer",
}
waiting_for_cuda = False  # a breakdown on CUDA sets it: a part then ends when its kernels have


@contextmanager
def part(name: str) -> Iterator[None]:
    """Marks what runs inside as a part of the step; costs a microsecond when nobody looks."""
    assert name in PARTS, name
    settle()
    with record_function(PREFIX + name):
        yield
        settle()


def settle() -> None:
    if waiting_for_cuda:
        torch.cuda.synchronize()
