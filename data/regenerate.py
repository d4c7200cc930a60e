"""Prompts -> the verifier's own answers: data on which a draft head learns what it will meet."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, fingerprint, progress, say
from conf.schema import ConfigError, RunConfig
from data.answer_file import AnswerFile, AnswerRow
from data.dialects import RowRefused
from data.distributed import pick_device, use_threads
from data.records import Conversation, Turn
from data.sources import RowLog, find_files, read_conversations
from data.template import encode_prompt
from models.bundled import resolve
from models.generate import Answer, Request, end_ids, generate
from models.sampling import Sampling
from models.verifier import Verifier, load_facts, load_tokenizer, weights_fingerprint


@dataclass(frozen=True)
class Job:
    """One answer number of one prompt."""

    id: str
    prompt: Conversation
    asks: list[list[Turn]]  # what is said before each answer: a user turn, with a system turn ahead
    sampling: Sampling
    length: int  # prompt tokens before the first answer


@dataclass
class Talk:
    """A job under way: what was said so far."""

    job: Job
    turns: list[Turn] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)  # of the last answer
    cut: bool = False
    answered: int = 0
    tokens: int = 0  # generated over all answers

    def ask(self) -> list[Turn]:
        return self.turns + self.job.asks[self.answered]


class Regeneration:
    """Answers batches of jobs with one verifier."""

    def __init__(self, cfg: RunConfig, verifier: Verifier):
        self.cfg = cfg
        self.verifier = verifier
        self.ends = end_ids(verifier)

    def answer(self, jobs: list[Job]) -> Iterator[Talk]:
        """Answer every user turn in turn; yields a talk when its last answer is there.

        A cut answer ends its conversation, since what follows would answer to half a sentence; so
        does a turn that the template refuses or that no longer fits the verifier's positions.
        """
        talks = [Talk(job) for job in jobs]
        while talks:
            requests = [self._request(talk) for talk in talks]
            going: list[Talk] = []
            for answer in generate(
                self.verifier, requests, self.cfg.regenerate.max_new_tokens, self.ends
            ):
                talk = talks[answer.index]
                self._note(talk, answer)
                if self._goes_on(talk):
                    going.append(talk)
                else:
                    yield talk
            talks = going

    def _request(self, talk: Talk) -> Request:
        ids = encode_prompt(talk.ask(), self.verifier.tokenizer, self.cfg.data.template_kwargs)
        seed = seed_of(self.cfg.run.seed, talk.job.id, talk.answered)
        return Request(ids, talk.job.sampling, seed)

    def _note(self, talk: Talk, answer: Answer) -> None:
        text = self.verifier.tokenizer.decode(
            answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        talk.turns = [*talk.ask(), Turn("assistant", text)]
        talk.answer_ids, talk.cut = answer.ids, answer.cut
        talk.answered += 1
        talk.tokens += len(answer.ids)

    def _goes_on(self, talk: Talk) -> bool:
        if talk.cut or talk.answered == len(talk.job.asks):
            return False
        room = room_of(self.cfg, self.verifier.facts.max_positions)
        try:
            return len(self._request(talk).prompt_ids) <= room
        except RowRefused:
            return False

    def row(self, talk: Talk) -> AnswerRow:
        job = talk.job
        return AnswerRow(
            id=job.id,
            task=job.prompt.task,
            conversations=talk.turns,
            answer_ids=talk.answer_ids,
            greedy=job.sampling.greedy,
            cut=talk.cut,
            temperature=job.sampling.temperature,
            seed=self.cfg.run.seed,
        )


def seed_of(seed: int, answer_id: str, turn: int) -> int:
    """A seed of its own for each answer, so that a draw depends on nothing else in the batch."""
    digest = hashlib.sha256(f"{seed}:{answer_id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4])  # what the CPU generator uses of a seed


def room_of(cfg: RunConfig, max_positions: int) -> int:
    """Prompt tokens that leave room for an answer."""
    return max_positions - cfg.regenerate.max_new_tokens


def asks_of(prompt: Conversation) -> list[list[Turn]]:
    """The turns before each answer; answers in the file are dropped, the verifier gives its own."""
    asks: list[list[Turn]] = [[]]
    for turn in prompt.turns:
        if turn.role == "assistant":
            continue
        asks[-1].append(turn)
        if turn.role == "user":
            asks.append([])
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
        asks = asks_of(prompt)
        try:
            length = len(encode_prompt(asks[0], tokenizer, cfg.data.template_kwargs))
        except RowRefused as refusal:
            log.skip(refusal.reason, prompt.id)
            continue
        if prompt.id in seen:
            log.skip("id used before", prompt.id)
        elif length > room:
            log.skip("prompt leaves no room for an answer", prompt.id)
        else:
            jobs += [Job(f"{prompt.id}#{k}", prompt, asks, how, length) for k, how in answers]
        seen.add(prompt.id)
    if not jobs:
        raise ConfigError(
            f"regenerate.prompts={list(section.prompts)}: hold no usable prompt "
            f"({log.reasons() or 'no rows'}); give rows with a user turn"
        )
    return jobs


def settings_of(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, jobs: list[Job]) -> dict:
    """What decides the answers. Not the batch size: it only changes rounding."""
    section = cfg.regenerate
    settings = {
        "verifier": weights_fingerprint(resolve(cfg.verifier.path, cache_dir(cfg))),
        "verifier.dtype": cfg.verifier.dtype.value,
        "template": fingerprint(tokenizer.chat_template),
        "data.template_kwargs": dict(cfg.data.template_kwargs),
        "prompts": fingerprint({job.prompt.id: job.asks for job in jobs}),
        "regenerate.max_new_tokens": section.max_new_tokens,
        "regenerate.greedy": section.greedy,
        "regenerate.samples": section.samples,
    }
    if section.samples:
        settings["regenerate.temperature"] = section.temperature
        settings["regenerate.top_p"] = section.top_p
        settings["run.seed"] = cfg.run.seed
    return settings


def batches_of(jobs: list[Job], size: int) -> list[list[Job]]:
    """Jobs of like length together, the longest first: too large a batch fails at once.

    The batches follow from the jobs alone, so a run that continues makes the same ones.
    """
    ordered = sorted(jobs, key=lambda job: -job.length)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def regenerate(cfg: RunConfig) -> Path:
    """Write the answers file, or finish it, or find it finished; returns its path.

    Greedy answers are the verifier's argmax in ``verifier.dtype``; sampled ones depend on
    (run.seed, answer id), whatever the batch, up to rounding of the logits.
    """
    log = RowLog()
    tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
    jobs = read_jobs(cfg, tokenizer, log)
    file = AnswerFile(Path(cfg.regenerate.output), settings_of(cfg, tokenizer, jobs))
    if log.skipped:
        say(f"skipped prompts: {log.reasons()}")
    if file.finished:
        say(f"{file.path}: is finished with these settings, {len(jobs)} answers")
        return file.path
    done = file.start()
    todo = [
        batch
        for batch in batches_of(jobs, cfg.regenerate.batch_size)
        if not all(job.id in done for job in batch)
    ]
    if done:
        say(f"{file.path}: continues, {len(jobs) - sum(map(len, todo))} of {len(jobs)} are there")
    if todo:
        make(cfg, todo, file)
    file.finish([job.id for job in jobs])
    return file.path


def make(cfg: RunConfig, batches: list[list[Job]], file: AnswerFile) -> None:
    """Generate ``batches`` one after the other, each appended when complete."""
    device = pick_device(cfg.run.device, 0)
    dtype = getattr(torch, cfg.verifier.dtype.value)
    verifier = Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype)
    run = Regeneration(cfg, verifier)

    def talks() -> Iterator[Talk]:
        for batch in batches:
            rows: list[AnswerRow] = []
            for talk in run.answer(batch):
                rows.append(run.row(talk))
                yield talk
            file.append(rows)

    tokens, cut, rate = 0, 0, 0.0
    begin = time.perf_counter()
    bar = progress(talks(), sum(map(len, batches)), "answers", " answers")
    for talk in bar:
        tokens += talk.tokens
        cut += talk.cut
        rate = tokens / (time.perf_counter() - begin)
        if isinstance(bar, tqdm):
            bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
    total = sum(map(len, batches))
    say(f"{total} answers, {tokens} tokens, {rate:.0f} tokens/s; {cut} cut at the length limit")


def main(cfg: RunConfig) -> None:
    use_threads(cfg.engine.threads)
    path = regenerate(cfg)
    say(f"answers: {path}")
    say(f"next: python -m data.preview data=jsonl data.path={path}")


if __name__ == "__main__":
    entry(main, running=())
