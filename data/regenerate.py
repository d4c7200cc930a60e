"""Prompts -> the verifier's own answers: data on which a draft head learns what it will meet."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, fingerprint, progress, say
from conf.schema import AnswerBackend, JobError, RunConfig
from data.answer_file import AnswerFile
from data.distributed import pick_device, use_threads
from data.records import Turn
from data.render import tokenizer_fingerprint
from data.served import Server, model_of, save
from data.sources import RowLog
from data.talks import Job, Said, Talk, next_prompt, read_jobs, room_of, seed_of
from models.bundled import resolve
from models.generate import Answer, Request, end_ids, generate
from models.verifier import Verifier, load_tokenizer, weights_fingerprint


class Regeneration:
    """Answers batches of jobs with one verifier, in this process."""

    def __init__(self, cfg: RunConfig, verifier: Verifier):
        self.cfg = cfg
        self.verifier = verifier
        self.ends = end_ids(verifier)
        self.room = room_of(cfg, verifier.facts.max_positions)

    def answer(self, jobs: list[Job]) -> Iterator[Talk]:
        """Answer every user turn in turn; yields a talk when it is over.

        A cut answer ends its conversation, since what follows would answer to half a sentence; so
        does a turn that the template refuses or that no longer fits the verifier's positions.
        """
        going = [Talk(job) for job in jobs]
        while going:
            talks, requests = [], []
            for talk in going:
                if request := self._request(talk):
                    talks.append(talk)
                    requests.append(request)
                else:
                    yield talk
            going = []
            for answer in generate(
                self.verifier, requests, self.cfg.regenerate.max_new_tokens, self.ends
            ):
                talk = talks[answer.index]
                talk.hear(self._said(answer))
                if talk.over:
                    yield talk
                else:
                    going.append(talk)

    def _request(self, talk: Talk) -> Request | None:
        ids = next_prompt(talk, self.verifier.tokenizer, self.cfg, self.room)
        seed = seed_of(self.cfg.run.seed, talk.job.id, talk.answered)
        return Request(ids, talk.job.sampling, seed) if ids else None

    def _said(self, answer: Answer) -> Said:
        spoken = answer.ids if answer.cut else answer.ids[:-1]  # an end need not be a special token
        text = self.verifier.tokenizer.decode(
            spoken, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return Said(Turn("assistant", str(text)), answer.ids, answer.cut, len(answer.ids))


@dataclass
class Tally:
    """What became of the answers of one run of the command."""

    answers: int = 0
    tokens: int = 0
    cut: int = 0
    refused: set[str] = field(default_factory=set)  # jobs that got no answer
    log: RowLog = field(default_factory=RowLog)  # the reasons

    def add(self, talk: Talk) -> None:
        self.tokens += talk.tokens
        if not talk.answered:
            self.refused.add(talk.job.id)
            self.log.skip(talk.ended, talk.job.id)
            return
        self.answers += 1
        self.cut += talk.cut
        if talk.ended:
            self.log.change(f"conversation ended early: {talk.ended}")

    def say(self, seconds: float) -> None:
        say(
            f"{self.answers} answers, {self.tokens} tokens, {self.answers / seconds:.1f} answers/s,"
            f" {self.tokens / seconds:.0f} tokens/s; {self.cut} cut at the length limit"
        )
        if self.log.skipped:
            say(f"no answer: {self.log.reasons()}")
        for name, count in sorted(self.log.changed.items()):
            say(f"  {count} x {name}")


def settings_of(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, jobs: list[Job], model: str | None
) -> dict:
    """What decides the answers. Not the batch size, which only changes rounding, nor the address.

    A server's weights and precision cannot be seen from here: ``model`` is its name for them.
    """
    section = cfg.regenerate
    if model is None:
        verifier = {
            "verifier": weights_fingerprint(resolve(cfg.verifier.path, cache_dir(cfg))),
            "verifier.dtype": cfg.verifier.dtype.value,
        }
    else:
        verifier = {"regenerate.model": model, "tokenizer": tokenizer_fingerprint(tokenizer)}
    settings = verifier | {
        "regenerate.backend": section.backend.value,
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

    One by one they keep their order. The batches follow from the jobs alone, so a run that
    continues makes the same ones.
    """
    ordered = sorted(jobs, key=lambda job: -job.length) if size > 1 else jobs
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def regenerate(cfg: RunConfig) -> Path:
    """Write the answers file, or finish it, or find it finished; returns its path.

    Greedy answers are the verifier's argmax in ``verifier.dtype``, or in the server's; sampled ones
    depend on (run.seed, answer id), whatever the batch, up to rounding of the logits. Prompts
    without an answer are counted by reason and noted beside the file. Raises JobError when nothing
    is answered or a server fails; what is finished is kept.
    """
    log = RowLog()
    tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
    jobs = read_jobs(cfg, tokenizer, log)
    model = model_of(cfg) if cfg.regenerate.backend is AnswerBackend.openai else None
    file = AnswerFile(Path(cfg.regenerate.output), settings_of(cfg, tokenizer, jobs, model))
    if log.skipped:
        say(f"skipped prompts: {log.reasons()}")
    if file.finished:
        say(f"{file.path}: is finished with these settings, {len(jobs)} answers")
        return file.path
    with file.sole_writer():
        tally = fill(file, cfg, tokenizer, jobs, model)
        order = [job.id for job in jobs if job.id not in tally.refused]
        left_out = total(log.skipped, tally.log.skipped)
        file.finish(order, left_out, total(log.changed, tally.log.changed))
    return file.path


