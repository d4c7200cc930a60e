"""The proof by counting that sampling is exact: tables in place of models, and a chi-square test.

Tables of logits over a few tokens, indexed by the last two tokens of a path, go through the very
proposals and judgements that models go through (eval/propose.py, eval/rounds.py), 50,000 sequences
side by side. Blocks of the first 1, 2 and 3 tokens are compared with their exact probabilities.
Rules that are known to be wrong (eval/proof/wrong_rules.py) take the same test and must fail it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conf.shapes import DynamicShape, parse_shape
from eval.proof.chi_square import chi_square_p
from eval.proof.wrong_rules import Control, Seen, judge_wrongly
from eval.propose import Proposal, lay_out, propose
from eval.round_plan import RoundPlan
from eval.rounds import judge_proposal
from eval.verify import AcceptRule, Verdict, scatter_to_target
from models.sampling import Dice, Sampling, SharedDice, probabilities

VOCAB = 6
PRUNED = (0, 2, 3, 5)  # the draft cannot propose tokens 1 and 4
DRAFT_NOISE = 0.7  # standard deviation of what the draft's logits are off by
ROOT = (1, 2)  # the two tokens every sequence starts from
BLOCKS = (1, 2, 3)
SEEDS = 3  # pairs of tables a case
SEQUENCES = 50_000
ERROR_RATE = 0.01  # chance that exact rules fail somewhere among all their tests

CHAIN, TREE, DYNAMIC = "2", "[[0],[1],[2],[0,0],[0,1],[1,0]]", "dynamic:nodes=5,depth=2,top_k=2"


@dataclass(frozen=True)
class ToyCase:
    rule: AcceptRule
    sampling: Sampling
    shape: str = CHAIN
    pruned: bool = True  # the draft's vocabulary is smaller than the verifier's
    control: Control | None = None

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return PRUNED if self.pruned else tuple(range(VOCAB))

    @property
    def shape_kind(self) -> str:
        return {CHAIN: "chain", TREE: "tree", DYNAMIC: "dynamic"}[self.shape]

    @property
    def vocabulary(self) -> str:
        return "pruned" if self.pruned else "whole"

    @property
    def filters(self) -> str:
        """As T=0.7 p=0.9: temperature, then what is not off of top-k, top-p, min-p."""
        chosen = self.sampling
        words = [f"T={chosen.temperature:g}"]
        words += [f"k={chosen.top_k}"] if chosen.top_k else []
        words += [f"p={chosen.top_p:g}"] if chosen.top_p < 1 else []
        words += [f"m={chosen.min_p:g}"] if chosen.min_p else []
        return " ".join(words)


WARM = Sampling(temperature=1.0)
NUCLEUS = Sampling(temperature=0.7, top_p=0.9)
SAMPLINGS = (
    WARM,
    NUCLEUS,
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.3, min_p=0.2),
)
COLD = Sampling(temperature=0.0, top_p=0.5)  # where the filter changes nothing
SAMPLED = (
    (AcceptRule.argmax_draft, CHAIN),
    (AcceptRule.rejection, CHAIN),
    (AcceptRule.tree_one_hot, TREE),
    (AcceptRule.tree_one_hot, DYNAMIC),
    (AcceptRule.tree_without_replacement, TREE),
)
EXACT = tuple(
    ToyCase(rule, sampling, shape, pruned)
    for pruned in (True, False)
    for rule, shape in SAMPLED
    for sampling in SAMPLINGS
) + tuple(
    ToyCase(AcceptRule.greedy, COLD, shape, pruned)
    for pruned in (True, False)
    for shape in (CHAIN, TREE, DYNAMIC)
)
DISTINCT = AcceptRule.tree_without_replacement
CONTROLS = (
    ToyCase(AcceptRule.rejection, WARM, control=Control.no_residual),
    ToyCase(AcceptRule.rejection, WARM, control=Control.not_renormalised),
    ToyCase(AcceptRule.argmax_draft, WARM, control=Control.top1_with_ratio),
    ToyCase(AcceptRule.argmax_draft, NUCLEUS, control=Control.cold_bonus),
    ToyCase(AcceptRule.tree_one_hot, WARM, TREE, control=Control.top_k_with_ratio),
    ToyCase(AcceptRule.tree_one_hot, WARM, TREE, control=Control.siblings_not_renormalised),
    ToyCase(DISTINCT, WARM, TREE, control=Control.draft_not_renormalised),
    ToyCase(DISTINCT, WARM, TREE, control=Control.no_tree_residual),
    ToyCase(AcceptRule.typical, WARM, control=Control.typical),
    ToyCase(AcceptRule.typical, NUCLEUS, TREE, control=Control.typical),
)
CASES = EXACT + CONTROLS


@dataclass(frozen=True)
class ToyResult:
    case: ToyCase
    smallest_p: float  # over seeds and blocks
    bound: float  # Bonferroni: the error rate over the number of tests of all exact cases

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

    def score(self, proposal: Proposal) -> Tensor:
        """Logits [S, M+1, V]: each node with the token of its parent before it."""
        nodes = torch.cat([self.last_two[:, 1:], proposal.ids], -1)  # [S, M+1]
        above = torch.cat([self.last_two[:, :1], nodes.gather(-1, proposal.parents)], -1)
        return self.table[above, nodes]

    def commit(self, emitted: Tensor, accepted: Tensor) -> None:
        """``emitted`` [S, depth + 1] holds ``accepted`` + 1 [S] tokens, and then anything."""
        text = torch.cat([self.last_two, emitted], -1)
        last = accepted[:, None] + 2
        self.last_two = text.gather(1, torch.cat([last - 1, last], -1))


class TableDraft:
    """A draft made of a table [V, V, Vd]; it follows the target's committed text."""

    def __init__(self, table: Tensor, tokens: tuple[int, ...], target: TableTarget):
        self.table = table
        self.target = target
        self.target_ids = torch.tensor(tokens)
        self.tokens: Tensor  # [S, W] of the rows of the last call
        self.rows: list[Tensor]  # logits of every call of a round

    def start(self) -> Tensor:
        self.tokens = self.target.last_two[:, 1:]
        self.rows = [self.table[self.target.last_two[:, :1], self.tokens]]
        return self.rows[-1]

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        above, self.tokens = self.tokens.gather(-1, parents), ids
        self.rows.append(self.table[above, ids])
        return self.rows[-1]


