"""The decoding part of the GPU benchmark: a random verifier and head, by kinds of steps."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from bars import Bar
from decoding import (
    AnswerTimes,
    Contest,
    StepTimes,
    answer_lines,
    kinds_on,
    random_decoding,
    step_lines,
    step_times,
)
from problem import Place
from workload import TINY, Shape

DECODE_LAYERS, DECODE_TOKENS = 8, 128  # a quarter of its layers, answers as long as prompts
DECODE_WIDTHS, DECODE_SHAPES = (1, 5, 16), ("4", "3x2x1")


@dataclass(frozen=True)
class Decodings:
    """Steps and answers by kinds of steps: timed in bf16, and their tokens compared in fp32."""

    steps: list[StepTimes]
    answers: list[AnswerTimes]
    exact: list[AnswerTimes]

    @property
    def lines(self) -> list[str]:
        return [
            *step_lines(self.steps),
            *answer_lines(self.answers),
            "In fp32:",
            *answer_lines(self.exact),
        ]

    @property
    def bars(self) -> list[Bar]:
        """bf16 rounds otherwise at other shapes, so its tokens may differ; fp32's may not."""
        same = sum(one.same for one in self.exact)
        return [Bar("fp32 answers with plain eager's tokens", same, len(self.exact))]

    def as_json(self) -> dict[str, Any]:
        return {
            name: [one.as_json() for one in getattr(self, name)]
            for name in ("steps", "answers", "exact")
        }


def decodings(shape: Shape, device: torch.device, compiled: bool) -> Decodings:
    """On a CPU, graphs aside, whatever ``compiled`` says: a compiled step takes it a minute."""
    kinds = kinds_on(device, compiled and device.type == "cuda")
    tiny = device.type != "cuda" or shape == TINY
    length = 12 if tiny else DECODE_TOKENS
    few = replace(
        shape, hidden=min(shape.hidden, 512), mlp=min(shape.mlp, 1024), heads=4, kv_heads=2
    )
    timed = random_decoding(shape, DECODE_LAYERS, Place(device, torch.bfloat16), 1, length)
    contest = Contest(timed.verifier, 1, length, 4 * length)
    steps = step_times(contest, DECODE_WIDTHS, kinds, 3 if tiny else 100)
    answers = timed.times(DECODE_SHAPES, kinds, 1 if tiny else 3)
    exact = random_decoding(few, DECODE_LAYERS, Place(device, torch.float32), 3, length)
    return Decodings(steps, answers, exact.times(DECODE_SHAPES, kinds, 1))
