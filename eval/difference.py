"""Where two decodings of one prompt part, and how near a tie the verifier was there."""

from dataclasses import dataclass

import torch

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
    return Difference(
        prompt=index,
        position=at,
        plain=ours[at] if at < len(ours) else None,
        speculative=theirs[at] if at < len(theirs) else None,
        gap=top_two_gap(verifier, [*prompt_ids, *ours[:at]]),
    )


def top_two_gap(verifier: Verifier, ids: list[int]) -> float:
    """The verifier's highest logit minus its second after ``ids``, computed without a cache."""
    states = verifier.states(torch.tensor([ids], device=verifier.device))
    first, second = verifier.logits_from(states.last[:, -1]).float().topk(2).values[0].tolist()
    return first - second
