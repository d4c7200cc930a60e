"""Whether the head changes answers: a server's, token by token, beside those without the head.

Where two part, the server is asked how far apart the two tokens are there: at a near tie rounding
decides, and a verifier that checks five tokens at once rounds otherwise than one that makes one.
"""

import math
from dataclasses import dataclass

from launch.served.client import ServedClient
from launch.served.run import Served, Talked

TIES = {"float32": 1e-2}  # nats between two tokens that rounding can swap
ROUGH_TIE = 0.5  # the same in other precisions; 0.0 to 0.13 are usual in bfloat16
GRADED = 10  # conversations that are asked about


@dataclass(frozen=True)
class Parted:
    id: str
    answer: int  # the first is 1
    token: int  # the first that differs
    gap: float | None  # nats between the two tokens; None: not asked, infinite: far

    def tie(self, dtype: str | None) -> bool:
        return self.gap is not None and self.gap <= TIES.get(dtype or "", ROUGH_TIE)


@dataclass(frozen=True)
class Identity:
    """Conversations with all their answers."""

    checked: int
    parted: list[Parted]

    @property
    def identical(self) -> int:
        return self.checked - len(self.parted)

    def changed(self, dtype: str | None) -> list[Parted]:
        """Those that no rounding explains."""
        return [one for one in self.parted if one.gap is not None and not one.tie(dtype)]


def compare_answers(plain: Served, served: Served, client: ServedClient) -> Identity:
    """``client``: of either server."""
    pairs = list(zip(plain.talks, served.talks, strict=True))
    apart = [pair for pair in pairs if pair[0].ids != pair[1].ids]
    graded = [part(*pair, client) for pair in apart[:GRADED]]
    return Identity(len(pairs), graded + [part(*pair, None) for pair in apart[GRADED:]])


def part(ours: Talked, theirs: Talked, client: ServedClient | None) -> Parted:
    """Where two conversations first differ."""
    pairs = enumerate(zip(ours.ids, theirs.ids, strict=False))
    turn = next((i for i, (a, b) in pairs if a != b), None)
    if turn is None:  # one of them has an answer more
        return Parted(ours.id, min(len(ours.ids), len(theirs.ids)) + 1, 0, math.inf)
    one, other = ours.ids[turn], theirs.ids[turn]
    both = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in both if a != b), None)
    if at is None:  # one of them goes on
        return Parted(ours.id, turn + 1, min(len(one), len(other)), math.inf)
    gap = None
    if client is not None:
        before = [*ours.exchanges[turn].reply.prompt_ids, *one[:at]]
        gap = client.gap(before, one[at], other[at])
    return Parted(ours.id, turn + 1, at, gap)
