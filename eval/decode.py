"""The built-in decoding loop: a batch of sequences, with a draft's guesses or without.

With and without a draft it is the same loop over the same model and cache, and tokens are chosen
the same way, so that times can be compared. Prefill ends with the first token; the draft runs its
prompt rows in it too, but for the last, which pairs with that token and belongs to the first round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conf.schema import ConfigError
from conf.shapes import Shape
from eval.batch import Batch, choose
from eval.drafters.choose import check_pair, drafter_for
from eval.generation import Decoded, Generation, Times
from eval.output import Ends, StopStrings
from eval.propose import Proposal, propose
from eval.round_log import Guesses, RoundLog
from eval.round_plan import RoundPlan
from eval.rounds import Outcome, judge_proposal
from eval.verify import AcceptRule, Verdict
from models.branches import Branches
from models.drafts import Draft
from models.sampling import OwnDice, Sampling
from models.steps import Steps, now
from models.verifier import Verifier


@dataclass(frozen=True)
class DecodeSettings:
    max_new_tokens: int
    eos_ids: Sequence[int]
    shape: Shape | None = None  # of the guesses of a round; None: plain decoding
    stop: StopStrings | None = None
    sampling: Sampling = field(default_factory=Sampling)
    rule: AcceptRule = AcceptRule.greedy
    seed: int = 0  # of the first sequence; the next ones count up
    measure_overlap: bool = False  # also overlap and ranks: slower, so not in timed runs
    steps: Steps | None = None  # of the verifier that decodes; None: eager ones

    def __post_init__(self) -> None:
        """Raises ConfigError for a length out of range or a rule that does not fit the sampling."""
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: must be 1 or more; try 64")
        if self.shape is not None:
            self.plan.check(self.shape)

    @property
    def plan(self) -> RoundPlan:
        return RoundPlan(self.rule, self.sampling, self.measure_overlap)

    @property
    def ends(self) -> Ends:
        return Ends(self.max_new_tokens, frozenset(self.eos_ids), self.stop)


@torch.inference_mode()
def decode(
    verifier: Verifier,
    draft: Draft | None,
    prompts: Sequence[list[int]],
    settings: DecodeSettings,
    seeds: Sequence[int] | None = None,
    tail: int = 0,
) -> Decoded:
    """Answer ``prompts`` (token ids) side by side; finished sequences leave the batch.

    What a sequence gets does not depend on the others. With a draft, ``settings.shape`` of guesses
    a round: the same tokens, or the same distribution, as without. Near a position limit fewer
    guesses may stand; where none may, the verifier goes on alone, and those steps are not rounds.
    Without a draft, ``tail`` greedy tokens past each end are recorded besides. Raises ConfigError
    for a prompt that leaves no position, and for a draft that was trained on other states.
    """
    guesses = settings.shape.nodes if draft is not None and settings.shape else 0
    steps = settings.steps or Steps(verifier)
    assert steps.verifier is verifier, "the steps of another verifier"
    batch = Batch(steps, prompts, settings.ends, guesses, tail)
    own = seeds if seeds is not None else range(settings.seed, settings.seed + len(prompts))
    if draft is not None and settings.shape is not None:
        check_pair(verifier, draft)
        return Speculation(batch, draft, settings, own).run()
    dice = OwnDice(own, batch.device)
    batch.prefill(settings.sampling, dice)
    prefilled = batch.seconds
    while (kept := batch.leave()) is None or kept:
        if kept:
            dice.keep(kept)
        batch.step(settings.sampling, dice)
    return decoded(batch, [RoundLog() for _ in prompts], Times(prefilled, 0.0, 0.0, 0.0))


def decoded(batch: Batch, logs: Sequence[RoundLog], times: Times) -> Decoded:
    """``times``: all but that of decoding, which ends with the last emitted token."""
    generations = [
        Generation(output.tokens, log.rounds, output.tail, output.seconds, log.overlap, log.ranks)
        for output, log in zip(batch.outputs, logs, strict=True)
    ]
    ended = max(output.seconds for output in batch.outputs)
    spent = replace(times, decode=max(0.0, ended - times.prefill))
    return Decoded(generations, spent, batch.steps)


class Speculation:
    """A batch on its way by rounds: the draft guesses, the verifier judges."""

    def __init__(self, batch: Batch, draft: Draft, settings: DecodeSettings, seeds: Sequence[int]):
        assert settings.shape is not None
        self.batch, self.settings = batch, settings
        self.plan, self.shape = settings.plan, settings.shape
        self.target = batch.target
        # A dynamic tree runs the draft on more nodes than it keeps, where it is deep and small.
        rows = batch.capacity + max(0, sum(self.shape.fed) - self.shape.nodes)
        self.draft = drafter_for(draft, len(seeds), rows, batch.device)
        self.draft.refuse(self.shape)
        self.last_position = batch.target.verifier.facts.max_positions - 1
        self.logs = [RoundLog() for _ in seeds]
        self.dice = OwnDice(seeds, batch.device)
        # Of steps without guesses, apart: how many numbers a round takes depends on its shape, and
        # a sequence must not notice in which company its last steps are made.
        self.plain_dice = OwnDice([seed + (1 << 32) for seed in seeds], batch.device)
        self.draft_seconds = self.verify_seconds = 0.0

    def run(self) -> Decoded:
        self.prefill()
        prefilled = self.batch.seconds
        while self.batch.live:
            self.advance()
        times = Times(prefilled, 0.0, self.draft_seconds, self.verify_seconds)
        return decoded(self.batch, self.logs, times)

    def prefill(self) -> None:
        """Both models over the prompts; the rows of the first tokens wait for the first round."""
        batch = self.batch
        batch.prefill(self.settings.sampling, self.dice)
        if any(self.rooms()):
            lengths = [len(ids) for ids in batch.prompts]
            self.draft.begin(batch.padded(), self.target.states, self.target.root, lengths)
        self.leave()

    def rooms(self) -> list[int]:
        """How many levels of guesses may stand in each sequence, by the position limits.

        With the root at L the verifier is fed up to L+N, a draft with a row a token up to L-1+N-1.
        """
        roots = [output.length - 1 for output in self.batch.running]
        most = self.shape.depth
        return [
            max(0, min(most, self.last_position - root, self.draft.last_position - root + 2))
            for root in roots
        ]

    def advance(self) -> None:
        """A round, or a plain step where no sequence has room for a guess."""
        rooms = self.rooms()
        if any(rooms):
            self.play_round(rooms)
        else:
            self.batch.step(self.settings.sampling, self.plain_dice)
        self.leave()

    def play_round(self, rooms: list[int]) -> None:
        """Propose, verify, emit, and leave both caches at the committed text."""
        batch = self.batch
        begin = now(batch.device)
        proposal = propose(self.draft, self.shape, self.plan, self.dice)
        drafted = now(batch.device)
        outcome = self.judge(proposal, rooms)
        emitted = self.read(proposal, outcome, rooms)
        self.verify_seconds += now(batch.device) - drafted
        self.draft_seconds += drafted - begin
        batch.steps += 1
        batch.emit(emitted)
        accepted = [len(tokens) - 1 for tokens in emitted]
        verdict = outcome.verdict
        states = self.target.commit(verdict.path, accepted, self.shape.is_chain)
        self.target.root = verdict.token[:, None]
        tokens = committed(proposal, verdict, max(accepted))
        self.draft.feed(tokens, states, [n + 1 for n in accepted])

    def judge(self, proposal: Proposal, rooms: list[int]) -> Outcome:
        """The verifier over roots and guesses, and what stands of them."""
        logits = self.target.score(proposal, self.branches(proposal))
        short = min(rooms) < self.shape.depth
        counts = torch.tensor(rooms, device=logits.device) if short else None
        outcome = judge_proposal(
            proposal, logits, self.draft.target_ids, self.plan, self.dice, counts
        )
        alone = [row for row, room in enumerate(rooms) if room == 0]
        if alone:  # a plain step for these, in company
            dice = self.plain_dice.only(alone)
            outcome.verdict.token[alone] = choose(logits[alone, 0], self.settings.sampling, dice)
        return outcome

    def branches(self, proposal: Proposal) -> Branches | None:
        """How this round's nodes hang together; None: a chain."""
        if self.shape.is_chain:
            return None
        return Branches.of_parents(proposal.parents, self.shape.depth)

    def read(self, proposal: Proposal, outcome: Outcome, rooms: list[int]) -> list[list[int]]:
        """Note each sequence's round; its new tokens. A chain waits for the device here alone."""
        verdict, nodes = outcome.verdict, proposal.ids.shape[1]
        own = verdict.accepted[:, None], verdict.token[:, None]
        rows = torch.cat([*own, proposal.ids, proposal.parents, verdict.path], -1).tolist()
        emitted: list[list[int]] = []
        for row, i, room, (accepted, token, *rest) in zip(
            range(len(rows)), self.batch.live, rooms, rows, strict=True
        ):
            ids, parents, path = rest[:nodes], rest[nodes : 2 * nodes], rest[2 * nodes :][:accepted]
            emitted.append([*(ids[node - 1] for node in path), token])
            if room:
                self.logs[i].note(Guesses.of(ids, parents), path, room)
                if outcome.overlap is not None and outcome.ranks is not None:
                    measured = outcome.overlap[row].tolist(), outcome.ranks[row].tolist()
                    self.logs[i].note_measured(*measured)
        return emitted

    def leave(self) -> None:
        """Let complete sequences go from all that is kept a sequence."""
        order = self.batch.leave()
        if order:
            self.dice.keep(order)
            self.plain_dice.keep(order)
            self.draft.keep(order)


def committed(proposal: Proposal, verdict: Verdict, longest: int) -> Tensor:
    """[B, longest + 1]: the guesses that stood, then the verifier's token, then junk."""
    nodes = (verdict.path[:, :longest] - 1).clamp(min=0)
    tokens = torch.cat([proposal.ids.gather(1, nodes), verdict.token[:, None]], -1)
    return tokens.scatter(1, verdict.accepted[:, None], verdict.token[:, None])
