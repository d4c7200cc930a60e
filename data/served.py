"""Answers from a server: many conversations at once, each turn by turn, no more than it should be.

The server must serve the verifier with the chat template of ``verifier.path``: where it tells the
ids it read (vLLM does), they are compared with our own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.runtime import cache_dir, say
from conf.schema import ConfigError, JobError, RunConfig
from data.answer_file import AnswerFile, setting_of
from data.chat_client import ChatClient, GaveUp
from data.chat_reply import Reply
from data.dialects import RowRefused
from data.generated import is_text
from data.records import Turn
from data.render import special_tokens
from data.talks import Job, Said, Talk, next_prompt, room_of, seed_of
from models.verifier import load_facts

WRITTEN_OUT = "special tokens written out in an answer"
SAVE_EVERY = 1.0  # seconds between two synced writes: what a kill may lose


def model_of(cfg: RunConfig) -> str:
    """The name under which the server has the verifier; it is not asked about a finished file.

    Raises ConfigError when it serves several and none is chosen, JobError when it does not answer.
    """
    section = cfg.regenerate
    if known := section.model or setting_of(Path(section.output), "regenerate.model"):
        return known

    async def ask() -> list[str]:
        async with ChatClient(cfg) as client:
            return await client.served()

    names = asyncio.run(ask())
    if len(names) != 1:
        raise ConfigError(
            f"regenerate.model=null: {section.base_url} serves {len(names)} models "
            f"({', '.join(names)}); name the verifier's"
        )
    return names[0]


class Server:
    """Has jobs answered, ``regenerate.concurrency`` of them at a time."""

    def __init__(self, cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, model: str):
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.model = model
        self.room = room_of(cfg, load_facts(cfg.verifier, cache_dir(cfg)).max_positions)
        self.failed: list[str] = []  # how requests failed for good, one a job
        self.noted: set[str] = set()

    def answer(self, jobs: list[Job], file: AnswerFile) -> Iterator[Talk]:
        """Talks as they are over; they are in ``file`` a second later, and when this ends.

        Raises JobError when the server can no longer be asked, or at the end when requests failed.
        """
        unsaved: list[Talk] = []
        saved = time.monotonic()
        try:
            for talk in self._driven(jobs):
                unsaved.append(talk)
                yield talk
                if time.monotonic() - saved >= SAVE_EVERY:
                    save(unsaved, file, self.cfg.run.seed)
                    unsaved, saved = [], time.monotonic()
        finally:
            save(unsaved, file, self.cfg.run.seed)
        if self.failed:
            raise JobError(
                f"regenerate.base_url={self.cfg.regenerate.base_url}: {len(self.failed)} of "
                f"{len(jobs)} answers are missing, each failed {self.cfg.regenerate.retries + 1} "
                f"times (the last: {self.failed[-1]}); run the same command again for them"
            )

    def _driven(self, jobs: list[Job]) -> Iterator[Talk]:
        """Run the event loop just as long as the next talk takes."""
        with asyncio.Runner() as runner:
            talks = self._talks(jobs)

            async def following() -> Talk | None:
                return await anext(talks, None)

            while (talk := runner.run(following())) is not None:
                yield talk

    async def _talks(self, jobs: list[Job]) -> AsyncIterator[Talk]:
        waiting = iter(jobs)
        at_once = self.cfg.regenerate.concurrency
        running: set[asyncio.Task[Talk | None]] = set()
        async with ChatClient(self.cfg, self.model) as client:
            try:
                while True:
                    for job in islice(waiting, at_once - len(running)):
                        running.add(asyncio.create_task(self._talk(client, job)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    # What went well first, so that an error loses nothing.
                    for task in sorted(done, key=lambda task: task.exception() is not None):
                        if (talk := task.result()) is not None:
                            yield talk
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _talk(self, client: ChatClient, job: Job) -> Talk | None:
        """A conversation to its end; None when a request failed for good."""
        talk = Talk(job)
        while not talk.over:
            prompt = next_prompt(talk, self.tokenizer, self.cfg, self.room)
            if not prompt:
                break
            try:
                seed = seed_of(self.cfg.run.seed, talk.job.id, talk.answered)
                reply = await client.chat(talk.ask(), job.sampling, seed)
                self._compare(prompt, reply, job)
                talk.hear(self._said(reply, talk))
            except GaveUp as error:
                self.failed.append(str(error))
                return None
            except RowRefused as refusal:
                talk.ended = refusal.reason
                if refusal.note:
                    self._note_once(refusal.reason, f"{job.id}: {refusal.note}")
        return talk

    def _said(self, reply: Reply, talk: Talk) -> Said:
        """An answer that was not cut must end with a token that is no part of its text.

        Raises RowRefused for text that training would read as special tokens, unless the ids show
        that the verifier wrote it letter by letter; an answer without ids takes them from those
        before it.
        """
        turn = Turn("assistant", reply.content, reasoning=reply.reasoning)
        ids = reply.ids
        if ids and not self._spell(ids, turn, reply.cut):
            self._note_once(
                "ids", "the server's token ids do not spell its text and its end; the text is kept"
            )
            ids = []
        if not ids:
            for answer in [*talk.turns, turn]:
                refuse_written_out(answer, self.tokenizer)
        return Said(turn, ids, reply.cut, reply.tokens)

    def _spell(self, ids: list[int], turn: Turn, cut: bool) -> bool:
        known = len(self.tokenizer)
        return all(0 <= token < known for token in ids) and is_text(
            ids if cut else ids[:-1], turn, self.tokenizer
        )

    def _compare(self, prompt: list[int], reply: Reply, job: Job) -> None:
        """The verifier must read what training will: the same template, arguments and tokenizer."""
        if reply.prompt_ids and reply.prompt_ids != prompt:
            pairs = enumerate(zip(prompt, reply.prompt_ids, strict=False))
            at = next((i for i, (own, its) in pairs if own != its), None)
            where = f"from token {at} on" if at is not None else "at the end"
            raise JobError(
                f"verifier.path={self.cfg.verifier.path}: the server reads {job.id} otherwise, "
                f"{len(reply.prompt_ids)} tokens against {len(prompt)} here, different {where}; "
                "serve the verifier with this tokenizer and chat template"
            )
        if not reply.prompt_ids and reply.prompt_tokens not in (0, len(prompt)):
            self._note_once(
                "length",
                f"the server counts {reply.prompt_tokens} tokens in {job.id} and the template of "
                f"verifier.path gives {len(prompt)}: see that both use one chat template",
            )

    def _note_once(self, about: str, text: str) -> None:
        if about not in self.noted:
            self.noted.add(about)
            say(f"note: {text}")


def refuse_written_out(turn: Turn, tokenizer: PreTrainedTokenizerBase) -> None:
    """Special tokens end a turn or begin one: as text they are none of the answer's, but training
    would supervise them, and all that follows, as if the verifier had generated them there."""
    for text in (turn.content, turn.reasoning) if turn.role == "assistant" else ():
        if found := special_tokens(tokenizer).search(text):
            raise RowRefused(
                WRITTEN_OUT, f"its answer holds {found[0]}; have the server skip special tokens"
            )


def save(talks: list[Talk], file: AnswerFile, seed: int) -> None:
    file.append([talk.row(seed) for talk in talks if talk.answered])
