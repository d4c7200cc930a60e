"""The proof by counting that sampling is exact: tables in place of models, and a chi-square test.

Tables of logits over a few tokens, indexed by the last two tokens, go through the very round that
models go through (eval/rounds.py), 50,000 sequences side by side. Blocks of the first 1, 2 and 3
tokens are compared with their exact probabilities. Rules that are known to be wrong go through the
same test and must fail it.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eval.rounds import Judge, RoundPlan, judge_proposal, propose
from eval.verify import AcceptRule, Verdict, accept_drawn, leading, of_ids, uniform_like, verify
from models.sampling import Sampling, draw, probabilities

VOCAB = 6
DRAFT_TOKENS = (0, 2, 3, 5)  # the draft cannot propose tokens 1 and 4
DRAFT_NOISE = 0.7  # standard deviation of what the draft's logits are off by
OUTSIDE = 0.3  # of the un-renormalised control: its full softmax has this mass off the vocabulary
ROOT = (1, 2)  # the two tokens every sequence starts from
N_DRAFT = 2
BLOCKS = (1, 2, 3)
MIN_EXPECTED = 5.0  # cells with fewer expected draws are pooled
ERROR_RATE = 0.01  # chance that an exact rule fails its whole set of tests


class Control(Enum):
    """Rules that look plausible and change the distribution."""

    no_residual = "no_residual"  # after a miss the draw is from the target itself
    not_renormalised = "not_renormalised"  # ratio with the full softmax, draw from the pruned one
    top1_with_ratio = "top1_with_ratio"  # an argmax proposal judged as if it had been drawn


@dataclass(frozen=True)
class ToyCase:
    rule: AcceptRule
    sampling: Sampling
    control: Control | None = None

    @property
    def plan(self) -> RoundPlan:
        argmax_judged_as_drawn = self.control is Control.top1_with_ratio
        return RoundPlan(self.rule, self.sampling, measure_overlap=argmax_judged_as_drawn)


WARM = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_p=0.9)
CASES = (
    ToyCase(AcceptRule.rejection, WARM),
    ToyCase(AcceptRule.rejection, FILTERED),
    ToyCase(AcceptRule.argmax_draft, WARM),
    ToyCase(AcceptRule.argmax_draft, FILTERED),
    ToyCase(AcceptRule.rejection, WARM, Control.no_residual),
    ToyCase(AcceptRule.rejection, WARM, Control.not_renormalised),
    ToyCase(AcceptRule.argmax_draft, WARM, Control.top1_with_ratio),
)


@dataclass(frozen=True)
class ToyResult:
    case: ToyCase
    smallest_p: float  # over seeds and blocks
    bound: float  # Bonferroni: the error rate over the number of tests

    @property
    def exact(self) -> bool:
        return self.smallest_p >= self.bound

    @property
    def as_expected(self) -> bool:
        return self.exact is (self.case.control is None)


class TableTarget:
    """A verifier made of a table [V, V, V]: the logits after each pair of tokens."""

    def __init__(self, table: Tensor, sequences: int):
        self.table = table
        self.last_two = torch.tensor(ROOT).expand(sequences, 2)  # [S, 2]; the second is the root

    def score(self, ids: Tensor) -> Tensor:
        text = torch.cat([self.last_two, ids], -1)  # [S, N+2]
        return self.table[text[:, :-1], text[:, 1:]]


class TableDraft:
    """A draft made of a table [V, V, Vd]; it follows the target's committed text."""

    def __init__(self, table: Tensor, target: TableTarget):
        self.table = table
        self.target = target
        self.target_ids = torch.tensor(DRAFT_TOKENS)
        self.last_two: Tensor

    def start(self) -> Tensor:
        self.last_two = self.target.last_two
        return self.table[self.last_two[:, 0], self.last_two[:, 1]]

    def step(self, ids: Tensor) -> Tensor:
        self.last_two = torch.stack([self.last_two[:, 1], ids], -1)
        return self.table[self.last_two[:, 0], self.last_two[:, 1]]


