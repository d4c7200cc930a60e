"""The prepare stage: conversation files to tokenised samples, some of them held out, in one folder.

``cache/prepare-<fingerprint>/``: the fingerprint covers the data section, the files' contents, the
tokenizer and the chat template, and nothing of draft, unroll, loss or number of workers.

The main process reads rows and writes columns; workers decode, render and tokenise in between.
"""

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from tqdm import tqdm
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, fingerprint, progress, say
from conf.schema import ConfigError, DataSection, RunConfig
from data.answer_file import refuse_other_arguments
from data.columns import Columns
from data.corpus import FORMAT, Chosen, Origin, Provenance, SourceFacts, load_prepared, write
from data.encoder import BEYOND, Chunk, EncodedChunk, Encoder, EncoderJob
from data.prepare_report import say_summary
from data.records import PreparedData
from data.render import ChatTemplate, tokenizer_fingerprint
from data.rows import Row
from data.sources import FileDigest, RowLog, Source, digest, find_entries, read_rows
from data.spans import TEMPLATE_REASONS
from data.split import copies, split
from data.workers import encode_chunks
from models.facts import load_facts, load_tokenizer

COPY = "exact copy of an earlier sample (data.dedupe)"
CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
FREE = ("path", "workers")  # knobs that do not decide what the samples are
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
PLACEHOLDERS = ("image", "audio", "video", "boi", "eoi")  # of tokens that text models never read


@dataclass(frozen=True)
class Entry:
    """One entry of data.path."""

    path: str
    weight: float
    files: list[Source]
    digests: list[FileDigest]


@dataclass(frozen=True)
class Inputs:
    """All that the samples are made from."""

    section: DataSection
    entries: list[Entry]
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    vocab_size: int  # V, the rows of the verifier's embedding

    def provenance(self) -> Provenance:
        chosen = {key: value for key, value in asdict(self.section).items() if key not in FREE}
        contents = [[(file.name, file.sha256) for file in one.digests] for one in self.entries]
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        template = self.template.fingerprint()
        return Provenance(
            fingerprint(FORMAT, chosen, contents, tokenizer, template, self.vocab_size),
            path=list(self.section.path),
            template=self.template.location,
            template_hash=template,
            template_kwargs=self.section.template_kwargs,
            tokenizer_hash=tokenizer,
            vocab_size=self.vocab_size,
        )


def prepare(cfg: RunConfig) -> PreparedData:
    """Make the samples, or find them made; runs on one rank, with ``data.workers`` processes.

    Raises ConfigError for files that are not there, data without a usable row, too few
    conversations to hold one out, a chat template that yields no supervised token, and a tokenizer
    that is not the embedding's; JobError when a worker process dies.
    """
    inputs = gather(cfg)
    made_with = inputs.provenance()
    folder = folder_of(cfg, made_with)
    if folder.is_dir():
        say(f"prepare: nothing to do, {folder} holds these samples")
    else:
        make(cfg, inputs, made_with)
    prepared = load_prepared(folder)
    say_summary(cfg, prepared, inputs.template)
    return prepared


def make(cfg: RunConfig, inputs: Inputs, made_with: Provenance) -> None:
    log = RowLog()
    folder = folder_of(cfg, made_with)
    with disk_named(cfg), closing(Columns(folder)) as columns:
        sources = read_all(cfg, inputs, columns, log)
        if not log.rows_out:
            raise no_sample(inputs, log)
        chosen = choose(columns, cfg.data, log)
        if not chosen.held_out.any():
            raise ConfigError(
                f"data.path={paths_of(inputs)}: all {len(chosen.held_out)} samples are answers "
                "to one prompt or parts of one conversation, so none can be held out; give "
                "conversations of two ids or more"
            )
        write(folder, columns, chosen, log.summary(), Origin(made_with, sources))


