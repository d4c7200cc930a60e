"""The preview: shows a person what is supervised, how long samples are, what is covered.

Prints a few samples and the figures, and writes a page with more samples to leaf through.

python -m data.preview [overrides]
"""

import sys
from itertools import groupby
from pathlib import Path

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, say, write_atomically
from conf.schema import ConfigError, RunConfig
from data.corpus import read_facts
from data.origin import find_agreement
from data.prepare import prepare
from data.prepare_report import vocabulary_line
from data.preview_page import PageWriter
from data.records import PreparedData, TokenizedSample
from models.start import vocabulary_to_train
from models.verifier import load_facts, load_tokenizer
from models.vocab import DraftVocab

SHOWN = 2  # samples printed
BINS = 10
BAR = 40  # characters of the longest bar
GREEN, PLAIN = "\033[1;32m", "\033[0m"


def marked_text(sample: TokenizedSample, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """The sample as text, special tokens included, supervised parts in green or in ⟦ ⟧."""
    opening, closing = (GREEN, PLAIN) if colour else ("⟦", "⟧")
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    parts = []
    for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        parts.append(f"{opening}{text}{closing}" if supervised else text)
    return "".join(parts)


def histogram(lengths: list[int]) -> list[str]:
    """Lines of a text histogram, one a bin of equal width."""
    longest = max(lengths)
    width = -(-longest // BINS)
    counts = [0] * -(-longest // width)
    for length in lengths:
        counts[(length - 1) // width] += 1
    lines = []
    for i, count in enumerate(counts):
        bar = "█" * -(-count * BAR // max(counts))
        lines.append(f"{i * width + 1:>7,} to {(i + 1) * width:>6,}  {count:>8,}  {bar}")
    return lines


def figures(cfg: RunConfig, prepared: PreparedData, vocab: DraftVocab) -> list[str]:
    """Lines about all of the samples."""
    lengths = prepared.samples.lengths.tolist()
    supervised = int(prepared.samples.mask.sum())
    return [
        *row_lines(cfg, prepared),
        "",
        f"tokens a sample ({len(lengths):,} samples, {sum(lengths):,} tokens)",
        *histogram(lengths),
        "",
        f"supervised: {supervised:,} tokens, {supervised / sum(lengths):.1%} of all",
        agreement_line(cfg, prepared),
        vocabulary_line(prepared, vocab),
    ]


def row_lines(cfg: RunConfig, prepared: PreparedData) -> list[str]:
    """Where the samples are from, and what became of the rows that are none."""
    rows, made = prepared.skipped, read_facts(prepared.folder).made_with
    held_out = int(prepared.samples.held_out.sum())
    greedy = int(prepared.samples.greedy.sum())
    skipped = sorted(rows.reasons.items(), key=lambda item: -item[1])
    return [
        f"data: {', '.join(cfg.data.path)}",
        f"chat template: {made.template}, arguments {made.template_kwargs or 'none'}",
        f"{rows.rows_in:,} rows in, {rows.rows_out:,} samples out ({held_out:,} held out; "
        f"{greedy:,} end with the verifier's greedy answer)",
        *(f"  skipped {count:,}: {reason}" for reason, count in skipped),
    ]


def agreement_line(cfg: RunConfig, prepared: PreparedData) -> str:
    agreement = find_agreement(cfg, prepared)
    if agreement is None:
        return (
            "the verifier's top-1 agreement: not known before a capture of these samples; run "
            "torchrun -m data.capture with the same overrides"
        )
    return f"the verifier's top choice is {agreement.top1:.1%} of the supervised tokens"


def write_page(cfg: RunConfig, prepared: PreparedData, page: PageWriter, lines: list[str]) -> Path:
    """``preview.samples`` of the samples, held-out ones among them, spread over all of them."""
    count, wanted = len(prepared.samples), cfg.preview.samples
    places = sorted({i * count // wanted for i in range(wanted)})
    held_out = prepared.samples.held_out
    if not held_out[places].any():
        places = sorted({*places[: wanted - 1], int(held_out.int().argmax())})
    path = Path(cfg.preview.page or prepared.folder / "preview.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page.page([prepared.samples[i] for i in places], lines))
    except OSError as error:
        raise ConfigError(
            f"preview.page={path}: cannot be written ({error.strerror}); name a file in a folder "
            "that takes it"
        ) from error
    return path


def main(cfg: RunConfig) -> None:
    prepared = prepare(cfg)
    tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
    for number, sample in enumerate(prepared.samples[:SHOWN], 1):
        kind = "held out" if sample.held_out else "training"
        share = float(sample.loss_mask.float().mean())
        say(f"\nsample {number}: {sample.id} ({kind}, {share:.1%} of its tokens supervised)")
        say(marked_text(sample, tokenizer, colour=sys.stdout.isatty()))
    facts = load_facts(cfg.verifier, cache_dir(cfg))
    vocab = vocabulary_to_train(cfg.draft, facts, prepared.token_counts)
    lines = figures(cfg, prepared, vocab)
    say()
    for line in lines:
        say(line)
    path = write_page(cfg, prepared, PageWriter(tokenizer, vocab.t2d), lines)
    say(f"\npage to leaf through: {path} (open it in a browser)")
    say("next: torchrun train/main.py with the same overrides")


if __name__ == "__main__":
    entry(main)
