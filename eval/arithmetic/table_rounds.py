"""Rounds on tables in place of models: what they yield exactly, and drawn through the accept rule.

A row of a table [V, V] is the distribution after one token, so acceptance varies with the context,
as it does in text, and stays simple enough for exact figures. With all rows alike it is the i.i.d.
case. M = min(target, draft) is the chance, token by token, that a guess is drawn and stands: the
chance that k guesses stand after root r is row r of M^k, summed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eval.verify import Verdict, accept_drawn, draw_after
from models.sampling import SharedDice, draw_at

ROOT = 0  # the token that every sequence starts from


@dataclass(frozen=True)
class Tables:
    target: Tensor  # [V, V] fp64, rows sum to 1
    draft: Tensor  # [V, V]

    @classmethod
    def alike(cls, target: list[float], draft: list[float]) -> "Tables":
        """The same two distributions after every token."""
        both = torch.tensor([target, draft], dtype=torch.float64)
        return cls(*(row.expand(len(target), -1) for row in both))

    @property
    def kept(self) -> Tensor:
        """[V, V]: M."""
        return torch.minimum(self.target, self.draft)


@dataclass(frozen=True)
class Exact:
    """Expected figures of some rounds that start from ``ROOT``."""

    tokens: float  # a call
    alpha: float  # accepted / tested
    survival: list[float]  # by depth, over all these rounds


def exact_figures(tables: Tables, n: int, rounds: int) -> Exact:
    """Chains of ``n`` in ``rounds`` rounds one after another.

    The root of the next round is the residual's draw after k < n guesses, or the bonus after n.
    """
    size = len(tables.target)
    powers = [torch.eye(size, dtype=torch.float64)]
    for _ in range(n):
        powers.append(powers[-1] @ tables.kept)
    missed = sum(powers[:n], torch.zeros_like(powers[0]))
    onward = missed @ (tables.target - tables.draft).clamp_min(0) + powers[n] @ tables.target
    root = torch.zeros(size, dtype=torch.float64)
    root[ROOT] = 1
    survival = torch.zeros(n + 1, dtype=torch.float64)
    for _ in range(rounds):
        survival += torch.stack([root @ power.sum(-1) for power in powers]) / rounds
        root = root @ onward
    tested = float(survival[:n].sum())
    accepted = float(survival[1:].sum())
    return Exact(1 + accepted, accepted / tested if n else 0.0, survival[1:].tolist())


@dataclass(frozen=True)
class Drawn:
    """Rounds that were played: [S sequences, rounds]."""

    accepted: Tensor
    first: Tensor  # [S] the first token that each sequence emitted

    @property
    def tokens(self) -> Tensor:
        """[S]: tokens a call of each sequence; the sequences are independent, its rounds not."""
        return (self.accepted + 1).double().mean(-1)

    def alpha(self, n: int) -> float:
        """Accepted / tested, over all rounds of chains of ``n``."""
        return float(self.accepted.sum() / (self.accepted + 1).clamp(max=n).sum())


def play(tables: Tables, n: int, sequences: int, rounds: int, seed: int) -> Drawn:
    """Draw ``n`` guesses from the draft, judge them by ``rejection``, go on from its own token."""
    dice = SharedDice(seed, sequences)
    root = torch.full((sequences,), ROOT)
    accepted: list[Tensor] = []
    first = root
    for number in range(rounds):
        ids = guess(tables, root, n, dice)
        verdict = judge(tables, root, ids, dice)
        if number == 0:
            first = torch.where(verdict.accepted > 0, ids[:, 0], verdict.token)
        accepted.append(verdict.accepted)
        root = verdict.token
    return Drawn(torch.stack(accepted, -1), first)


def guess(tables: Tables, root: Tensor, n: int, dice: SharedDice) -> Tensor:
    """[S] roots -> [S, n] guesses, each drawn after the one before."""
    ids: list[Tensor] = []
    last = root
    for _ in range(n):
        last = draw_at(tables.draft[last], dice.roll())
        ids.append(last)
    return torch.stack(ids, -1)


def judge(tables: Tables, root: Tensor, ids: Tensor, dice: SharedDice) -> Verdict:
    """The rule that models go through, too."""
    target, draft = rows_of(tables, root, ids)
    return accept_drawn(target, draft, ids, dice)


def rows_of(tables: Tables, root: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[S, n+1, V] of the target and [S, n, V] of the draft, along root and guesses."""
    text = torch.cat([root[:, None], ids], -1)
    return tables.target[text], tables.draft[text[:, :-1]]


def first_tokens_without_residual(tables: Tables, sequences: int, seed: int) -> Tensor:
    """[S] tokens of a wrong rule: after a rejection it draws from the target itself."""
    dice = SharedDice(seed, sequences)
    root = torch.full((sequences,), ROOT)
    ids = guess(tables, root, 1, dice)
    target, draft = rows_of(tables, root, ids)
    verdict = judge(tables, root, ids, dice)
    again = draw_after(target, torch.zeros_like(draft), torch.zeros_like(root), dice)
    return torch.where(verdict.accepted > 0, ids[:, 0], again)


def easy_and_hard(size: int, seed: int) -> Tables:
    """Every other token is followed by a distribution that the draft has almost right, the rest by
    one that it has badly wrong: acceptance then depends on where a round stands."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, size, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.1, 2.0], dtype=torch.float64).repeat(size)[:size]
    # The target mostly stays among tokens of its own kind, so that easy stretches last.
    kind = torch.arange(size) % 2
    logits = logits + 2.0 * (kind[:, None] == kind)
    return Tables(logits.softmax(-1), (logits + scale[:, None] * noise).softmax(-1))
