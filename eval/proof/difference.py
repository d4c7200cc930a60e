"""Where two decodings of one prompt part, and how near a tie the verifier was there."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.generation import Generation
from models.verifier import Verifier


@dataclass(frozen=True)
class Difference:
    """Where the two loops part for the first time on one prompt."""

    prompt: int  # index of the prompt
    position: int  # index among the emitted tokens
    plain: int | None  # the token there; None: this loop had ended
    speculative: int | None
    gap: float  # between the verifier's two highest logits there: near 0 it is a tie of rounding
    behind: float  # how far the worse of both tokens is from the highest; infinite where one ended


def compare(
    verifier: Verifier,
    prompt_ids: list[int],
    plain: Generation,
    speculative: Generation,
    index: int = 0,
) -> Difference | None:
    """The first difference of two generations for prompt number ``index``, or None."""
    ours, theirs = plain.tokens, speculative.tokens
    if ours == theirs:
        return None
    shared = min(len(ours), len(theirs))
    at = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    logits = logits_after(verifier, [*prompt_ids, *ours[:at]])
    first, second = logits.topk(2).values.tolist()
    both = [*ours[at : at + 1], *theirs[at : at + 1]]
    worse = float(logits[both].min()) if len(both) == 2 else -math.inf
    return Difference(
        prompt=index,
        position=at,
        plain=ours[at] if at < len(ours) else None,
        speculative=theirs[at] if at < len(theirs) else None,
        gap=first - second,
        behind=first - worse,
    )


def logits_after(verifier: Verifier, ids: list[int]) -> Tensor:
    """The verifier's logits [V] after ``ids``, computed without a cache."""
    states = verifier.states(torch.tensor([ids], device=verifier.device))
    return verifier.logits_from(states.last[:, -1]).float()[0]
