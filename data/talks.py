"""Conversations under way: what is still to be asked, and what the verifier has said so far."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import cache_dir
from conf.schema import ConfigError, RunConfig
from data.answer_file import AnswerRow
from data.dialects import RowRefused
from data.records import Conversation, Turn
from data.sources import RowLog, find_files, read_conversations
from data.template import encode_prompt
from models.sampling import Sampling
from models.verifier import load_facts

CUT = "a cut answer"
NO_ROOM = "no room for another answer"
EMPTY = "an answer without text"
TOOLS = "tools or their results: nobody is there to run them"


@dataclass(frozen=True)
class Job:
    """One answer number of one prompt."""

    id: str
    prompt: Conversation
    asks: list[list[Turn]]  # what is said before each answer: a user turn, with a system turn ahead
    sampling: Sampling
    length: int  # prompt tokens before the first answer


@dataclass(frozen=True)
class Said:
    """One answer of the verifier."""

    turn: Turn
    ids: Sequence[int]  # as generated, the end token included unless cut; empty: not known
    cut: bool
    tokens: int  # generated


@dataclass
class Talk:
    """A job under way: what was said so far."""

    job: Job
    turns: list[Turn] = field(default_factory=list)
    answer_ids: list[list[int]] = field(default_factory=list)  # of the last answers, all with ids
    cut: bool = False
    answered: int = 0
    tokens: int = 0  # generated over all answers
    ended: str = ""  # why, when it ended before its last ask

    def ask(self) -> list[Turn]:
        return self.turns + self.job.asks[self.answered]

    def hear(self, said: Said) -> None:
        """Note an answer. One without text is none, whatever tokens made it: it ends the talk."""
        self.tokens += said.tokens
        if not said.turn.content.strip():
            self.ended = EMPTY
            return
        self.turns = [*self.ask(), said.turn]
        self.answer_ids = [*self.answer_ids, list(said.ids)] if said.ids else []
        self.cut = said.cut
        self.answered += 1
        if self.cut and not self.complete:
            self.ended = CUT

    @property
    def complete(self) -> bool:
        return self.answered == len(self.job.asks)

    @property
    def over(self) -> bool:
        return self.complete or bool(self.ended)

    def row(self, seed: int) -> AnswerRow:
        sampling = self.job.sampling
        return AnswerRow(
            id=self.job.id,
            task=self.job.prompt.task,
            conversations=self.turns,
            answer_ids=self.answer_ids,
            greedy=sampling.greedy,
            cut=self.cut,
            temperature=sampling.temperature,
            seed=seed,
        )


def seed_of(seed: int, answer_id: str, turn: int) -> int:
    """A seed of its own for each answer, so that a draw depends on nothing else in the batch."""
    digest = hashlib.sha256(f"{seed}:{answer_id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4])  # what the CPU generator uses of a seed


def room_of(cfg: RunConfig, max_positions: int) -> int:
    """Prompt tokens that leave room for an answer."""
    return max_positions - cfg.regenerate.max_new_tokens


def next_prompt(
    talk: Talk, tokenizer: PreTrainedTokenizerBase, cfg: RunConfig, room: int
) -> list[int]:
    """What the verifier reads before its next answer; empty, with the talk ended, if it cannot."""
    try:
        ids = encode_prompt(talk.ask(), tokenizer, cfg.data.template_kwargs)
    except RowRefused as refusal:
        talk.ended = refusal.reason
        return []
    if len(ids) > room:
        talk.ended = NO_ROOM
        return []
    return ids


def asks_of(prompt: Conversation) -> list[list[Turn]]:
    """The turns before each answer; answers in the file are dropped, the verifier gives its own.

    Raises RowRefused for a conversation with tools: their results answer other calls.
    """
    if prompt.tools or any(turn.role == "tool" for turn in prompt.turns):
        raise RowRefused(TOOLS)
    asks: list[list[Turn]] = [[]]
    for turn in prompt.turns:
        if turn.role == "assistant":
            continue
        asks[-1].append(turn)
        if turn.role == "user":
            asks.append([])
    if len(asks) == 1:
        raise RowRefused("no user turn")
    return asks[:-1]


def read_jobs(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, log: RowLog) -> list[Job]:
    """Every answer to be made, in the order of the output. Raises ConfigError without prompts."""
    section = cfg.regenerate
    if not section.prompts:
        raise ConfigError("regenerate.prompts=[]: is empty; give .jsonl files of prompts")
    sampled = Sampling(temperature=section.temperature, top_p=section.top_p)
    answers = [(0, Sampling())] if section.greedy else []
    answers += [(k, sampled) for k in range(1, section.samples + 1)]
    room = room_of(cfg, load_facts(cfg.verifier, cache_dir(cfg)).max_positions)
    jobs: list[Job] = []
    seen: set[str] = set()
    files = find_files(section.prompts, "regenerate.prompts")
    for prompt in read_conversations(files, log, prompts=True):
        try:
            asks = asks_of(prompt)
            length = len(encode_prompt(asks[0], tokenizer, cfg.data.template_kwargs))
            if prompt.id in seen:
                raise RowRefused("id used before")
            if length > room:
                raise RowRefused("prompt leaves no room for an answer")
        except RowRefused as refusal:
            log.withdraw(refusal, prompt.id)
        else:
            jobs += [Job(f"{prompt.id}#{k}", prompt, asks, how, length) for k, how in answers]
            seen.add(prompt.id)
    if not jobs:
        raise ConfigError(
            f"regenerate.prompts={list(section.prompts)}: hold no usable prompt "
            f"({log.reasons() or 'no rows'}); give rows with a user turn"
        )
    return jobs
