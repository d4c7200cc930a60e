"""The exact runs: every prompt decoded plainly and speculatively, and what each left to count."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from conf.runtime import note_once, progress
from data.dialects import RowRefused
from data.eval_prompts import EvalPrompt
from data.records import TokenizedSample, Turn
from data.template import encode_prompt
from eval.acceptance import Counters, RankHits, total
from eval.decode import DecodeSettings, decode
from eval.generation import Generation, Round
from eval.ngram import table_walk
from eval.proof.difference import Difference, compare
from models.drafts import Draft
from models.phrases import PhraseTable
from models.verifier import Verifier

TOO_LONG = "prompt leaves no position for an answer"


@dataclass(frozen=True)
class Answer:
    """One user turn, answered twice."""

    prompt_ids: list[int]
    plain: Generation  # its tail reaches as far past the end as a round can guess
    speculative: Generation
    difference: Difference | None = None  # of greedy answers

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.plain.tokens)


@dataclass(frozen=True)
class PromptRuns:
    prompt: EvalPrompt
    answers: list[Answer]  # one a user turn
    stopped: str | None = None  # why the turns after them were not answered

    @property
    def unanswered(self) -> int:
        return sum(turn.role == "user" for turn in self.prompt.turns) - len(self.answers)

    @property
    def identical(self) -> bool:
        return all(answer.difference is None for answer in self.answers)

    @property
    def overlap(self) -> list[float]:
        return [value for answer in self.answers for value in answer.speculative.overlap]


@dataclass(frozen=True)
class ExactRuns:
    runs: list[PromptRuns]
    skipped: dict[str, int] = field(default_factory=dict)  # user turns not answered, by reason

    @property
    def top(self) -> list[PromptRuns]:
        """What the report's top level counts: prompts not marked as unseen patterns."""
        return [one for one in self.runs if one.prompt.seen is not False]

    @property
    def unseen(self) -> list[PromptRuns]:
        return [one for one in self.runs if one.prompt.seen is False]


@dataclass(frozen=True)
class Asking:
    """How prompts become token ids, and how many are answered side by side."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    batch: int = 1


def run_exact(
    verifier: Verifier,
    draft: Draft,
    prompts: Sequence[EvalPrompt],
    settings: DecodeSettings,
    asking: Asking,
) -> ExactRuns:
    """Answer every user turn of every prompt; each conversation has its own random numbers."""
    talks = [
        Talk(prompt, settings.seed + i, [], list(prompt.turns)) for i, prompt in enumerate(prompts)
    ]
    groups = [talks[i : i + asking.batch] for i in range(0, len(talks), asking.batch)]
    for group in progress(groups, len(groups), "acceptance", "batch"):
        while asked := [talk for talk in group if talk.ask(verifier, asking.template_kwargs)]:
            answer_together(verifier, draft, asked, settings)
    skipped: dict[str, int] = {}
    runs = [PromptRuns(talk.prompt, talk.answers, talk.stopped) for talk in talks]
    for one in runs:
        if one.stopped:
            skipped[one.stopped] = skipped.get(one.stopped, 0) + one.unanswered
    return ExactRuns([one for one in runs if one.answers], skipped)


@dataclass
class Talk:
    """A conversation on its way: later turns follow the verifier's own plain answers."""

    prompt: EvalPrompt
    seed: int
    history: list[Turn]
    to_come: list[Turn]
    answers: list[Answer] = field(default_factory=list)
    stopped: str | None = None
    asked: list[int] = field(default_factory=list)  # token ids up to the answer to come

    def ask(self, verifier: Verifier, template_kwargs: dict[str, Any]) -> bool:
        """Go on to the next user turn, if there is one to answer.

        A turn that the template refuses, or that leaves no position to answer in, is the end.
        """
        if self.stopped:
            return False
        while self.to_come:
            self.history.append(self.to_come.pop(0))
            if self.history[-1].role == "user":
                break
        else:
            return False
        try:
            self.asked = encode_prompt(self.history, verifier.tokenizer, template_kwargs)
        except RowRefused as refusal:
            note_once(refusal.note)
            self.stopped = refusal.reason
            return False
        if len(self.asked) >= verifier.facts.max_positions:
            self.stopped = TOO_LONG
        return not self.stopped


def answer_together(
    verifier: Verifier, draft: Draft, talks: list[Talk], settings: DecodeSettings
) -> None:
    """Answer the turn each of ``talks`` asks, plainly and with the draft."""
    assert settings.shape is not None
    prompts, seeds = [talk.asked for talk in talks], [talk.seed for talk in talks]
    tail = settings.shape.depth
    plain = decode(verifier, None, prompts, settings, seeds, tail).generations
    counted = replace(settings, measure_overlap=settings.shape.is_chain)
    guided = decode(verifier, draft, prompts, counted, seeds).generations
    for talk, one, other in zip(talks, plain, guided, strict=True):
        greedy = settings.sampling.greedy
        difference = compare(verifier, talk.asked, one, other) if greedy else None
        talk.answers.append(Answer(talk.asked, one, other, difference))
        text = verifier.tokenizer.decode(one.tokens, skip_special_tokens=True)
        talk.history.append(Turn("assistant", str(text)))


# ---- what is counted of the runs ---------------------------------------------------------------


def count(runs: PromptRuns, n_draft: int) -> Counters:
    """All rounds of one conversation."""
    return count_answers([answer.speculative for answer in runs.answers], n_draft)


def count_answers(answers: Sequence[Generation], n_draft: int) -> Counters:
    return total([Counters.of(one.rounds, len(one.tokens), n_draft) for one in answers])


def count_ranks(runs: Sequence[PromptRuns], n_draft: int) -> RankHits:
    """Which guesses the verifier's tokens were, over all rounds."""
    ranks = [one for run in runs for answer in run.answers for one in answer.speculative.ranks]
    return RankHits.of(ranks, n_draft)


def placed(rounds: list[Round]) -> list[tuple[int, Round]]:
    """Each round with the generated position of its first draft; prefill's token has position 0."""
    pairs: list[tuple[int, Round]] = []
    position = 1
    for one in rounds:
        pairs.append((position, one))
        position += one.accepted + 1
    return pairs


def count_floor(runs: PromptRuns, table: PhraseTable, n_draft: int) -> Counters:
    """The same answers with the n-gram table as the draft, walked over the plain text.

    An answer in [a, b) has the rows a-1 <= t < b-2: row t guesses from x[t+2] on.
    """
    return total(
        [
            table_walk(
                table,
                [*answer.prompt_ids, *answer.plain.tokens, *answer.plain.tail],
                len(answer.prompt_ids) - 1,
                answer.length - 2,
                n_draft,
            )
            for answer in runs.answers
        ]
    )


def training_answers(samples: Sequence[TokenizedSample]) -> list[list[int]]:
    """Token ids of every supervised span of the training split."""
    spans: list[list[int]] = []
    for sample in samples:
        if sample.held_out:
            continue
        pairs = zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True)
        spans += [[token for _, token in span] for on, span in groupby(pairs, lambda p: p[0]) if on]
    return spans
