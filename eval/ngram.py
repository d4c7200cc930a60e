"""The floor: a table of the training answers' phrases in the draft's place."""

from collections.abc import Iterable, Sequence

from conf.schema import ConfigError
from eval.acceptance import Counters, walk


class NgramTable:
    """A back-off n-gram table over token ids: the floor that a trained head must clear.

    It guesses the most frequent successor of the longest context it has seen, up to ``order`` - 1
    tokens; of equally frequent ones the smallest id.
    """

    def __init__(self, order: int = 4):
        self.order = order
        self._best: dict[tuple[int, ...], int] = {}

    def fit(self, texts: Iterable[list[int]]) -> "NgramTable":
        """Count the successors in ``texts``; contexts do not cross from one to the next.

        Raises ConfigError when there is none.
        """
        counts: dict[tuple[int, ...], dict[int, int]] = {}
        for text in texts:
            for i, token in enumerate(text):
                for size in range(min(i, self.order - 1) + 1):
                    successors = counts.setdefault(tuple(text[i - size : i]), {})
                    successors[token] = successors.get(token, 0) + 1
        if not counts:
            raise ConfigError(
                "data.path: no training answer has a token for the n-gram table; give more data or "
                "hold out less with data.valid_share"
            )
        self._best = {
            context: min(successors, key=lambda token: (-successors[token], token))
            for context, successors in counts.items()
        }
        return self

    def guess(self, context: Sequence[int]) -> int:
        """The next token after ``context``, by the longest known ending of it."""
        assert self._best, "fit comes before guess"
        ending = tuple(context[-(self.order - 1) :]) if self.order > 1 else ()
        while ending not in self._best:
            ending = ending[1:]
        return self._best[ending]

    def hits(self, text: Sequence[int], row: int, n_draft: int) -> int:
        """How many of ``n_draft`` guesses after x[row+1] are right, each on top of its own."""
        for k in range(n_draft):
            at = row + 2 + k
            # As long as every guess was right, the guesses and the text are the same context.
            if at >= len(text) or self.guess(text[max(0, at - self.order) : at]) != text[at]:
                return k
        return n_draft

    def walk(self, text: Sequence[int], first_row: int, end_row: int, n_draft: int) -> Counters:
        """``walk`` with this table as the draft; ``text`` may reach past the answer."""
        rows = range(first_row, max(first_row, end_row))
        hits = [self.hits(text, row, n_draft) for row in rows]
        return walk([0] * first_row + hits, first_row, end_row, n_draft)
