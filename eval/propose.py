"""What a draft proposes in a round: a chain, a static tree, or EAGLE-2's tree chosen by confidence.

A round knows neither transformers nor caches: it is given two sides that yield logits. The models
are such sides (eval/sides.py, eval/drafters/), and so are the probability tables that prove the
rules exact (eval/proof/toy.py). Leading dimensions [...] are independent sequences. Guess i
(0-based) is node i+1, node 0 is the root, the token emitted last; parents come before their
children, and the children of a node stand in the order of their rank.
"""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from conf.shapes import DynamicShape, Shape, StaticShape
from eval.round_plan import RoundPlan
from models.sampling import Dice, draw_at, likeliest, probabilities
from models.verifier import VerifierStates

SPARE = 32  # sorted beyond the ranks asked for, so that equal logits seldom reach further


class DraftSide(Protocol):
    """A draft that has seen the committed text up to and including the root."""

    target_ids: Tensor  # [Vd] the verifier's token of each draft token

    def start(self) -> Tensor:
        """Logits [..., 1, Vd] of the root's children."""
        ...

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Logits [..., W, Vd] of the children of W nodes of the next level.

        ``ids`` [..., W] are their tokens, target ids; ``parents`` [..., W] says which row of the
        call before (``start`` has one) each of them continues.
        """
        ...


class Drafter(DraftSide, Protocol):
    """A draft of any family on B sequences, as the decoding loop plays it.

    ``begin``, then rounds: ``start``, ``step`` for every level after the first, ``feed``, and
    ``keep`` where sequences have left. ``keep`` may come before ``begin``.
    """

    last_position: int  # with the root at x[L] guesses of depth last_position - L + 2 can be made

    def refuse(self, shape: Shape) -> None:
        """Raise ConfigError for a shape that this draft cannot propose."""
        ...

    def begin(
        self, prompts: Tensor, states: VerifierStates, roots: Tensor, lengths: list[int]
    ) -> None:
        """Forget everything and take up texts: their prompts [B, P], right-padded, of ``lengths``
        1 and up, the verifier's states at them [B, P, ...], and the tokens emitted first [B, 1].

        Of ``states.last`` only a sequence's final row need be known (see eval/replay.py).
        """
        ...

    def feed(self, tokens: Tensor, states: VerifierStates, counts: list[int]) -> None:
        """Forget guesses and note what was committed: row t is x[t+1] in [B, R] with the
        verifier's states at x[t] in [B, R, ...]. Each sequence has its first ``counts`` of them,
        one at least; the last of these tokens is its next root."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        ...


@dataclass(frozen=True)
class Proposal:
    ids: Tensor  # [..., M] target ids
    parents: Tensor  # [..., M] int64: the node that each continues
    shape: Shape
    logits: Tensor | None = None  # [..., P, Vd], where the plan has a use for them
    source: Tensor | None = None  # [M]: the row of ``logits`` that each guess was chosen from


def propose(draft: DraftSide, shape: Shape, plan: RoundPlan, dice: Dice) -> Proposal:
    """Let the draft guess a tree of ``shape``, each token on top of its own guesses before.

    ``rejection`` and ``tree_without_replacement`` draw from the draft's distribution under the same
    sampling as the target's, siblings without replacement; the other rules take the likeliest
    tokens. Where a distribution has fewer tokens than a node has children, those too many repeat
    some token, and the rules give them no chance. How many numbers are rolled depends on shape and
    rule alone. Raises ConfigError for a shape that does not fit the rule.
    """
    plan.check(shape)
    if isinstance(shape, DynamicShape):
        return propose_by_confidence(draft, shape)
    layout = lay_out(shape, draft.target_ids.device)
    logits = [draft.start()]
    found: list[Tensor] = []
    for level in layout.levels:
        chosen = choose(logits[-1], level.width, plan, dice).flatten(-2)  # [..., rows * width]
        found.append(draft.target_ids[pick(chosen, level.picks)])
        if level is not layout.levels[-1]:
            fed = pick(found[-1], level.fed)
            logits.append(draft.step(fed, level.rows.expand(fed.shape)))
    ids = pick(torch.cat(found, -1), layout.order)
    parents = layout.parents.expand(ids.shape)
    if not plan.keeps_logits(shape):
        return Proposal(ids, parents, shape)
    return Proposal(ids, parents, shape, torch.cat(logits, -2), layout.source)


def choose(logits: Tensor, width: int, plan: RoundPlan, dice: Dice) -> Tensor:
    """[..., P, Vd] -> draft ids [..., P, width] of the children of each row, by rank."""
    if not plan.draws:
        return top_ranks(logits, width)
    left = probabilities(logits, plan.sampling)
    uniform = dice.roll(*logits.shape[-2:-1], width)  # [..., P, width]
    drawn: list[Tensor] = []
    for rank in range(width):
        if rank:
            left = left.scatter(-1, drawn[-1][..., None], 0.0)
        drawn.append(draw_at(left, uniform[..., rank]).clamp_max(left.shape[-1] - 1))
    return torch.stack(drawn, -1)


