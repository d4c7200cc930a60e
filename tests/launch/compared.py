"""Where vLLM and our own code part ways with one head: tokens, counts, states, first logits."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from learnt import first_guess
from torch import Tensor
from vllm_process import Served

from eval.acceptance import Counters
from models.eagle3 import Eagle3Draft
from models.verifier import Verifier

TOLERANCE = 1e-2  # absolute, float32; neighbouring layers differ by 1 and more
COUNTED_APART = 1  # rounds: a float32 tie may fall to either side
INDICES = ("input_ids", "positions")
FIGURES = ("fc_input", "fc_output", "logits")


@dataclass(frozen=True)
class Case:
    """One head: what our own code makes of it."""

    name: str
    verifier: Verifier
    draft: Eagle3Draft
    prompts: list[list[int]]
    counters: Counters


def partings(case: Case, plain: Served, served: Served, states: dict[str, Tensor]) -> Iterator[str]:
    """Sentences, none where all is equal: ``plain`` is vLLM without the draft."""
    if served.tokens != plain.tokens:
        first = next(
            i
            for i, pair in enumerate(zip(served.tokens, plain.tokens, strict=True))
            if pair[0] != pair[1]
        )
        yield f"tokens of prompt {first}: {served.tokens[first]}, plain {plain.tokens[first]}"
    yield from counted_apart(case.counters, served)
    ours = first_guess(case.verifier, case.draft, case.prompts[0])
    for name in INDICES:
        if not torch.equal(states[name][: len(ours[name])].long(), ours[name]):
            yield f"{name}: {states[name].tolist()}, ours {ours[name].tolist()}"
    for name in FIGURES:
        if ours[name].shape[-1] != states[name].shape[-1]:
            yield f"{name}: {tuple(states[name].shape)}, ours {tuple(ours[name].shape)}"
        elif not (difference := apart(ours[name], states[name])) <= TOLERANCE:
            yield f"{name}: {difference:.3g} apart"


def counted_apart(ours: Counters, served: Served) -> Iterator[str]:
    counted = [(ours.rounds, served.drafts)]
    counted += zip(ours.accepted_by_depth, served.accepted_by_position, strict=True)
    if any(abs(a - b) > COUNTED_APART for a, b in counted):
        yield (
            f"accepted: {served.accepted_by_position} of {served.drafts}, "
            f"ours {ours.accepted_by_depth} of {ours.rounds}"
        )


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; entries of -inf on both sides are equal."""
    rows = theirs[: len(ours)]  # vLLM pads its buffers
    return float(torch.where(ours == rows, 0.0, (ours - rows).abs()).max())
