"""Whether a draft changes greedy answers: token by token, and how near a tie where it does.

In float32 nothing may differ. In bfloat16 a forward over several tokens rounds otherwise than one
over a single token, so that near ties part: then the verifier must have both tokens within what
rounding can close of its highest logit. That is measured on the very texts, from two right ways to
compute the same logits: the library's own forward, and cached single steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.runtime import progress
from conf.shapes import Shape
from eval.decode import DecodeSettings, decode
from eval.generation import Generation
from eval.proof.difference import Difference, compare
from models.drafts import Draft
from models.kv import KVCache
from models.verifier import Verifier

TOGETHER = 16  # answers whose rounding is measured side by side


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
    """A first difference, and how large a gap rounding alone can turn over in that answer."""

    difference: Difference
    tolerance: float  # 0 in float32

    @property
    def tie(self) -> bool:
        """Both tokens could be the verifier's highest; a third one, or an early end, is no tie."""
        return self.difference.behind <= self.tolerance


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
    draft: Draft
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


def prove_greedy(exam: Exam, reference: int, ways: Sequence[Way]) -> list[GreedyCheck]:
    """Answer every prompt plainly, ``reference`` at once, then in each way; grade what differs."""
    plain = exam.answers(Way(None, reference))
    found = [Parted.of(exam, way, plain) for way in ways]
    allowed = [0.0] * len(plain)
    if exam.verifier.dtype != torch.float32 and any(one.differences for one in found):
        allowed = tolerances(exam.verifier, exam.prompts, [one.tokens for one in plain])
    return [one.graded(allowed) for one in found]


@dataclass(frozen=True)
class Parted:
    """Where the answers of one way leave the plain ones."""

    way: Way
    checked: int
    differences: list[Difference]

    @classmethod
    def of(cls, exam: Exam, way: Way, plain: Sequence[Generation]) -> "Parted":
        others = exam.answers(way)
        pairs = zip(exam.prompts, plain, others, strict=True)
        found = [compare(exam.verifier, *pair, index) for index, pair in enumerate(pairs)]
        return cls(way, len(others), [one for one in found if one is not None])

    def graded(self, allowed: Sequence[float]) -> GreedyCheck:
        """``allowed``: the tolerance for each prompt."""
        graded = [Graded(one, allowed[one.prompt]) for one in self.differences]
        return GreedyCheck(self.way, self.checked, graded)


def tolerances(
    verifier: Verifier, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[float]:
    """How large a gap of two logits rounding can turn over in each answer.

    Where a logit differs by e between the two ways, each of two logits may be off by e in either
    direction, so that a gap of 2 e can close. A short answer shows little of that, hence no less
    than the median of all. Neither way is that of rounds: a wrong round cannot excuse itself.
    """
    own: list[float] = []
    starts = range(0, len(prompts), TOGETHER)
    for start in progress(starts, len(starts), "rounding", "batch"):
        end = start + TOGETHER
        own += [2 * off for off in rounding(verifier, prompts[start:end], answers[start:end])]
    return [max(one, median(own)) for one in own]


@torch.inference_mode()
def rounding(
    verifier: Verifier, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[float]:
    """By how much, at most, one of the two highest logits differs anywhere in each answer.

    Between one forward of the library over the whole text, and single steps of a batch.
    """
    device, rows = verifier.device, torch.arange(len(prompts), device=verifier.device)
    lengths, most = [len(ids) for ids in prompts], max(map(len, answers))
    texts = [[*ids, *answer] for ids, answer in zip(prompts, answers, strict=True)]
    room = max(lengths) + most
    padded = torch.tensor([[*ids, *[0] * (room - len(ids))] for ids in texts], device=device)
    pairs = zip(texts, lengths, strict=True)
    values, indices = zip(*(highest(verifier, *pair, most) for pair in pairs), strict=True)
    wanted, first_two = torch.stack(values), torch.stack(indices)  # [B, most, 2]
    cache = KVCache(verifier.model.config, len(texts), room, device, verifier.dtype)
    at = torch.tensor(lengths, device=device)  # of each text: the tokens fed
    last = verifier.states(padded[:, : max(lengths)], cache).last[rows, at - 1]
    cache.advance(at)
    off: list[Tensor] = []
    for step in range(most):
        logits = verifier.logits_from(last).float()
        off.append((logits.gather(1, first_two[:, step]) - wanted[:, step]).abs().amax(1))
        last = verifier.states(padded[rows, at + step][:, None], cache).last[:, -1]
        cache.advance(1)
    apart = torch.stack(off, 1)  # [B, most]
    return [float(apart[row, : len(answer)].max()) for row, answer in enumerate(answers)]


def highest(verifier: Verifier, text: list[int], prompt: int, rows: int) -> tuple[Tensor, Tensor]:
    """The two highest logits at each token of an answer, [rows, 2], and whose; 0 past its end."""
    states = verifier.states(torch.tensor([text], device=verifier.device)).last
    values, indices = verifier.logits_from(states[0, prompt - 1 : -1]).float().topk(2)
    beyond = (0, 0, 0, rows - len(values))
    return F.pad(values, beyond), F.pad(indices, beyond)
