"""The floor: a table of the training answers' phrases in the draft's place, walked without a model.

The same table as a draft of its own is eval/drafters/phrases.py.
"""

from collections.abc import Sequence

from conf.schema import Phrases
from eval.acceptance import Counters, walk
from models.phrases import PhraseConfig, PhraseTable

FLOOR_ORDER = 4


def floor_config(vocab_size: int) -> PhraseConfig:
    return PhraseConfig(vocab_size, FLOOR_ORDER, Phrases.table.value)


def table_hits(table: PhraseTable, text: Sequence[int], row: int, n_draft: int) -> int:
    """How many of ``n_draft`` guesses after x[row+1] are right, each on top of its own."""
    for k in range(n_draft):
        at = row + 2 + k
        # As long as every guess was right, the guesses and the text are the same context.
        before = text[max(0, at - table.config.order) : at]
        if at >= len(text) or table.guess(before) != text[at]:
            return k
    return n_draft


def table_walk(
    table: PhraseTable, text: Sequence[int], first_row: int, end_row: int, n_draft: int
) -> Counters:
    """``walk`` with this table as the draft; ``text`` may reach past the answer."""
    rows = range(first_row, max(first_row, end_row))
    hits = [table_hits(table, text, row, n_draft) for row in rows]
    return walk([0] * first_row + hits, first_row, end_row, n_draft)