def make_tables(seed: int) -> tuple[Tensor, Tensor]:
    """A random target [V, V, V], and a draft [V, V, Vd] that is right about it up to noise."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    noise = torch.randn(VOCAB, VOCAB, len(DRAFT_TOKENS), generator=generator)
    return target, target[..., list(DRAFT_TOKENS)] + DRAFT_NOISE * noise


def sample_blocks(case: ToyCase, seed: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Tokens [S, 3] emitted by rounds, and the target's table [V, V, V]."""
    target_table, draft_table = make_tables(seed)
    target = TableTarget(target_table, sequences)
    draft = TableDraft(draft_table, target)
    generator = torch.Generator().manual_seed(seed)
    length = torch.zeros(sequences, dtype=torch.long)
    text = torch.zeros(sequences, max(BLOCKS) + N_DRAFT + 1, dtype=torch.long)
    every = torch.arange(N_DRAFT + 1)
    while int(length.min()) < max(BLOCKS):
        proposal = propose(draft, N_DRAFT, case.plan, generator)
        logits = target.score(proposal.ids)
        outcome = judge_proposal(
            proposal, logits, draft.target_ids, case.plan, generator, judge_of(case.control)
        )
        accepted, token = outcome.verdict.accepted[:, None], outcome.verdict.token[:, None]
        emitted = torch.cat([proposal.ids, token], -1)  # [S, N+1]
        emitted = torch.where(every == accepted, token, emitted)  # junk after ``accepted``
        unfinished = (length < max(BLOCKS))[:, None]
        slots = (length[:, None] + every).clamp(max=text.shape[1] - 1)
        text = torch.where(unfinished, text.scatter(1, slots, emitted), text)
        before = torch.cat([target.last_two, emitted], -1)
        target.last_two = before.gather(1, torch.cat([accepted + 1, accepted + 2], -1))
        length += accepted[:, 0] + 1
    return text[:, : max(BLOCKS)], target_table


def judge_of(control: Control | None) -> Judge:
    if control is Control.no_residual:
        return judge_without_residual
    if control is Control.not_renormalised:
        return judge_not_renormalised
    if control is Control.top1_with_ratio:
        return judge_top1_with_ratio
    return verify


def judge_without_residual(
    rule: AcceptRule, target: Tensor, draft: Tensor | None, ids: Tensor, generator: torch.Generator
) -> Verdict:
    assert draft is not None
    stands = uniform_like(ids, generator) * of_ids(draft, ids) < of_ids(target, ids)
    accepted = leading(stands)
    row = accepted[..., None, None].expand(*accepted.shape, 1, target.shape[-1])
    return Verdict(accepted, draw(target.gather(-2, row).squeeze(-2), generator))


def judge_not_renormalised(
    rule: AcceptRule, target: Tensor, draft: Tensor | None, ids: Tensor, generator: torch.Generator
) -> Verdict:
    assert draft is not None
    return accept_drawn(target, draft * (1 - OUTSIDE), ids, generator)


def judge_top1_with_ratio(
    rule: AcceptRule, target: Tensor, draft: Tensor | None, ids: Tensor, generator: torch.Generator
) -> Verdict:
    assert draft is not None
    return accept_drawn(target, draft, ids, generator)


def exact_blocks(table: Tensor, sampling: Sampling) -> list[Tensor]:
    """Probabilities of blocks of 1, 2, 3 tokens after ROOT: fp64 [V], [V, V], [V, V, V]."""
    after = probabilities(table, sampling).double()  # [V, V, V]: of c after (a, b)
    one = after[ROOT[0], ROOT[1]]
    two = one[:, None] * after[ROOT[1]]
    three = two[..., None] * after
    return [one, two, three]


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Chance of counts [C] at least so far from ``expected`` [C], both with the same sum.

    Cells with few expected draws are pooled. A draw where none is possible has chance 0.
    """
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < MIN_EXPECTED
    pooled = torch.stack([counts[small].sum(), expected[small].sum()])
    cells = torch.stack([counts[~small], expected[~small]])  # [2, C']
    if float(pooled[1]) > 0:
        cells = torch.cat([cells, pooled[:, None]], 1)
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    half_df = torch.tensor((cells.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_df, statistic / 2))


def block_p_values(case: ToyCase, seed: int, sequences: int) -> list[float]:
    """One chance for each block length."""
    text, table = sample_blocks(case, seed, sequences)
    values = []
    for size, exact in zip(BLOCKS, exact_blocks(table, case.sampling), strict=True):
        code = torch.zeros(sequences, dtype=torch.long)
        for k in range(size):
            code = code * VOCAB + text[:, k]
        counts = torch.bincount(code, minlength=VOCAB**size).double()
        values.append(chi_square_p(counts, exact.flatten() * sequences))
    return values


def run_toy(case: ToyCase, seeds: int = 5, sequences: int = 50_000) -> ToyResult:
    """Test one case over ``seeds`` pairs of tables; an exact rule passes in 99 of 100 runs."""
    values = [p for seed in range(seeds) for p in block_p_values(case, seed, sequences)]
    return ToyResult(case, min(values), ERROR_RATE / len(values))