def total(*counts: dict[str, int]) -> dict[str, int]:
    """Counts by reason, added up: prompts and answers may be left out for one reason."""
    return dict(sum(map(Counter, counts), Counter()))


def fill(
    file: AnswerFile,
    cfg: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    jobs: list[Job],
    model: str | None,
) -> Tally:
    """Have the answers made that are not in ``file``. Raises JobError when there is none at all."""
    done = file.start()
    size = cfg.regenerate.batch_size if model is None else 1
    todo = [b for b in batches_of(jobs, size) if not all(job.id in done for job in b)]
    if done:
        say(f"{file.path}: continues, {len(jobs) - sum(map(len, todo))} of {len(jobs)} are there")
    if model is None:
        tally = gather(in_batches(cfg, todo, file), sum(map(len, todo)))
    else:
        waiting = [job for batch in todo for job in batch]
        tally = gather(Server(cfg, tokenizer, model).answer(waiting, file), len(waiting))
    if len(tally.refused) == len(jobs):
        raise JobError(
            f"regenerate.prompts={list(cfg.regenerate.prompts)}: no prompt got an answer "
            f"({tally.log.reasons()}); give other prompts, or another verifier"
        )
    return tally


def in_batches(cfg: RunConfig, batches: list[list[Job]], file: AnswerFile) -> Iterator[Talk]:
    """Answer ``batches`` one after the other, each appended when complete."""
    if not batches:
        return
    device = pick_device(cfg.run.device, 0)
    dtype = getattr(torch, cfg.verifier.dtype.value)
    run = Regeneration(cfg, Verifier.load(cfg.verifier, cache_dir(cfg), device, dtype))
    for batch in batches:
        talks: list[Talk] = []
        for talk in run.answer(batch):
            talks.append(talk)
            yield talk
        save(talks, file, cfg.run.seed)


def gather(talks: Iterator[Talk], total: int) -> Tally:
    """Have all ``talks`` made, with their progress and rates shown."""
    tally = Tally()
    begin = time.perf_counter()
    bar = progress(talks, total, "answers", " answers")
    for talk in bar:
        tally.add(talk)
        if isinstance(bar, tqdm):
            rate = tally.tokens / (time.perf_counter() - begin)
            bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
    if total:
        tally.say(time.perf_counter() - begin)
    return tally


def main(cfg: RunConfig) -> None:
    use_threads(cfg.engine.threads)
    path = regenerate(cfg)
    say(f"answers: {path}")
    say(f"next: python -m data.preview data=jsonl data.path={path}")


if __name__ == "__main__":
    entry(main, running=())
