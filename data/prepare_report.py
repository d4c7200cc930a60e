"""What the prepare stage tells a person: rows, sources, shares, draft vocabulary, overlap."""

import numpy as np

from conf.prompt_files import parse_prompt_file
from conf.runtime import cache_dir, say
from conf.schema import ConfigError, RunConfig
from data.corpus import Facts, read_facts
from data.dialects import RowRefused
from data.eval_prompts import EvalPrompt, read_prompts
from data.records import PreparedData
from data.render import ChatTemplate
from data.split import prompt_digest
from data.template import encode_prompt
from models.start import vocabulary_to_train
from models.verifier import load_facts
from models.vocab import DraftVocab


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
    verifier = load_facts(cfg.verifier, cache_dir(cfg))
    vocab = vocabulary_to_train(cfg.draft, verifier, prepared.token_counts)
    say(f"  {vocabulary_line(prepared, vocab)}")
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


def vocabulary_line(prepared: PreparedData, vocab: DraftVocab) -> str:
    """How much of the labels the draft vocabulary holds."""
    total, size = vocab.t2d.numel(), vocab.d2t.numel()
    seen = int((prepared.token_counts > 0).sum())
    training = vocab.coverage(prepared.token_counts)
    held_out = vocab.coverage(prepared.held_out_counts)
    unseen = f", {size - seen:,} of them never seen there" if seen < size else ""
    return (
        f"draft vocabulary: {size:,} of {total:,} tokens cover {training:.1%} of the training "
        f"labels and {held_out:.1%} of the held-out ones{unseen}"
    )


def say_overlap(cfg: RunConfig, prepared: PreparedData, template: ChatTemplate) -> None:
    """How many prompts of ``eval.prompts`` are training prompts, token for token.

    The first turn of each counts. Told at every call and not stored: the prepared data does not
    depend on eval.prompts. Files that the evaluation itself will refuse are only counted here.
    """
    there = [text for text in cfg.eval.prompts if parse_prompt_file(text).path.is_file()]
    if not there:
        return
    asked: list[int] = []
    files = rows = 0
    for text in there:
        try:
            found = read_prompts([text])
        except ConfigError:
            files += 1
            continue
        rows += sum(found.skipped.reasons.values())
        for prompt in found.prompts:
            try:
                asked.append(digest_of_first(prompt, template))
            except RowRefused:
                rows += 1
    training = prepared.samples.prompts[~prepared.samples.held_out].numpy()
    hits = int(np.isin(np.array(asked, np.int64), training).sum())
    left = [f"{n:,} {name}" for n, name in ((rows, "rows"), (files, "files")) if n]
    more = f" ({' and '.join(left)} not compared)" if left else ""
    say(f"  eval.prompts: {hits:,} of {len(asked):,} are training prompts{more}")


def digest_of_first(prompt: EvalPrompt, template: ChatTemplate) -> int:
    """The digest of what the verifier reads before its first answer."""
    first = next(i for i, turn in enumerate(prompt.turns) if turn.role == "user")
    turns = prompt.turns[: first + 1]
    return prompt_digest(encode_prompt(turns, template.tokenizer, template.kwargs))