def top_ranks(scores: Tensor, count: int) -> Tensor:
    """[..., n] -> indices [..., count] of the largest, equal ones by index as argmax has it.

    topk alone leaves open which of several equal ones it takes, and bfloat16 has many. The last
    index is repeated where there are fewer than ``count``.
    """
    if count == 1:
        return likeliest(scores)[..., None]
    size = scores.shape[-1]
    kept, seen = min(count, size), min(count + SPARE, size)
    values, ids = scores.topk(seen, -1)
    ids = ids.sort(-1).values
    order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(-1, order)[..., :kept]
    flat = values[..., -1] == values[..., kept - 1]  # equal ones may lie beyond those seen
    if seen < size and bool(flat.any()):
        ids[flat] = first_above(scores[flat], values[flat][:, kept - 1 : kept], kept)
    return torch.cat([ids, ids[..., -1:].expand(*ids.shape[:-1], count - kept)], -1)


def first_above(scores: Tensor, border: Tensor, count: int) -> Tensor:
    """[R, n] -> [R, count]: those above ``border`` [R, 1], then the first that equal it."""
    equal = scores == border
    above = ~(scores <= border)
    missing = count - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= missing))
    ids = chosen.nonzero()[:, 1].unflatten(0, (-1, count))  # ascending
    return ids.gather(-1, scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)


def pick(values: Tensor, index: Tensor | None) -> Tensor:
    """Columns ``index`` of [..., n], or all as they are."""
    return values if index is None else values[..., index]


@dataclass(frozen=True)
class Level:
    """One level of a static tree. A tensor that would change nothing is None."""

    width: int  # most children of a row
    picks: Tensor | None  # [n] which of rows * width candidates are this level's guesses
    fed: Tensor | None  # [W] which of the level's guesses have children
    rows: Tensor  # [W] the row of the call before that each of those was chosen from


@dataclass(frozen=True)
class Layout:
    """A static shape as the index tensors that a round needs, made once."""

    levels: list[Level]
    parents: Tensor  # [M]
    source: Tensor  # [M]
    order: Tensor | None  # [M] from level by level to the shape's own order


@cache
def lay_out(shape: StaticShape, device: torch.device) -> Layout:
    def index(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=device)

    def unless_all(numbers: list[int], size: int) -> Tensor | None:
        return None if numbers == list(range(size)) else index(numbers)

    above, before = [0], 0  # nodes that are rows of the last call, and rows of the calls before it
    levels: list[Level] = []
    by_level: list[int] = []
    source = [0] * shape.nodes
    for depth in range(1, shape.depth + 1):
        guesses = [i for i in range(shape.nodes) if shape.depths[i] == depth]
        row = {i: above.index(shape.parents[i]) for i in guesses}
        width = max(shape.ranks[i] for i in guesses) + 1
        picks = [row[i] * width + shape.ranks[i] for i in guesses]
        fed = [k for k, i in enumerate(guesses) if i + 1 in shape.parents]
        levels.append(
            Level(
                width=width,
                picks=unless_all(picks, len(above) * width),
                fed=unless_all(fed, len(guesses)),
                rows=index([row[guesses[k]] for k in fed]),
            )
        )
        for i in guesses:
            source[i] = before + row[i]
        by_level += guesses
        before += len(above)
        above = [guesses[k] + 1 for k in fed]
    order = unless_all([by_level.index(i) for i in range(shape.nodes)], shape.nodes)
    return Layout(levels, index(list(shape.parents)), index(source), order)


def propose_by_confidence(draft: DraftSide, shape: DynamicShape) -> Proposal:
    """EAGLE-2's tree (2406.16858): the best of a pool by the draft's probability of the path.

    A level's ``top_k`` best nodes get ``top_k`` children each. No child scores above its parent and
    equal scores go to the shallower, so the best ``nodes`` of the pool are connected. The draft's
    probabilities are those at temperature 1 whatever the sampling: they choose and judge nothing.
    """
    width = shape.top_k
    logits = draft.start()  # [..., 1, Vd]
    reached = logits.new_zeros(logits.shape[:-1], dtype=torch.float32)  # log-probability of rows
    numbers = torch.zeros_like(reached, dtype=torch.long)  # of the rows in the pool, root 0
    ids: list[Tensor] = []
    parents: list[Tensor] = []
    scores: list[Tensor] = []
    offset = 1
    for depth in range(1, shape.depth + 1):
        chosen = top_ranks(logits, width)  # [..., F, k]
        gained = logits.float().log_softmax(-1).gather(-1, chosen).clamp_max(0)
        gained[..., logits.shape[-1] :] = -torch.inf  # repeats, where the vocabulary is smaller
        scores.append((reached[..., None] + gained).flatten(-2))  # [..., F*k]
        ids.append(draft.target_ids[chosen].flatten(-2))
        parents.append(numbers.repeat_interleave(width, -1))
        if depth < shape.depth:
            best = top_ranks(scores[-1], width)  # [..., k]
            reached, numbers = scores[-1].gather(-1, best), best + offset
            offset += scores[-1].shape[-1]
            logits = draft.step(ids[-1].gather(-1, best), best // width)
    pool = torch.cat(scores, -1)
    kept = top_ranks(pool, shape.nodes).sort(-1).values  # [..., M]: parents first, then by rank
    above = torch.cat(parents, -1).gather(-1, kept)  # numbers in the pool, from 1; 0 the root
    # A kept node's new number is how many of the kept come before it, itself included.
    renumbered = torch.searchsorted(kept, above - 1, right=True)
    return Proposal(torch.cat(ids, -1).gather(-1, kept), renumbered, shape)
