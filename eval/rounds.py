"""One round of speculative decoding: the draft proposes a chain, the verifier judges it.

A round knows neither transformers nor caches: it is given two sides that yield logits. The models
are such sides (eval/decode.py), and so are the probability tables that prove the rules exact
(eval/toy.py). Leading dimensions [...] are independent sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from conf.schema import ConfigError
from eval.verify import AcceptRule, Verdict, overlap, scatter_to_target, verify
from models.sampling import Sampling, draw, probabilities

Judge = Callable[[AcceptRule, Tensor, Tensor | None, Tensor, torch.Generator], Verdict]
PLAIN_SOFTMAX = Sampling(temperature=1.0)


class DraftSide(Protocol):
    """A draft that has seen the committed text up to and including the root."""

    target_ids: Tensor  # [Vd] the verifier's token of each draft token

    def start(self) -> Tensor:
        """Logits [..., Vd] of the first guess."""
        ...

    def step(self, ids: Tensor) -> Tensor:
        """Logits [..., Vd] after one more guess ``ids`` [...], a target id."""
        ...


class TargetSide(Protocol):
    """A verifier whose root, the token emitted last, has no KV yet."""

    def score(self, ids: Tensor) -> Tensor:
        """Logits [..., N+1, V] after the root and after each of the guesses ``ids`` [..., N]."""
        ...


@dataclass(frozen=True)
class RoundPlan:
    """How proposals are made and judged."""

    rule: AcceptRule
    sampling: Sampling
    measure_overlap: bool = False  # costs both softmaxes; a timed run does without

    def __post_init__(self) -> None:
        """Raises ConfigError for a pair of rule and sampling that would not be exact."""
        if self.rule is AcceptRule.greedy and not self.sampling.greedy:
            raise ConfigError(
                f"rule=greedy: emits argmax tokens and temperature={self.sampling.temperature} "
                "asks for samples; take rule=rejection or temperature=0"
            )

    @property
    def needs_draft_probabilities(self) -> bool:
        return self.rule is AcceptRule.rejection or self.measure_overlap


@dataclass(frozen=True)
class Proposal:
    ids: Tensor  # [..., N] target ids
    logits: Tensor | None  # [..., N, Vd], where the plan has a use for them


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    overlap: Tensor | None  # [..., N] sum of min(target, draft) at each proposal


def propose(draft: DraftSide, count: int, plan: RoundPlan, generator: torch.Generator) -> Proposal:
    """Let the draft guess ``count`` >= 1 tokens, each on top of its own guesses before.

    ``rejection`` draws from the draft's distribution under the same sampling as the target's; the
    other rules take the draft's argmax.
    """
    logits = [draft.start()]
    ids: list[Tensor] = []
    while True:
        if plan.rule is AcceptRule.rejection:
            chosen = draw(probabilities(logits[-1], plan.sampling), generator)
        else:
            chosen = logits[-1].argmax(-1)
        ids.append(draft.target_ids[chosen])
        if len(ids) == count:
            break
        logits.append(draft.step(ids[-1]))
    kept = torch.stack(logits, -2) if plan.needs_draft_probabilities else None
    return Proposal(torch.stack(ids, -1), kept)


def judge_proposal(
    proposal: Proposal,
    target_logits: Tensor,
    draft_target_ids: Tensor,
    plan: RoundPlan,
    generator: torch.Generator,
    judge: Judge = verify,
) -> Outcome:
    """Turn logits [..., N+1, V] into the distributions that ``plan`` needs, and apply its rule."""
    vocab_size = target_logits.shape[-1]

    def on_target_ids(sampling: Sampling) -> Tensor:
        assert proposal.logits is not None
        spread = probabilities(proposal.logits, sampling)
        return scatter_to_target(spread, draft_target_ids, vocab_size)

    greedy = plan.rule is AcceptRule.greedy
    target = target_logits if greedy else probabilities(target_logits, plan.sampling)
    draft = None if greedy or proposal.logits is None else on_target_ids(plan.sampling)
    verdict = judge(plan.rule, target, draft, proposal.ids, generator)
    if not plan.measure_overlap:
        return Outcome(verdict, None)
    # At temperature 0 both would be one-hot and say no more than the acceptance does.
    shape = PLAIN_SOFTMAX if plan.sampling.greedy else plan.sampling
    both = probabilities(target_logits[..., :-1, :], shape), on_target_ids(shape)
    return Outcome(verdict, overlap(*both))
