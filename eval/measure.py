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
from eval.acceptance import Counters, NgramTable, total
from eval.decode import DecodeSettings, Generation, Round, decode_plain, decode_speculative
from eval.lossless import Difference, compare
from models.eagle3 import Eagle3Draft
from models.verifier import Verifier

TOO_LONG = "prompt leaves no position for an answer"


@dataclass(frozen=True)
class Answer:
    """One user turn, answered twice."""

    prompt_ids: list[int]
    plain: Generation  # its tail reaches n_draft tokens past the end
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


def run_exact(
    verifier: Verifier,
    draft: Eagle3Draft,
    prompts: Sequence[EvalPrompt],
    settings: DecodeSettings,
    template_kwargs: dict[str, Any],
) -> ExactRuns:
    """Answer every user turn of every prompt; each conversation has its own random numbers."""
    runs: list[PromptRuns] = []
    skipped: dict[str, int] = {}
    for i, prompt in enumerate(progress(prompts, len(prompts), "acceptance", "prompt")):
        own = replace(settings, seed=settings.seed + i)
        one = answer_turns(verifier, draft, prompt, own, template_kwargs)
        if one.stopped:
            skipped[one.stopped] = skipped.get(one.stopped, 0) + one.unanswered
        if one.answers:
            runs.append(one)
    return ExactRuns(runs, skipped)


def answer_turns(
    verifier: Verifier,
    draft: Eagle3Draft,
    prompt: EvalPrompt,
    settings: DecodeSettings,
    template_kwargs: dict[str, Any],
) -> PromptRuns:
    """Later turns follow the verifier's own plain answers to the earlier ones.

    A turn that the template refuses, or that leaves no position to answer in, is the end.
    """
    answers: list[Answer] = []
    history: list[Turn] = []
    for turn in prompt.turns:
        history.append(turn)
        if turn.role != "user":
            continue
        try:
            ids = encode_prompt(history, verifier.tokenizer, template_kwargs)
        except RowRefused as refusal:
            note_once(refusal.note)
            return PromptRuns(prompt, answers, refusal.reason)
        if len(ids) >= verifier.facts.max_positions:
            return PromptRuns(prompt, answers, TOO_LONG)
        plain = decode_plain(verifier, ids, settings, tail=settings.n_draft)
        counted = replace(settings, measure_overlap=True)
        speculative = decode_speculative(verifier, draft, ids, counted)
        greedy = settings.sampling.greedy
        difference = compare(verifier, ids, plain, speculative) if greedy else None
        answers.append(Answer(ids, plain, speculative, difference))
        text = verifier.tokenizer.decode(plain.tokens, skip_special_tokens=True)
        history.append(Turn("assistant", str(text)))
    return PromptRuns(prompt, answers)


# ---- what is counted of the runs ---------------------------------------------------------------


def count(runs: PromptRuns, n_draft: int) -> Counters:
    """All rounds of one conversation."""
    return total(
        [
            Counters.of(a.speculative.rounds, len(a.speculative.tokens), n_draft)
            for a in runs.answers
        ]
    )


def count_range(runs: PromptRuns, n_draft: int, first: int, end: int | None) -> Counters:
    """The rounds whose first draft stands at a generated position in [first, end)."""
    counters = Counters()
    for answer in runs.answers:
        inside = [
            one
            for at, one in placed(answer.speculative.rounds)
            if at >= first and (end is None or at < end)
        ]
        emitted = sum(one.accepted + 1 for one in inside)
        counters += Counters.of(inside, emitted, n_draft)
    return counters


def placed(rounds: list[Round]) -> list[tuple[int, Round]]:
    """Each round with the generated position of its first draft; prefill's token has position 0."""
    pairs: list[tuple[int, Round]] = []
    position = 1
    for one in rounds:
        pairs.append((position, one))
        position += one.accepted + 1
    return pairs


def count_floor(runs: PromptRuns, table: NgramTable, n_draft: int) -> Counters:
    """The same answers with the n-gram table as the draft, walked over the plain text.

    An answer in [a, b) has the rows a-1 <= t < b-2: row t guesses from x[t+2] on.
    """
    return total(
        [
            table.walk(
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