@contextmanager
def disk_named(cfg: RunConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # what cannot be read is a ConfigError already
        if error.errno not in DISK_ERRORS:
            raise
        raise ConfigError(
            f"run.cache={cfg.run.cache}: the prepared data cannot be written ({error}); "
            "free space there or choose another run.cache"
        ) from error


def find_prepared(cfg: RunConfig) -> PreparedData:
    """What ``prepare`` made of this configuration. Raises ConfigError when it has not run."""
    folder = folder_of(cfg, gather(cfg).provenance())
    if not folder.is_dir():
        raise ConfigError(
            f"run.cache={cfg.run.cache}: holds no prepared data for this verifier and these data "
            "settings; run python -m data.prepare with the same overrides first"
        )
    return load_prepared(folder)


def folder_of(cfg: RunConfig, made_with: Provenance) -> Path:
    return cache_dir(cfg) / f"prepare-{made_with.fingerprint}"


def gather(cfg: RunConfig) -> Inputs:
    cache = cache_dir(cfg)
    tokenizer = load_tokenizer(cfg.verifier, cache)
    vocab_size = load_facts(cfg.verifier, cache).vocab_size
    refuse_larger_tokenizer(tokenizer, vocab_size)
    weights = cfg.data.weights or [1.0] * len(cfg.data.path)
    found = find_entries(cfg.data.path)
    entries = [
        Entry(path, weight, files, [digest(file) for file in files])
        for path, weight, files in zip(cfg.data.path, weights, found, strict=True)
    ]
    files = [file for one in entries for file in one.files]
    refuse_other_arguments(files, dict(cfg.data.template_kwargs))
    template = ChatTemplate(tokenizer, cfg.data.template_kwargs)
    return Inputs(cfg.data, entries, tokenizer, template, vocab_size)


def refuse_larger_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Raise ConfigError for a token that the embedding has no row for. Rows without one are fine.

    Placeholders of images and the like, which a text model keeps from its family, are let through:
    a row of data that holds one is skipped.
    """
    beyond = [(index, word) for word, index in tokenizer.get_vocab().items() if index >= vocab_size]
    if not beyond:
        return
    named = tokenizer.special_tokens_map.items()
    unread = {str(word) for name, word in named if name.split("_")[0] in PLACEHOLDERS}
    found = min(((index, word) for index, word in beyond if word not in unread), default=None)
    if found is not None:
        raise ConfigError(
            f"verifier.path={tokenizer.name_or_path}: its tokenizer has {found[1]!r} as token "
            f"{found[0]} and its embedding has {vocab_size} rows; give tokenizer and weights of "
            "one model, or resize the embedding"
        )


def paths_of(inputs: Inputs) -> str:
    return ",".join(inputs.section.path)


def read_all(cfg: RunConfig, inputs: Inputs, columns: Columns, log: RowLog) -> list[SourceFacts]:
    """Read and encode every row into ``columns``, and count what each entry gave."""
    job = EncoderJob(cfg.verifier, cfg.data, cache_dir(cfg), inputs.vocab_size)
    encoder = Encoder(job, inputs.template)
    sources = [SourceFacts(one.path, one.weight) for one in inputs.entries]
    limit = cfg.data.max_samples
    rows = sum(file.lines for one in inputs.entries for file in one.digests)
    bar = cast(tqdm, progress((), min(rows, limit or rows), "prepare", "row"))
    with closing(encode_chunks(chunks_of(inputs), encoder, cfg.data.workers)) as encoded:
        for found in encoded:
            chunk = found
            if limit is not None:
                chunk = found.first(limit - log.rows_out)
            tell(chunk, log)
            columns.add(chunk.samples)
            source = sources[chunk.source]
            sources[chunk.source] = replace(source, rows_in=source.rows_in + chunk.rows)
            bar.update(chunk.rows)
            if log.rows_out == limit:
                break
    bar.close()
    return sources


def chunks_of(inputs: Inputs) -> Iterator[Chunk]:
    for number, one in enumerate(inputs.entries):
        for rows in some_rows(one.files):
            yield Chunk(number, one.weight, rows)


def some_rows(files: list[Source]) -> Iterator[list[Row]]:
    """The rows of ``files``, CHUNK_ROWS or about CHUNK_BYTES at a time."""
    rows: list[Row] = []
    size = 0
    for file in files:
        for row in read_rows(file):
            rows.append(row)
            size += row.size
            if len(rows) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


def tell(chunk: EncodedChunk, log: RowLog) -> None:
    """Count the rows of a chunk."""
    log.rows_in += chunk.rows
    log.rows_out += len(chunk.sample_rows)
    for line in chunk.said:
        log.note(line.removeprefix("note: "))
    for outcome in chunk.outcomes:
        if outcome.refusal:
            log.skip(outcome.refusal, outcome.where)
        for name in outcome.changes:
            log.change(name)
        for note in outcome.notes:
            log.note(note)


def choose(columns: Columns, section: DataSection, log: RowLog) -> Chosen:
    """Which samples stay, and which of these are held out."""
    columns.finish()
    again = copies(columns.read("digest"))
    kept = ~again if section.dedupe else np.ones(len(again), np.bool_)
    for index in np.flatnonzero(~kept).tolist():
        log.rows_out -= 1
        log.skip(COPY, columns.id_of(index) if COPY not in log.first else "")
    names = ("base", "place", "prompt")
    bases, places, prompts = (columns.read(name)[kept] for name in names)
    held = split(bases, places, prompts, section.valid_share)
    return Chosen(kept, held.held_out, int(again.sum()), held.moved, held.overlap)


def no_sample(inputs: Inputs, log: RowLog) -> ConfigError:
    """The error for data that gave nothing: the template's fault, or the data's."""
    most = max(log.skipped, key=log.skipped.__getitem__, default="")
    if most == BEYOND:
        return ConfigError(
            f"data.max_length={inputs.section.max_length}: no answer begins before that token "
            f"({log.reasons()}); raise it"
        )
    if most in TEMPLATE_REASONS:
        return ConfigError(
            f"verifier.path={inputs.tokenizer.name_or_path}: its chat template "
            f"{inputs.template.location} yields no supervised token in {log.rows_in} rows "
            f"({log.reasons()}); give it a template that writes every answer as it stands"
        )
    reasons = log.reasons() or "the files are empty"
    return ConfigError(
        f"data.path={paths_of(inputs)}: no usable row ({reasons}); a row is a JSON object with "
        '"messages" of "role" and "content", and ends with an answer; prompts alone get answers '
        "from python -m data.regenerate"
    )


def main(cfg: RunConfig) -> None:
    prepare(cfg)


if __name__ == "__main__":
    entry(main)
