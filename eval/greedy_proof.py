"""Whether a draft changes greedy answers: token by token, and how near a tie where it does.

In float32 nothing may differ. In bfloat16 a forward over several tokens rounds otherwise than one
over a single token, so that near ties part; how far two right ways to compute the same logits lie
apart is measured on the very text, with the library's own forward beside cached single steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from conf.runtime import progress
from conf.shapes import Shape
from eval.decode import DecodeSettings, decode
from eval.difference import Difference, compare
from eval.generation import Generation
from models.eagle3 import Eagle3Draft
from models.kv import KVCache
from models.verifier import Verifier


@dataclass(frozen=True)
class Way:
    """A way to decode that must give what plain decoding of single sequences gives."""

    shape: Shape | None  # None: plain
    batch: int

    @property
    def name(self) -> str:
        shape = "plain" if self.shape is None else self.shape.name
        return f"{shape}, batch {self.batch}"


@dataclass(frozen=True)
class Graded:
    """A first difference, and how large a gap rounding alone can turn over there."""

    difference: Difference
    tolerance: float  # 0 in float32

    @property
    def tie(self) -> bool:
        return self.difference.gap <= self.tolerance


@dataclass(frozen=True)
class GreedyCheck:
    way: Way
    checked: int
    graded: list[Graded]

    @property
    def identical(self) -> int:
        return self.checked - len(self.graded)

    @property
    def passed(self) -> bool:
        return all(one.tie for one in self.graded)


@dataclass(frozen=True)
class Exam:
    """What is decoded, by whom."""

    verifier: Verifier
    draft: Eagle3Draft
    prompts: Sequence[list[int]]  # token ids
    settings: DecodeSettings
    refused: int = 0  # prompts that the chat template does not take

    def answers(self, way: Way) -> list[Generation]:
        """Of all prompts, in their order."""
        draft = None if way.shape is None else self.draft
        settings = replace(self.settings, shape=way.shape)
        starts = range(0, len(self.prompts), way.batch)
        dtype = str(self.verifier.dtype).removeprefix("torch.")
        found: list[Generation] = []
        for start in progress(starts, len(starts), f"{dtype}, {way.name}", "batch"):
            group = self.prompts[start : start + way.batch]
            found += decode(self.verifier, draft, group, settings).generations
        return found


def prove_greedy(exam: Exam, ways: Sequence[Way]) -> list[GreedyCheck]:
    """Answer every prompt plainly and alone, then in each way, and grade what differs."""
    plain = exam.answers(Way(None, 1))
    return [GreedyCheck(way, len(plain), grade(exam, plain, exam.answers(way))) for way in ways]


def grade(exam: Exam, plain: list[Generation], others: list[Generation]) -> list[Graded]:
    """The first difference of each prompt, if there is one."""
    found: list[Graded] = []
    pairs = zip(exam.prompts, plain, others, strict=True)
    for index, (prompt, one, other) in enumerate(pairs):
        difference = compare(exam.verifier, prompt, one, other, index)
        if difference is None:
            continue
        exact = exam.verifier.dtype == torch.float32
        text = [*prompt, *one.tokens[: difference.position]]
        found.append(
            Graded(difference, 0.0 if exact else rounding(exam.verifier, text, len(prompt)))
        )
    return found


@torch.inference_mode()
def rounding(verifier: Verifier, text: list[int], prompt: int) -> float:
    """How large a gap of two logits rounding can turn over anywhere in ``text``.

    Logits of the answer are computed by single cached steps, and by one forward of the library
    over the whole text: both are right. Where a logit differs by e between them, each of two
    logits may be off by e in either way, so that a gap of 2 e can close. Neither way is that of
    rounds, so that a wrong round cannot excuse itself.
    """
    ids = torch.tensor([text], device=verifier.device)
    whole = verifier.logits_from(verifier.states(ids).last[:, prompt - 1 :])[0].float()
    config, capacity = verifier.model.config, len(text)
    cache = KVCache(config, 1, capacity, verifier.device, verifier.dtype)
    last = verifier.states(ids[:, :prompt], cache).last[:, -1]
    cache.advance(prompt)
    steps = [verifier.logits_from(last)[0].float()]
    for at in range(prompt, len(text)):
        last = verifier.states(ids[:, at : at + 1], cache).last[:, -1]
        cache.advance(1)
        steps.append(verifier.logits_from(last)[0].float())
    first_two = whole.topk(2).indices  # [T, 2]: whose order is in question
    apart = (whole - torch.stack(steps)).gather(1, first_two)
    return 2 * float(apart.abs().max())
