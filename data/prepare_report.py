"""What the prepare stage tells a person: rows, sources, shares, draft vocabulary, overlap."""

from pathlib import Path

import numpy as np

from conf.runtime import say
from conf.schema import RunConfig
from data.corpus import Facts, read_facts
from data.dialects import RowRefused, read_row
from data.records import Conversation, PreparedData
from data.render import ChatTemplate
from data.sources import find_files, read_rows
from data.split import prompt_digest
from data.template import encode_prompt
from models.vocab import DraftVocab, draft_vocab_size

TURN_KEYS = ("conversations", "messages", "turns")
USER = ("user", "human")


def say_summary(cfg: RunConfig, prepared: PreparedData, template: ChatTemplate) -> None:
    facts = read_facts(prepared.folder)
    say_rows(facts)
    tokens = sum(source.tokens for source in facts.sources)
    supervised = sum(source.supervised for source in facts.sources)
    say(f"  tokens {tokens:,}, of which {supervised / tokens:.1%} are supervised")
    say(
        f"  duplicates {facts.duplicates:,}; moved from held-out to training, where their prompt "
        f"is too: {facts.moved:,}"
    )
    if facts.overlap:
        say(
            f"  all samples hang together by their prompts: {facts.overlap:,} held-out ones have "
            "a prompt that is trained on"
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
    asked: list[int] = []
    unread = 0
    for file in find_files(there, "eval.prompts"):
        for row in read_rows(file):
            try:
                turns = read_row(first_turn(row.decode()), row.where, prompts=True)
                asked.append(digest_of_prompt(turns.conversation, template))
            except RowRefused:
                unread += 1
    training = prepared.samples.prompts[~prepared.samples.held_out].numpy()
    found = int(np.isin(np.array(asked, np.int64), training).sum())
    more = f" ({unread:,} rows not compared)" if unread else ""
    say(f"  eval.prompts: {found:,} of {len(asked):,} are training prompts{more}")


def first_turn(value: object) -> object:
    """A record of a prompt file, cut after its first user turn.

    There all user turns may follow one another, or stand as texts below ``turns``.
    """
    if not isinstance(value, dict):
        return value
    listed = next((value[key] for key in TURN_KEYS if isinstance(value.get(key), list)), [])
    turns = [
        {"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in listed
    ]
    asks = [isinstance(turn, dict) and turn.get("role", turn.get("from")) in USER for turn in turns]
    return {**value, "messages": turns[: asks.index(True) + 1] if True in asks else turns}


def digest_of_prompt(talk: Conversation, template: ChatTemplate) -> int:
    """The digest of what the verifier reads before its first answer."""
    return prompt_digest(encode_prompt(talk.turns, template.tokenizer, template.kwargs))
