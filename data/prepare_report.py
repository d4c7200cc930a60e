"""What the prepare stage tells a person: rows, sources, shares, draft vocabulary, overlap."""

from pathlib import Path

import numpy as np

from conf.runtime import say
from conf.schema import RunConfig
from data.corpus import Facts, read_facts
from data.dialects import RowRefused
from data.records import Conversation, PreparedData
from data.render import ChatTemplate
from data.sources import RowLog, find_files, read_conversations
from data.split import prompt_digest
from data.template import encode_prompt
from models.vocab import DraftVocab, draft_vocab_size


def say_summary(cfg: RunConfig, prepared: PreparedData, template: ChatTemplate) -> None:
    facts = read_facts(prepared.folder)
    say_rows(facts)
    tokens = sum(source.tokens for source in facts.sources)
    supervised = sum(source.supervised for source in facts.sources)
    say(f"  tokens {tokens:,}, of which {supervised / tokens:.1%} are supervised")
    say(
        f"  duplicates {facts.duplicates:,}; held-out samples whose prompt is trained on "
        f"{facts.overlap:,}, besides {facts.moved:,} that were moved to training for it"
    )
    say_vocabulary(cfg, prepared)
    say_overlap(cfg, prepared, template)
    say(f"  in {prepared.folder}")


def say_rows(facts: Facts) -> None:
    rows = facts.rows
    say(
        f"prepare: {rows.rows_in:,} rows in, {rows.rows_out:,} samples out "
        f"({facts.held_out:,} held out)"
    )
    for reason, count in sorted(rows.reasons.items(), key=lambda item: -item[1]):
        say(f"  skipped {count:,}: {reason} (first: {rows.first[reason]})")
    for name, count in sorted(rows.changed.items(), key=lambda item: -item[1]):
        say(f"  changed {count:,}: {name}")
    if len(facts.sources) > 1:
        for source in facts.sources:
            say(
                f"  {source.path}, weight {source.weight:g}: {source.rows_in:,} rows in, "
                f"{source.samples:,} samples out with {source.supervised:,} supervised tokens"
            )


def say_vocabulary(cfg: RunConfig, prepared: PreparedData) -> None:
    total = prepared.token_counts.numel()
    size = draft_vocab_size(cfg.draft, total)
    vocab = DraftVocab.from_counts(prepared.token_counts, size)
    seen = int((prepared.token_counts > 0).sum())
    training = vocab.coverage(prepared.token_counts)
    held_out = vocab.coverage(prepared.held_out_counts)
    unseen = f", {size - seen:,} of them never seen there" if seen < size else ""
    say(
        f"  draft vocabulary: {size:,} of {total:,} tokens cover {training:.1%} of the training "
        f"labels and {held_out:.1%} of the held-out ones{unseen}"
    )


def say_overlap(cfg: RunConfig, prepared: PreparedData, template: ChatTemplate) -> None:
    """How many prompts of ``eval.prompts`` are training prompts, token for token.

    Told at every call and not stored: the prepared data does not depend on eval.prompts.
    """
    there = [path for path in cfg.eval.prompts if Path(path).expanduser().is_file()]
    if not there:
        return
    log = RowLog()
    asked = []
    for talk in read_conversations(find_files(there, "eval.prompts"), log, prompts=True):
        try:
            asked.append(first_prompt(talk, template))
        except RowRefused as refusal:
            log.withdraw(refusal, talk.id)
    training = prepared.samples.prompts[~prepared.samples.held_out].numpy()
    found = int(np.isin(np.array(asked, np.int64), training).sum())
    unread = f" ({log.rows_in - log.rows_out:,} rows not compared)" if log.skipped else ""
    say(f"  eval.prompts: {found:,} of {len(asked):,} are training prompts{unread}")


def first_prompt(talk: Conversation, template: ChatTemplate) -> int:
    """The digest of what the verifier reads before its first answer."""
    last = next(i for i, turn in enumerate(talk.turns) if turn.role == "user")
    ids = encode_prompt(talk.turns[: last + 1], template.tokenizer, template.kwargs)
    return prompt_digest(ids)