def make_tables(seed: int, tokens: tuple[int, ...] = PRUNED) -> tuple[Tensor, Tensor]:
    """A random target [V, V, V], and a draft [V, V, Vd] that is right about it up to noise."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    noise = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
    return target, (target + DRAFT_NOISE * noise)[..., list(tokens)]


def sample_blocks(case: ToyCase, seed: int, sequences: int) -> tuple[Tensor, Tensor]:
    """Tokens [S, 3] emitted by rounds, and the target's table [V, V, V]."""
    target_table, draft_table = make_tables(seed, case.draft_tokens)
    target = TableTarget(target_table, sequences)
    draft = TableDraft(draft_table, case.draft_tokens, target)
    dice = SharedDice(seed, sequences)
    plan = RoundPlan(case.rule, case.sampling)
    shape = parse_shape(case.shape, "shape")
    every = torch.arange(shape.depth + 1)
    length = torch.zeros(sequences, dtype=torch.long)
    text = torch.zeros(sequences, max(BLOCKS) + shape.depth + 1, dtype=torch.long)
    while int(length.min()) < max(BLOCKS):
        proposal = propose(draft, shape, plan, dice)
        logits = target.score(proposal)
        if case.control is None:
            verdict = judge_proposal(proposal, logits, draft.target_ids, plan, dice).verdict
        else:
            verdict = judge_control(case, proposal, logits, draft, dice)
        accepted, token = verdict.accepted[:, None], verdict.token[:, None]
        emitted = proposal.ids.gather(-1, (verdict.path - 1).clamp_min(0))  # junk after accepted
        emitted = torch.where(every == accepted, token, torch.cat([emitted, token], -1))
        unfinished = (length < max(BLOCKS))[:, None]
        slots = (length[:, None] + every).clamp(max=text.shape[1] - 1)
        text = torch.where(unfinished, text.scatter(1, slots, emitted), text)
        target.commit(emitted, verdict.accepted)
        length += verdict.accepted + 1
    return text[:, : max(BLOCKS)], target_table


def judge_control(
    case: ToyCase, proposal: Proposal, logits: Tensor, draft: TableDraft, dice: Dice
) -> Verdict:
    """By the case's wrong rule; it sees the draft's distributions whatever the rule."""
    assert case.control is not None and not isinstance(proposal.shape, DynamicShape)
    rows = probabilities(torch.cat(draft.rows, -2), case.sampling)
    source = lay_out(proposal.shape, logits.device).source
    seen = Seen(
        proposal=replace(proposal, source=source),
        target=probabilities(logits, case.sampling),
        draft=scatter_to_target(rows, draft.target_ids, VOCAB),
        warm=probabilities(logits, WARM),
    )
    return judge_wrongly(case.control, seen, dice)


def exact_blocks(table: Tensor, sampling: Sampling) -> list[Tensor]:
    """Probabilities of blocks of 1, 2, 3 tokens after ROOT: fp64 [V], [V, V], [V, V, V]."""
    after = probabilities(table, sampling).double()  # [V, V, V]: of c after (a, b)
    one = after[ROOT[0], ROOT[1]]
    two = one[:, None] * after[ROOT[1]]
    three = two[..., None] * after
    return [one, two, three]


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


def run_toy(case: ToyCase, seeds: int = SEEDS, sequences: int = SEQUENCES) -> ToyResult:
    """Test one case over ``seeds`` pairs of tables; all exact ones pass in 99 of 100 runs."""
    values = [p for seed in range(seeds) for p in block_p_values(case, seed, sequences)]
    return ToyResult(case, min(values), ERROR_RATE / (len(EXACT) * len(values)))
