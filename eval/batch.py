"""The sequences of one batch on their way: what each has emitted, and who is still running."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eval.output import Ends, Output
from eval.sides import TargetDecoder
from models.generate import into_holes
from models.sampling import (
    OwnDice,
    Sampling,
    draw_at,
    likeliest,
    probabilities,
    refuse_no_token,
)
from models.steps import Steps, now


class Batch:
    """Prompts, their outputs and the verifier's side; rows of ``target`` belong to ``live``."""

    def __init__(
        self, steps: Steps, prompts: Sequence[list[int]], ends: Ends, guesses: int, tail: int
    ):
        """``guesses``: most that a round feeds beside the root. Raises ConfigError for a prompt
        that leaves no position to answer in."""
        self.device = steps.verifier.device
        self.begin = now(self.device)
        self.prompts = prompts
        positions = steps.verifier.facts.max_positions
        self.outputs = [Output(ids, ends, positions, tail) for ids in prompts]
        self.live = list(range(len(prompts)))  # the outputs of the sequences in the batch
        self.capacity = max(output.capacity for output in self.outputs) + guesses
        self.target = TargetDecoder(steps, len(prompts), self.capacity)
        self.steps = 0  # verifier forwards after prefill, tails apart

    @property
    def running(self) -> list[Output]:
        return [self.outputs[i] for i in self.live]

    @property
    def seconds(self) -> float:
        return now(self.device) - self.begin

    def padded(self) -> Tensor:
        """[B, P] the prompts, filled up on the right."""
        longest = max(len(ids) for ids in self.prompts)
        rows = [[*ids, *[0] * (longest - len(ids))] for ids in self.prompts]
        return torch.tensor(rows, device=self.device)

    def prefill(self, sampling: Sampling, dice: OwnDice) -> None:
        """Feed the prompts and emit the first tokens."""
        logits = self.target.prefill(self.padded(), [len(ids) for ids in self.prompts])
        self.emit_chosen(logits, sampling, dice)

    def step(self, sampling: Sampling, dice: OwnDice) -> None:
        """Feed the last tokens and emit the next ones."""
        self.steps += not all(output.ended for output in self.running)
        self.emit_chosen(self.target.step(), sampling, dice)

    def emit_chosen(self, logits: Tensor, sampling: Sampling, dice: OwnDice) -> None:
        """A token each: drawn while the answer lasts, the likeliest in the tail past its end."""
        token = choose(logits, sampling, dice)
        ended = [output.ended for output in self.running]
        if any(ended) and not sampling.greedy:
            past = torch.tensor(ended, device=self.device)
            token = torch.where(past, likeliest(logits), token)
        self.target.root = token[:, None]
        self.emit([[one] for one in token.tolist()])

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Hand each running sequence its new tokens, and note when an answer ends."""
        seconds = self.seconds
        for output, new in zip(self.running, tokens, strict=True):
            going = not output.ended
            refuse_no_token(new)
            output.emit(new)
            if going and output.ended:
                output.seconds = seconds

    def leave(self) -> list[int] | None:
        """Drop complete sequences. The rows that go on, in their new order; None: all do."""
        going = [row for row, output in enumerate(self.running) if not output.complete]
        if len(going) == len(self.live):
            return None
        order = into_holes(going)
        self.live = [self.live[row] for row in order]
        if order:
            self.target.keep(order)
        return order


def choose(logits: Tensor, sampling: Sampling, dice: OwnDice) -> Tensor:
    """[B, V] -> the next tokens [B]."""
    if sampling.greedy:
        return likeliest(logits)
    return draw_at(probabilities(logits, sampling), dice.roll())
