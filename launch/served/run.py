"""The report's conversations, asked of a server: greedy answers, counters and seconds of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import note_once, progress
from conf.schema import ConfigError
from data.dialects import RowRefused
from data.eval_prompts import EvalPrompt, read_prompts
from data.records import Turn
from data.render import messages
from data.template import encode_prompt
from eval.acceptance import Counters
from eval.measure import TOO_LONG
from eval.proof.examined import first_question
from eval.report import EvalReport
from launch.served.client import Ends, Replied, ServedClient


@dataclass(frozen=True)
class Question:
    """A conversation of the report and what was counted of it there."""

    prompt: EvalPrompt
    ours: Counters


@dataclass(frozen=True)
class Asking:
    """How a conversation becomes token ids, and where its answers end."""

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    ends: Ends
    by_chat: bool = False  # send messages, for the server to render

    def ids(self, turns: list[Turn]) -> list[int]:
        return encode_prompt(turns, self.tokenizer, self.template_kwargs)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Exchange:
    ours: list[int]  # the prompt's ids by the run's own template
    reply: Replied


@dataclass(frozen=True)
class Talked:
    """One conversation, answered."""

    id: str
    exchanges: list[Exchange]
    counters: Counters  # of the server, while it answered
    foreign: int  # tokens that it made for others meanwhile

    @property
    def ids(self) -> list[list[int]]:
        return [one.reply.ids for one in self.exchanges]

    @property
    def length(self) -> int:
        """Positions of its longest text."""
        return max(len(x.reply.prompt_ids) + len(x.reply.ids) for x in self.exchanges)


@dataclass(frozen=True)
class Served:
    """One server's answers to every question, in their order."""

    talks: list[Talked]
    positions: int  # guesses that a round of the server can accept; 0: it has no such counters

    @property
    def tokens_per_second(self) -> float:
        replies = [one.reply for talk in self.talks for one in talk.exchanges]
        return sum(len(one.ids) for one in replies) / sum(one.seconds for one in replies)

    @property
    def foreign(self) -> int:
        return sum(talk.foreign for talk in self.talks)


def choose_questions(report: EvalReport, count: int | None) -> list[Question]:
    """The first ``count`` conversations of the report's top level, found again in its files.

    Raises ConfigError when the files no longer hold one of them, or for sampled answers.
    """
    section = report.settings.eval
    if section.temperature > 0:
        raise ConfigError(
            f"eval.temperature={section.temperature:g}: the report counts sampled answers, which "
            "no server repeats; write one of greedy answers with python -m eval.main "
            f"run.name={report.settings.run} eval.temperature=0"
        )
    found = {prompt.digest: prompt for prompt in read_prompts(section.prompts).prompts}
    wanted = [one for one in report.by_prompt if not one.unseen][:count]
    missing = [one.id for one in wanted if one.digest not in found]
    if missing:
        raise ConfigError(
            f"eval.prompts={','.join(section.prompts)}: {len(missing)} prompts of the report are "
            f"no longer there ({missing[0]} for one); give the files back their text, or evaluate "
            f"again with python -m eval.main run.name={report.settings.run}"
        )
    if not wanted:
        raise ConfigError("--prompts: the report has none; evaluate with eval.prompts first")
    return [Question(found[one.digest], one.counters) for one in wanted]


def ask_all(
    client: ServedClient, questions: Sequence[Question], asking: Asking, what: str
) -> Served:
    """Every conversation, one request at a time, so that the counters are its own."""
    warm_up(client, questions[0], asking)
    talks = [
        ask(client, one.prompt, asking)
        for one in progress(questions, len(questions), what, "prompt")
    ]
    return Served(talks, max(len(one.counters.accepted_by_depth) for one in talks))


def warm_up(client: ServedClient, question: Question, asking: Asking) -> None:
    """One answer that is not counted: the first request compiles and allocates."""
    before = client.counters()
    exchange = answer(client, first_question(question.prompt.turns), asking)
    client.settled(before, len(exchange.reply.ids))


def ask(client: ServedClient, prompt: EvalPrompt, asking: Asking) -> Talked:
    """All user turns of a conversation; each follows the server's own answers, as in our loop."""
    before = client.counters()
    exchanges: list[Exchange] = []
    history: list[Turn] = []
    for turn in prompt.turns:
        history.append(turn)
        if turn.role != "user":
            continue
        try:
            exchange = answer(client, history, asking)
        except RowRefused as refusal:  # where our own evaluation stopped, too
            note_once(refusal.note or refusal.reason)
            break
        exchanges.append(exchange)
        history.append(Turn("assistant", asking.text(exchange.reply.ids)))
    tokens = sum(len(one.reply.ids) for one in exchanges)
    after = client.settled(before, tokens)
    foreign = after.generated - before.generated - tokens
    return Talked(prompt.id, exchanges, after.since(before, tokens), foreign)


def answer(client: ServedClient, turns: list[Turn], asking: Asking) -> Exchange:
    """Raises RowRefused when the template does not take the turns, or no position is left."""
    ours = asking.ids(turns)
    room = asking.ends.tokens if client.model.max_len is None else client.model.max_len - len(ours)
    if room < 1:
        raise RowRefused(TOO_LONG)
    ends = replace(asking.ends, tokens=min(asking.ends.tokens, room))
    if asking.by_chat:
        return Exchange(ours, client.chat(messages(tuple(turns)), ends))
    return Exchange(ours, client.complete(ours, ends))


def longest(questions: Sequence[Question], asking: Asking) -> int:
    """Positions that the conversations can need: their text, and an answer to each turn.

    Raises ConfigError when the chat template no longer takes one of them.
    """
    found = 0
    for one in questions:
        turns = one.prompt.turns
        first = first_question(turns)
        later = [[turn] for turn in turns[len(first) :] if turn.role == "user"]
        try:
            needed = [len(asking.ids(part)) + asking.ends.tokens for part in [first, *later]]
        except RowRefused as refusal:
            raise ConfigError(
                f"eval.prompts: {one.prompt.id} is in the report, and is now "
                f"{refusal.note or refusal.reason}; evaluate again with python -m eval.main"
            ) from refusal
        found = max(found, sum(needed))
    return found
