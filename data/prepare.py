"""The prepare stage: conversation files to tokenised samples, some of them held out, in one folder.

``cache/prepare-<fingerprint>/``: the fingerprint covers the data section, the files' contents, the
tokenizer and the chat template, and nothing of draft, unroll or loss.
"""

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, fingerprint, progress, say
from conf.schema import ConfigError, DataSection, RunConfig
from data.corpus import FORMAT, Corpus, Provenance, load_prepared, read_facts, write
from data.dialects import RowRefused
from data.records import PreparedData
from data.render import ChatTemplate, tokenizer_fingerprint
from data.sources import FileDigest, RowLog, Source, digest, find_files, read_conversations
from data.template import TEMPLATE_REASONS, encode
from models.verifier import load_facts, load_tokenizer

CUT_SHORT = "longer than data.max_length: cut there"
BEYOND = "no answer within data.max_length"
ANSWER_NUMBER = re.compile(r"#\d+$")  # data.regenerate numbers the answers of one prompt


@dataclass(frozen=True)
class Inputs:
    """All that the samples are made from."""

    section: DataSection
    files: list[Source]
    digests: list[FileDigest]
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    vocab_size: int  # V, the rows of the verifier's embedding

    def provenance(self) -> Provenance:
        chosen = {key: value for key, value in asdict(self.section).items() if key != "path"}
        contents = [(file.name, file.sha256) for file in self.digests]
        tokenizer = tokenizer_fingerprint(self.tokenizer)
        template = self.template.fingerprint()
        return Provenance(
            fingerprint(FORMAT, chosen, contents, tokenizer, template, self.vocab_size),
            path=list(self.section.path),
            template=self.template.origin,
            template_hash=template,
            template_kwargs=self.section.template_kwargs,
            tokenizer_hash=tokenizer,
            vocab_size=self.vocab_size,
        )


def prepare(cfg: RunConfig) -> PreparedData:
    """Make the samples, or find them made. Runs in one process.

    Raises ConfigError for files that are not there, data without a usable row, too few
    conversations to hold one out, and a chat template that yields no supervised token.
    """
    inputs = gather(cfg)
    made_with = inputs.provenance()
    folder = folder_of(cfg, made_with)
    if folder.is_dir():
        prepared = load_prepared(folder)
        say(f"prepare: nothing to do, {folder} holds these {len(prepared.samples):,} samples")
        return prepared
    log = RowLog()
    corpus = tokenise(inputs, log)
    if not corpus.ids:
        raise no_sample(inputs, log)
    held_out = split(corpus.ids, cfg.data.valid_share)
    if not any(held_out):
        raise ConfigError(
            f"data.path={joined(inputs)}: all {len(held_out)} samples answer one prompt, so none "
            "can be held out; give conversations of two ids or more"
        )
    write(folder, corpus, held_out, log.summary(), made_with)
    prepared = load_prepared(folder)
    say_summary(prepared, log)
    return prepared


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
    files = find_files(cfg.data.path)
    cache = cache_dir(cfg)
    tokenizer = load_tokenizer(cfg.verifier, cache)
    return Inputs(
        section=cfg.data,
        files=files,
        digests=[digest(file) for file in files],
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer, cfg.data.template_kwargs),
        vocab_size=load_facts(cfg.verifier, cache).vocab_size,
    )


def joined(inputs: Inputs) -> str:
    return ",".join(inputs.section.path)


def tokenise(inputs: Inputs, log: RowLog) -> Corpus:
    """Read, encode and cut every conversation; one that gives no sample is counted in ``log``."""
    section = inputs.section
    corpus = Corpus()
    rows = min(sum(file.lines for file in inputs.digests), section.max_samples or 1 << 62)
    conversations = read_conversations(inputs.files, log, section.max_samples)
    for conversation in progress(conversations, rows, "prepare", "row"):
        try:
            tokens, mask = encode(
                conversation, inputs.tokenizer, section.template_kwargs, section.last_turn_only
            )
            if not any(mask[: section.max_length]):
                raise RowRefused(BEYOND)
        except RowRefused as refusal:
            log.withdraw(refusal, conversation.id)
            continue
        if len(tokens) > section.max_length:
            log.change(CUT_SHORT)
        if max(tokens) >= inputs.vocab_size:
            raise ConfigError(
                f"verifier.path={inputs.tokenizer.name_or_path}: its tokenizer gives token "
                f"{max(tokens)} and its embedding has {inputs.vocab_size} rows; give tokenizer "
                "and weights of one model"
            )
        corpus.add(conversation, tokens[: section.max_length], mask[: section.max_length])
    return corpus


def no_sample(inputs: Inputs, log: RowLog) -> ConfigError:
    """The error for data that gave nothing: the template's fault, or the data's."""
    if any(reason in TEMPLATE_REASONS for reason in log.skipped):
        return ConfigError(
            f"verifier.path={inputs.tokenizer.name_or_path}: its chat template "
            f"{inputs.template.origin} yields no supervised token in {log.rows_in} rows "
            f"({log.reasons()}); give it a template that writes every answer as it stands"
        )
    reasons = log.reasons() or "the files are empty"
    return ConfigError(
        f"data.path={joined(inputs)}: no usable row ({reasons}); a row is a JSON object with "
        '"messages" of "role" and "content", and ends with an answer'
    )


def split(ids: list[str], share: float) -> list[bool]:
    """Which samples are held out: about ``share`` of the conversations, all answers of each.

    A conversation's place depends on its id alone, so it stays where it is when data is added.
    At least one is held out and one is not, unless there is only one: then none is.
    """
    places = {base: place(base) for base in map(base_id, ids)}
    held = {base for base, at in places.items() if at < share}
    if not held:
        held = {min(places, key=places.__getitem__)}
    if len(held) == len(places):
        held.remove(max(places, key=places.__getitem__))
    return [base_id(name) in held for name in ids]


def base_id(name: str) -> str:
    """The prompt's id: without the number of the answer."""
    return ANSWER_NUMBER.sub("", name)


def place(base: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int.from_bytes(hashlib.sha256(base.encode()).digest()[:6]) / (1 << 48)


def say_summary(prepared: PreparedData, log: RowLog) -> None:
    rows, facts = prepared.skipped, read_facts(prepared.folder)
    held_out = sum(sample.held_out for sample in prepared.samples)
    tokens = sum(sample.input_ids.numel() for sample in prepared.samples)
    supervised = sum(int(sample.loss_mask.sum()) for sample in prepared.samples)
    say(f"prepare: {rows.rows_in:,} rows in, {rows.rows_out:,} samples out ({held_out:,} held out)")
    for reason, count in sorted(rows.reasons.items(), key=lambda item: -item[1]):
        say(f"  skipped {count:,}: {reason} (first: {log.first[reason]})")
    for name, count in sorted(rows.changed.items(), key=lambda item: -item[1]):
        say(f"  changed {count:,}: {name}")
    say(f"  tokens {tokens:,}, of which {supervised / tokens:.1%} are supervised")
    say(f"  duplicates {facts['duplicates']:,}; held-out prompts in training {facts['overlap']:,}")
    say(f"  written to {prepared.folder}")


def main(cfg: RunConfig) -> None:
    prepare(cfg)


if __name__ == "__main__":
    entry(main)
