"""Marks: the names under which a profile shows the parts of a training step."""

from contextlib import AbstractContextManager

from torch.profiler import record_function

PREFIX = "eyrie/"
# The parts in the order of their work; an indented one is inside the part above it.
PARTS = {
    "data": "waiting for the loader",
    "transfer": "batch to the device",
    "forward": "forward, of which",
    "keys": "  fuse, keys and values of step 0",
    "attention": "  attention and its projections",
    "mlp": "  MLP",
    "loss": "  draft head, teacher and loss, with their gradients",
    "backward": "backward",
    "optimizer": "optimizer",
}


def part(name: str) -> AbstractContextManager:
    """Marks what runs inside as a part of the step; costs a microsecond when nobody looks."""
    assert name in PARTS, name
    return record_function(PREFIX + name)
