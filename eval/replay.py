"""Rounds of any drafter played over text that the verifier wrote, with states from a cache.

No verifier is in memory: its greedy choice is the text itself, and its states at x[0..L] are those
of the capture. On the verifier's own greedy text the counters are the decoding loop's. Rows as in
eval/sides.py; a sample's answer x[a..b-1] begins with x[a] as the first root.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conf.shapes import StaticShape, chain
from data.chains import asking_rows
from data.fp8 import restored
from data.records import CachedSample
from eval.acceptance import Counters, total
from eval.drafters.choose import drafter_for
from eval.generation import Round
from eval.propose import Drafter, propose
from eval.round_plan import RoundPlan
from eval.verify import AcceptRule
from models.drafts import Draft
from models.generate import into_holes
from models.sampling import Sampling, SharedDice
from models.verifier import VerifierStates

PLAN = RoundPlan(AcceptRule.greedy, Sampling())
BATCH_ROWS = 8192  # of a batch of answers, padding included
LARGEST = 32  # answers of a batch


@dataclass(frozen=True)
class Place:
    """Where a draft runs, and in which precision."""

    device: torch.device
    dtype: torch.dtype


@dataclass
class Answer:
    """One answer on its way through its rounds."""

    sample: int
    text: list[int]  # the whole sample
    states: VerifierStates  # [T, ...]; ``last`` is NaN at rows whose next token is no answer's
    root: int  # place of the token emitted last; at first that of the answer's first token
    end: int  # place after its last token
    tokens: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.root >= self.end - 1


def replay(
    draft: Draft, cached: Sequence[CachedSample], n_draft: int, place: Place
) -> list[Counters]:
    """The counters of each sample's answers with chains of ``n_draft`` guesses.

    As ``walk`` counts: with the text known for n_draft - 1 tokens past an answer they are the live
    loop's, the verifier's position limit apart; guesses past the end of the text are misses.
    Raises ConfigError where the draft cannot propose such chains.
    """
    answers = [one for i, sample in enumerate(cached) for one in answers_of(i, sample, place)]
    with torch.no_grad():  # not inference_mode: training goes on with this draft's tensors
        for group in groups_of([one for one in answers if not one.ended]):
            Replay(draft, group, chain(n_draft), place).run()
    counted = [(one.sample, Counters.of(one.rounds, one.tokens, n_draft)) for one in answers]
    none = Counters.of([], 0, n_draft)
    return [
        total([none, *(counters for sample, counters in counted if sample == i)])
        for i in range(len(cached))
    ]


def answers_of(index: int, cached: CachedSample, place: Place) -> Iterator[Answer]:
    """Each answer of a sample. One that begins the text is asked for from its second token on."""
    sample = cached.sample
    states = captured(cached, place)
    edges = torch.cat([torch.zeros(1), sample.loss_mask.float(), torch.zeros(1)]).diff()
    starts, ends = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
    text = sample.input_ids.tolist()
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        root = max(first, 1)
        yield Answer(index, text, states, root, end, max(0, end - root))


def captured(cached: CachedSample, place: Place) -> VerifierStates:
    """What was captured of a sample, a row a token; where no last state was kept, NaN."""
    sample = cached.sample
    starts = torch.tensor([0, len(sample.input_ids)])
    asking = asking_rows(sample.loss_mask, starts)
    last = torch.full((len(asking), cached.last.shape[-1]), torch.nan, dtype=place.dtype)
    last[asking] = restored(cached.last, cached.last_scales, place.dtype)
    aux = restored(cached.aux, cached.aux_scales, place.dtype)
    return VerifierStates(aux.to(place.device), last.to(place.device))


def groups_of(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Batches of answers about equally long."""
    group: list[Answer] = []
    for answer in sorted(answers, key=lambda one: -len(one.text)):
        rows = len(group[0].text) * (len(group) + 1) if group else 0
        if len(group) == LARGEST or rows > BATCH_ROWS:
            yield group
            group = []
        group.append(answer)
    if group:
        yield group


class Replay:
    """A batch of answers and the drafter that plays them."""

    def __init__(self, draft: Draft, answers: list[Answer], shape: StaticShape, place: Place):
        self.live, self.shape, self.device = answers, shape, place.device
        capacity = max(len(one.text) for one in answers) + shape.nodes
        self.drafter: Drafter = drafter_for(draft, len(answers), capacity, place.device)
        self.drafter.refuse(shape)

    def run(self) -> None:
        """Until every answer is at its end, or no position is left to guess from."""
        lengths = [one.root for one in self.live]
        rows = self.rows([0] * len(lengths), lengths)
        roots = self.tokens([[one.root] for one in self.live])
        self.drafter.begin(self.tokens(rows), self.states(rows), roots, lengths)
        while self.live and any(rooms := self.rooms()):
            self.play_round(rooms)

    def rooms(self) -> list[int]:
        """As ``Speculation.rooms``, but for the verifier's limit."""
        last, most = self.drafter.last_position, self.shape.depth
        return [max(0, min(most, last - one.root + 2)) for one in self.live]

    def play_round(self, rooms: list[int]) -> None:
        """Propose, compare with the text, and take up what was right and the token after it."""
        dice = SharedDice(0, len(self.live))  # greedy rounds roll none
        proposed = propose(self.drafter, self.shape, PLAN, dice).ids.tolist()
        before = [one.root for one in self.live]
        for answer, ids, room in zip(self.live, proposed, rooms, strict=True):
            accepted = right(ids[:room], answer.text, answer.root)
            if room:
                round_ = Round(ids[:room], accepted, accepted + (accepted < room))
                answer.rounds.append(round_)
            answer.root += accepted + 1
        counts = [one.root - first for one, first in zip(self.live, before, strict=True)]
        rows = self.rows(before, counts)
        after = [[row + 1 for row in of_one] for of_one in rows]
        self.drafter.feed(self.tokens(after), self.states(rows), counts)
        self.leave()

    def leave(self) -> None:
        going = [row for row, one in enumerate(self.live) if not one.ended]
        if len(going) == len(self.live):
            return
        order = into_holes(going)
        self.live = [self.live[row] for row in order]
        if order:
            self.drafter.keep(order)

    def rows(self, firsts: list[int], counts: list[int]) -> list[list[int]]:
        """``counts`` rows of each text from ``firsts`` on; the last again up to the longest."""
        longest = max(counts)
        return [
            [first + min(row, count - 1) for row in range(longest)]
            for first, count in zip(firsts, counts, strict=True)
        ]

    def tokens(self, places: list[list[int]]) -> Tensor:
        """[B, R] of each text; past its end, where only guesses of an ended answer reach, junk."""
        rows = [
            [one.text[min(place, len(one.text) - 1)] for place in of_one]
            for one, of_one in zip(self.live, places, strict=True)
        ]
        return torch.tensor(rows, device=self.device)

    def states(self, places: list[list[int]]) -> VerifierStates:
        """[B, R, ...] of each text."""
        found = [one.states[of_one] for one, of_one in zip(self.live, places, strict=True)]
        aux = torch.stack([each.aux for each in found])
        return VerifierStates(aux, torch.stack([each.last for each in found]))


def right(guesses: list[int], text: list[int], root: int) -> int:
    """How many of the guesses after x[root] are the text's, up to the first that is not."""
    for n, guess in enumerate(guesses):
        place = root + 1 + n
        if place >= len(text) or text[place] != guess:
            return n
    return len(guesses)
