"""States of a chunk of samples, one decoder layer after the other: each weight is used for all.

The library's own model does everything. Its forward runs with the layers standing aside, first to
learn what it hands to each of them (the embedded tokens, scaled where a family scales them; masks,
sliding ones too; rotary tables), and last to finish from the stream that the real layers left (the
final norm). Between the two each real layer runs over all batches of the chunk. With layers
on disk (models/placement.py) a chunk therefore costs one reading of the weights, and memory holds
one layer, the streams of the chunk and the intermediate results of one batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.placement import in_memory
from models.verifier import Verifier, VerifierStates


@dataclass
class Batch:
    """One batch [B, T] on its way through the layers."""

    input_ids: Tensor  # [B, T]
    stream: Tensor  # [B, T, D] after the layers so far
    given: list[dict[str, Any]]  # by layer: what the model hands it beside the stream
    kept: list[Tensor] = field(default_factory=list)  # the aux streams so far


@torch.no_grad()
def states_by_layer(verifier: Verifier, batches: list[Tensor]) -> list[VerifierStates]:
    """The states of every batch [B, T] of token ids, padded on the right: as Verifier.states."""
    aux_layers = verifier.facts.aux_layers
    running = [enter(verifier, ids.to(verifier.device)) for ids in batches]
    for n, layer in enumerate(verifier.backbone.layers):
        with in_memory(layer):
            for batch in running:
                forward: Any = type(layer).forward  # not the pager's, which would fetch it again
                batch.stream = forward(layer, batch.stream, **batch.given[n])
                if n + 1 in aux_layers:
                    batch.kept.append(batch.stream)
    found = []
    while running:  # a batch's own streams go as soon as they are joined
        batch = running.pop(0)
        last = finish(verifier, batch.input_ids, batch.stream)
        found.append(VerifierStates(torch.cat(batch.kept, -1), last))
    return found


def enter(verifier: Verifier, input_ids: Tensor) -> Batch:
    """What the model makes of token ids before its first layer, and what it hands each layer."""
    batch = Batch(input_ids, torch.empty(0), [])

    def stand_in(stream: Tensor, **given: Any) -> Tensor:
        batch.stream = stream
        batch.given.append(given)
        return stream

    with standing_aside(verifier, stand_in):
        verifier.backbone(input_ids=input_ids, use_cache=False)
    return batch


@torch.no_grad()
def finish(verifier: Verifier, input_ids: Tensor, stream: Tensor) -> Tensor:
    """The state after the final norm, [B, T, D], of ``stream``, the one after the last layer."""

    def stand_in(_stream: Tensor, **_given: Any) -> Tensor:
        return stream

    with standing_aside(verifier, stand_in):
        output = verifier.backbone(input_ids=input_ids, use_cache=False)
    return output.last_hidden_state


@contextmanager
def standing_aside(verifier: Verifier, stand_in: Any) -> Iterator[None]:
    """``stand_in`` in the place of every layer's forward."""
    layers: list[nn.Module] = list(verifier.backbone.layers)
    own = [layer.__dict__.get("forward") for layer in layers]  # a pager's, where there is one
    try:
        for layer in layers:
            layer.forward = stand_in
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
        verifier.forget()  # its hooks saw the stand-ins
