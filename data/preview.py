"""The preview: shows a person which text is supervised, how long samples are, what is covered.

python -m data.preview [overrides]
"""

import sys
from itertools import groupby

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.compose import entry
from conf.runtime import cache_dir, say
from conf.schema import RunConfig
from data.prepare import prepare
from data.records import TokenizedSample
from models.verifier import load_tokenizer

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


def main(cfg: RunConfig) -> None:
    prepared = prepare(cfg)
    tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
    for number, sample in enumerate(prepared.samples[:SHOWN], 1):
        kind = "held out" if sample.held_out else "training"
        share = float(sample.loss_mask.float().mean())
        say(f"\nsample {number}: {sample.id} ({kind}, {share:.1%} of its tokens supervised)")
        say(marked_text(sample, tokenizer, colour=sys.stdout.isatty()))
    lengths = prepared.samples.lengths.tolist()
    say(f"\ntokens a sample ({len(lengths):,} samples, {sum(lengths):,} tokens)")
    for line in histogram(lengths):
        say(line)
    supervised = int(prepared.samples.mask.sum())
    say(f"\nsupervised: {supervised:,} tokens, {supervised / sum(lengths):.1%} of all")
    say("next: torchrun train/main.py with the same overrides")


if __name__ == "__main__":
    entry(main)
