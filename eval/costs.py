"""What single steps cost: each timed on its own, in turn with the others, in the same run.

Predictions for shapes that were never run are made of these (eval/speed_report.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from conf.choices import StepKind
from conf.runtime import progress
from conf.shapes import MAX_NODES, Shape, chain
from eval.batch import choose as choose_token
from eval.decode import DecodeSettings
from eval.drafters.choose import drafter_for
from eval.propose import Proposal, choose
from eval.sides import TargetDecoder
from eval.speed_report import CostTable, SpeedAtBatch
from eval.timed import Question
from models.drafts import Draft
from models.sampling import OwnDice
from models.steps import Steps, now
from models.verifier import Verifier

VERIFIED = (2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)  # tokens a sequence
LEVELS = (1, 2, 4, 8, 16)  # nodes a sequence
MOST_ROWS = 128  # of a batch in one forward, the shapes in use apart
SECONDS = 10.0  # a batch size, about
FEWEST, MOST = 3, 15  # sweeps
BRANCHING = 2  # children of a node of a level with more than one


def measure_costs(
    steps: Steps,
    draft: Draft,
    groups: Sequence[Sequence[Question]],
    at: SpeedAtBatch,
    settings: DecodeSettings,
    shapes: Sequence[Shape],
) -> CostTable:
    """Time steps at the batch size of ``groups``, in the middle of a median answer.

    The draft's first forward of a round takes as many rows as rounds gave tokens on average. The
    table's ``rest`` is 0: single steps do not tell it.
    """
    verifier, batch = steps.verifier, len(groups[0])
    answer = at.baselines.tokens / at.baselines.prompts
    lengths = [len(one.ids) for group in groups for one in group]
    rows = max(1, round(median(one.tau for one in at.shapes.values())))
    limit = last_start(verifier, draft, shapes)
    context = max(rows + 1, min(round(median(lengths) + answer / 2), limit))
    bench = StepBench(steps, draft, text_of(groups, context), rows, settings)
    room = verifier.facts.max_positions - context
    # A compiled step takes a minute to make for each size: those of the shapes in use have theirs.
    usual = () if steps.kind is StepKind.compiled else VERIFIED
    verified = sizes(usual, [shape.nodes + 1 for shape in shapes], min(MOST_ROWS // batch, room))
    fed = sizes(LEVELS, [width for shape in shapes for width in shape.fed], MOST_ROWS // batch // 2)
    work = {"plain": bench.plain}
    work |= {f"verify {n}": bench.verifying(n) for n in verified}
    work |= {"first": bench.first} | {f"level {n}": bench.feeding(n) for n in fed}
    seconds = time_steps(work, f"costs, batch {batch}")
    share = {name: against(values, seconds["plain"]) for name, values in seconds.items()}
    return CostTable(
        batch=batch,
        context=context,
        plain_step_seconds=median(seconds["plain"]),
        verify={1: 1.0} | {n: share[f"verify {n}"] for n in verified},
        draft_first=share["first"],
        draft_next={n: share[f"level {n}"] for n in fed},
        rest=0.0,
    )


def last_start(verifier: Verifier, draft: Draft, shapes: Sequence[Shape]) -> int:
    """The longest text after which every step still has the positions it takes."""
    most = max(one.nodes for one in shapes) + 1
    last = drafter_for(draft, 1, 1, verifier.device).last_position
    return min(verifier.facts.max_positions, last + 1) - max(most, *LEVELS) - 1


def sizes(usual: Sequence[int], needed: Sequence[int], most: int) -> list[int]:
    """Those in use, and of the usual ones those up to ``most`` (the smallest in any case)."""
    return sorted({*needed, *usual[:1], *(n for n in usual if n <= most)})


def against(values: Sequence[float], plain: Sequence[float]) -> float:
    """The median over the sweeps of a step's time in that sweep's plain steps."""
    return median(one / base for one, base in zip(values, plain, strict=True))


def time_steps(work: dict[str, Callable[[], float]], stage: str) -> dict[str, list[float]]:
    """Name -> seconds in each sweep; every step once before the next sweep. The first warms up."""
    sweep = sum(step() for step in work.values())
    count = min(max(FEWEST, int(SECONDS / sweep)), MOST)
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in progress(range(count), count, stage, "sweep"):
        for name, step in work.items():
            found[name].append(step())
    return found


def text_of(groups: Sequence[Sequence[Question]], length: int) -> list[list[int]]:
    """A text of ``length`` tokens for each sequence of a batch: its prompts', repeated."""
    texts: list[list[int]] = []
    for number in range(len(groups[0])):
        ids = [token for group in groups for token in group[number].ids]
        texts.append((ids * (length // len(ids) + 1))[:length])
    return texts


class StepBench:
    """Both sides with a text in their caches; every step leaves them as they were.

    A step is given as a function that yields its seconds.
    """

    def __init__(
        self,
        steps: Steps,
        draft: Draft,
        texts: list[list[int]],
        rows: int,
        settings: DecodeSettings,
    ):
        """``rows``: of the draft's first forward of a round, made of verifier states."""
        self.device = steps.verifier.device
        self.settings = settings
        batch, length = len(texts), len(texts[0])
        room = length + MAX_NODES + 1
        self.ids = torch.tensor(texts, device=self.device)
        self.target = TargetDecoder(steps, batch, room)
        self.draft = drafter_for(draft, batch, room, self.device)
        self.dice = OwnDice(range(batch), self.device)
        self.rows = rows
        with torch.inference_mode():
            logits = self.target.prefill(self.ids, [length] * batch)
            self.target.root = logits.argmax(-1)[:, None]
        self.states = self.target.states  # of the whole text
        self.rewind()

    def plain(self) -> float:
        """A plain decoding step up to the tokens on the host."""

        def step() -> None:
            token = choose_token(self.target.step(), self.settings.sampling, self.dice)
            token.tolist()

        seconds = self.timed(step)
        self.target.cache.advance(-1)
        return seconds

    def verifying(self, tokens: int) -> Callable[[], float]:
        """The verifier over ``tokens`` a sequence, its root included."""
        guesses = self.filled(tokens - 1)
        proposal = Proposal(guesses, torch.arange(tokens - 1).expand_as(guesses), chain(tokens - 1))

        def step() -> None:
            self.target.score(proposal, None).argmax(-1).tolist()

        return lambda: self.timed(step)

    def first(self) -> float:
        """The draft's first forward of a round and the choice of the root's children."""
        self.rewind()
        return self.timed(lambda: self.choose(self.draft.start(), 1))

    def feeding(self, nodes: int) -> Callable[[], float]:
        """The draft over a level of ``nodes`` a sequence and the choice of their children."""
        ids = self.filled(nodes)
        parents = torch.zeros_like(ids)

        def step() -> float:
            self.rewind()
            with torch.inference_mode():
                self.draft.start()
            children = 1 if nodes == 1 else BRANCHING
            return self.timed(lambda: self.choose(self.draft.step(ids, parents), children))

        return step

    def choose(self, logits: Tensor, children: int) -> None:
        plan = replace(self.settings, shape=None, measure_overlap=False).plan
        choose(logits, children, plan, self.dice)

    def rewind(self) -> None:
        """The draft as it is before a round, with ``rows`` rows to take up."""
        batch, known = len(self.ids), self.ids.shape[1] - self.rows
        text = torch.cat([self.ids, self.target.root], 1)
        with torch.inference_mode():
            before = text[:, :known], self.states[:, :known], text[:, known : known + 1]
            self.draft.begin(*before, [known] * batch)
            self.draft.start()
            self.draft.feed(text[:, known + 1 :], self.states[:, known:], [self.rows] * batch)

    def filled(self, width: int) -> Tensor:
        """[B, width] some of the texts' tokens."""
        length = self.ids.shape[1]
        return self.ids[:, torch.arange(width, device=self.device) % length]

    def timed(self, step: Callable[[], object]) -> float:
        begin = now(self.device)
        with torch.inference_mode():
            step()
        return now(self.device) - begin
