"""The built-in decoding loop: plain, and speculative with a chain of draft tokens, one sequence.

The two loops share model, cache and the way a token is chosen, so that their times can be
compared. Prefill ends with the first token; the draft runs its prompt rows in it too, but for the
last, which pairs with that token and belongs to the first round.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from conf.schema import ConfigError
from eval.rounds import RoundPlan, judge_proposal, propose
from eval.sides import DraftDecoder, TargetDecoder, check_pair
from eval.verify import AcceptRule
from models.eagle3 import Eagle3Draft
from models.sampling import Sampling, draw, probabilities
from models.verifier import Verifier


@dataclass(frozen=True)
class DecodeSettings:
    n_draft: int  # guesses a round, 0: plain decoding
    max_new_tokens: int
    eos_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    rule: AcceptRule = AcceptRule.greedy
    seed: int = 0
    measure_overlap: bool = False  # also sum min(target, draft): slower, so not in timed runs

    def __post_init__(self) -> None:
        """Raises ConfigError for a count out of range or a rule that does not fit the sampling."""
        if self.n_draft < 0:
            raise ConfigError(f"n_draft={self.n_draft}: must be 0 or more; 0 is plain decoding")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens}: must be 1 or more; try 64")
        if self.n_draft:
            _ = self.plan

    @property
    def plan(self) -> RoundPlan:
        return RoundPlan(self.rule, self.sampling, self.measure_overlap)


@dataclass(frozen=True)
class Round:
    """One verifier forward over guesses, before any cut at end of sequence or length."""

    proposed: list[int]
    accepted: int  # leading guesses that stood


@dataclass(frozen=True)
class Generation:
    tokens: list[int]  # emitted, the end-of-sequence token included
    rounds: list[Round]  # empty for plain decoding; steps without guesses are not rounds
    tail: list[int]  # greedy tokens after the end, never emitted
    prefill_seconds: float  # both models over the prompt, up to the first token
    decode_seconds: float  # everything after, the tail apart
    draft_seconds: float  # part of decode_seconds: the draft's forwards
    verify_seconds: float  # part of decode_seconds: the verifier's, with judging
    overlap: list[float]  # sum of min(target, draft) at each tested guess, if asked for


@torch.inference_mode()
def decode_plain(
    verifier: Verifier, prompt_ids: list[int], settings: DecodeSettings, tail: int = 0
) -> Generation:
    """One token a verifier forward. ``tail`` greedy tokens past the end are recorded besides."""
    device = verifier.device
    begin = now(device)
    output = Output(verifier, prompt_ids, settings)
    capacity = min(output.capacity + tail, verifier.facts.max_positions)
    target = TargetDecoder(verifier, capacity)
    generator = torch.Generator().manual_seed(settings.seed)
    logits = target.prefill(torch.tensor([prompt_ids], device=device))
    target.root = choose(logits, settings.sampling, generator)
    output.emit(target.root[0].tolist())
    prefilled = now(device)
    while not output.ended:
        target.root = choose(target.step(), settings.sampling, generator)
        output.emit(target.root[0].tolist())
    done = now(device)
    extra: list[int] = []
    for _ in range(min(tail, verifier.facts.max_positions - output.length)):
        target.root = target.step().argmax(-1, keepdim=True)
        extra.append(int(target.root))
    return Generation(output.tokens, [], extra, prefilled - begin, done - prefilled, 0.0, 0.0, [])


@torch.inference_mode()
def decode_speculative(
    verifier: Verifier, draft: Eagle3Draft, prompt_ids: list[int], settings: DecodeSettings
) -> Generation:
    """Rounds of ``settings.n_draft`` guesses; the same tokens, or distribution, as decode_plain.

    Near a position limit a round makes fewer guesses; where none are left to make, the verifier
    goes on alone, and those steps are not rounds. Raises ConfigError for a prompt that leaves no
    position and for a draft that was trained on other states.
    """
    if settings.n_draft == 0:
        return decode_plain(verifier, prompt_ids, settings)
    device = verifier.device
    begin = now(device)
    run = Speculation(verifier, draft, prompt_ids, settings)
    run.prefill(torch.tensor([prompt_ids], device=device))
    prefilled = now(device)
    while not run.output.ended:
        count = run.room()
        if count:
            run.play_round(count)
        else:
            run.play_plain_step()
    done = now(device)
    return Generation(
        tokens=run.output.tokens,
        rounds=run.rounds,
        tail=[],
        prefill_seconds=prefilled - begin,
        decode_seconds=done - prefilled,
        draft_seconds=run.draft_seconds,
        verify_seconds=run.verify_seconds,
        overlap=run.overlap,
    )


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """[1, V] -> the next token [1, 1]."""
    if sampling.greedy:
        return logits.argmax(-1, keepdim=True)
    return draw(probabilities(logits, sampling), generator)[:, None]


def now(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


class Output:
    """The emitted tokens and where they must end."""

    def __init__(self, verifier: Verifier, prompt_ids: list[int], settings: DecodeSettings):
        """Raises ConfigError when the prompt is empty or leaves no position for an answer."""
        positions = verifier.facts.max_positions
        if not 0 < len(prompt_ids) < positions:
            raise ConfigError(
                f"prompt of {len(prompt_ids)} tokens: must have 1 to {positions - 1}, one less "
                "than the verifier has positions; shorten or drop it"
            )
        self.tokens: list[int] = []
        self._prompt = len(prompt_ids)
        self._limit = min(settings.max_new_tokens, positions - self._prompt)
        self._eos = frozenset(settings.eos_ids)

    @property
    def length(self) -> int:
        """Prompt and emitted tokens."""
        return self._prompt + len(self.tokens)

    @property
    def capacity(self) -> int:
        """The longest that ``length`` can get."""
        return self._prompt + self._limit

    @property
    def ended(self) -> bool:
        return len(self.tokens) == self._limit or self.tokens[-1] in self._eos

    def emit(self, tokens: list[int]) -> None:
        """Append up to the end of sequence or the length limit; the rest is cut."""
        for token in tokens:
            self.tokens.append(token)
            if self.ended:
                return


class Speculation:
    """One sequence on its way: what is emitted, what the rounds were, what they cost."""

    def __init__(
        self,
        verifier: Verifier,
        draft: Eagle3Draft,
        prompt_ids: list[int],
        settings: DecodeSettings,
    ):
        check_pair(verifier, draft)
        self.settings = settings
        self.plan = settings.plan
        self.device = verifier.device
        self.output = Output(verifier, prompt_ids, settings)
        self.last_position = verifier.facts.max_positions - 1
        self.last_draft_position = draft.config.max_positions - 1
        capacity = self.output.capacity + settings.n_draft
        self.target = TargetDecoder(verifier, min(capacity, verifier.facts.max_positions))
        self.draft = DraftDecoder(draft, min(capacity, draft.config.max_positions), verifier.device)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.rounds: list[Round] = []
        self.overlap: list[float] = []
        self.draft_seconds = self.verify_seconds = 0.0

    def room(self) -> int:
        """How many guesses this round may make: at most n_draft, and none past a position limit.

        With the root at L the verifier is fed up to L+N, the draft up to L-1+N-1.
        """
        root = self.output.length - 1
        within_verifier = self.last_position - root
        within_draft = self.last_draft_position - root + 2
        return max(0, min(self.settings.n_draft, within_verifier, within_draft))

    def prefill(self, prompt: Tensor) -> None:
        """Both models over the prompt; the row of the first token waits for the first round."""
        logits = self.target.prefill(prompt)
        self.target.root = choose(logits, self.settings.sampling, self.generator)
        self.output.emit(self.target.root[0].tolist())
        if self.room():
            aux = self.target.states.aux
            if prompt.shape[1] > 1:
                self.draft.remember(prompt[:, 1:], aux[:, :-1])
            self.draft.feed(self.target.root, aux[:, -1:])

    def play_round(self, count: int) -> None:
        """Propose, verify, emit, and leave both caches at the committed text."""
        plan = self.plan
        begin = now(self.device)
        proposal = propose(self.draft, count, plan, self.generator)
        drafted = now(self.device)
        logits = self.target.score(proposal.ids)
        outcome = judge_proposal(proposal, logits, self.draft.target_ids, plan, self.generator)
        *ids, accepted, token = torch.cat(
            [proposal.ids[0], outcome.verdict.accepted, outcome.verdict.token]
        ).tolist()  # the round's one wait for the device
        self.verify_seconds += now(self.device) - drafted
        self.draft_seconds += drafted - begin
        self.rounds.append(Round(ids, accepted))
        self.output.emit([*ids[:accepted], token])
        self.target.root = outcome.verdict.token[:, None]
        rows = torch.cat([proposal.ids[:, :accepted], self.target.root], -1)
        self.draft.feed(rows, self.target.commit(accepted))
        if outcome.overlap is not None:
            self.overlap += outcome.overlap[0, : accepted + 1].tolist()

    def play_plain_step(self) -> None:
        """Past the draft's position limit the verifier goes on alone."""
        self.target.root = choose(self.target.step(), self.settings.sampling, self.generator)
        self.output.emit(self.target.root[0].tolist())
