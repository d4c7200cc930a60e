"""The emitted tokens of one sequence, and where they must end."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.schema import ConfigError

SLACK = 8  # tokens: of one character's bytes, and of markers that decode to nothing


@dataclass(frozen=True)
class StopStrings:
    """Texts that end an answer; the token that completes one is the last."""

    texts: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if not all(self.texts):
            raise ConfigError("eval.stop: an empty string ends every answer at once; leave it out")

    def complete(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` completes a text; the ones before completed none.

        A token adds a byte at least, so the texts lie within the last tokens.
        """
        longest = max(len(text.encode()) for text in self.texts) + SLACK
        ending = str(self.tokenizer.decode(list(tokens[-longest:])))
        return any(text in ending for text in self.texts)


@dataclass(frozen=True)
class Ends:
    """What ends an answer, besides the verifier's position limit."""

    max_new_tokens: int
    eos_ids: frozenset[int]
    stop: StopStrings | None = None


class Output:
    """Tokens until an end, and ``tail`` tokens past it that are recorded and not emitted."""

    def __init__(self, prompt_ids: Sequence[int], ends: Ends, positions: int, tail: int = 0):
        """``positions``: of the verifier. Raises ConfigError when they leave none for an answer."""
        if not 0 < len(prompt_ids) < positions:
            raise ConfigError(
                f"prompt of {len(prompt_ids)} tokens: must have 1 to {positions - 1}, one less "
                "than the verifier has positions; shorten or drop it"
            )
        self.tokens: list[int] = []
        self.tail: list[int] = []
        self.ended = False
        self.seconds = 0.0  # when it ended
        self._prompt = len(prompt_ids)
        self._positions = positions
        self._limit = min(ends.max_new_tokens, positions - self._prompt)
        self._tail = tail
        self._ends = ends

    @property
    def length(self) -> int:
        """Prompt and tokens, the tail included."""
        return self._prompt + len(self.tokens) + len(self.tail)

    @property
    def capacity(self) -> int:
        """The longest that ``length`` can get."""
        return min(self._prompt + self._limit + self._tail, self._positions)

    @property
    def complete(self) -> bool:
        """Ended, and the tail is as long as it can get."""
        full = len(self.tail) == self._tail or self.length == self._positions
        return self.ended and full

    def emit(self, tokens: Sequence[int]) -> None:
        """Append up to an end; what comes after it goes to the tail, the rest is dropped."""
        for token in tokens:
            if self.ended:
                if self.complete:
                    return
                self.tail.append(token)
                continue
            self.tokens.append(token)
            stop = self._ends.stop
            self.ended = (
                len(self.tokens) == self._limit
                or token in self._ends.eos_ids
                or (stop is not None and stop.complete(self.tokens))
            )
