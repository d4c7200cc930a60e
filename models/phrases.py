"""The n-gram family: phrases of the context itself, and a back-off table of the training answers.

Nothing is learnt by gradients and no state of the verifier is read: the floor that a trained draft
must clear. ``context`` is prompt lookup (github.com/apoorvumang/prompt-lookup-decoding); the table
backs off from the longest context it knows to shorter ones, as Brants et al. 2007 do.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from conf.schema import ConfigError, DraftFamily, DraftSection, Phrases
from models.draft_limits import LARGEST
from models.verifier import VerifierFacts

KEPT = 64  # successors of a context in the table; more would be ranks that no tree asks for
MOST_ORDER = 16


@dataclass(frozen=True)
class PhraseConfig:
    """Sizes of a table; all that is needed to read one."""

    vocab_size: int
    order: int  # tokens of a phrase, the guessed one included
    source: str  # a value of Phrases
    contexts: int = 0  # C of the table
    entries: int = 0  # E, successors of all contexts

    @classmethod
    def of(cls, section: DraftSection, facts: VerifierFacts) -> "PhraseConfig":
        return cls(facts.vocab_size, section.order, section.phrases.value)

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return self.order - 1

    @property
    def looks_up(self) -> bool:
        return self.source != Phrases.table.value

    def to_json(self) -> str:
        return json.dumps({"family": DraftFamily.ngram.value, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "PhraseConfig":
        """Raises ConfigError when the text is no JSON, or has other keys or values out of range."""
        try:
            known = json.loads(text)
            known.pop("family")
            config = cls(**known)
            Phrases(config.source)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"draft.json: not a phrase table of this version ({error})"
            ) from error
        sizes = [("vocab_size", 1, LARGEST), ("order", 1, MOST_ORDER)]
        sizes += [("contexts", 0, 2**31), ("entries", 0, 2**31)]
        for name, least, most in sizes:
            value = getattr(config, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"draft.json: {name}={value!r}: must be a whole number in {least}..{most}; "
                    "give the file as training wrote it"
                )
        return config


class PhraseTable(nn.Module):
    """Integer tensors: C contexts and the successors of each, the most frequent first."""

    def __init__(self, config: PhraseConfig):
        super().__init__()
        self.config = config
        sizes = {
            "contexts": (config.contexts, config.longest),  # filled up on the left with -1
            "firsts": (config.contexts + 1,),  # where the successors of each begin
            "tokens": (config.entries,),
            "counts": (config.entries,),
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.int32))
        self.contexts: Tensor
        self.firsts: Tensor
        self.tokens: Tensor
        self.counts: Tensor
        self._known: dict[tuple[int, ...], Successors] | None = None

    @classmethod
    def counted(cls, config: PhraseConfig, texts: Iterable[list[int]]) -> "PhraseTable":
        """Count the successors in ``texts``; contexts do not cross from one to the next.

        Raises ConfigError when there is none.
        """
        counts: dict[tuple[int, ...], dict[int, int]] = {}
        for text in texts:
            for i, token in enumerate(text):
                for size in range(min(i, config.longest) + 1):
                    successors = counts.setdefault(tuple(text[i - size : i]), {})
                    successors[token] = successors.get(token, 0) + 1
        if not counts:
            raise ConfigError(
                "data.path: no training answer has a token for the n-gram table; give more data or "
                "hold out less with data.valid_share"
            )
        kept = [sorted(found.items(), key=by_count)[:KEPT] for found in counts.values()]
        entries = torch.tensor([pair for of_one in kept for pair in of_one], dtype=torch.int32)
        ends = torch.tensor([0, *map(len, kept)]).cumsum(0)
        table = cls(replace(config, contexts=len(counts), entries=len(entries)))
        padded = [(-1,) * (config.longest - len(one)) + one for one in counts]
        table.contexts.copy_(torch.tensor(padded).view(table.contexts.shape))
        table.firsts.copy_(ends)
        table.tokens.copy_(entries[:, 0])
        table.counts.copy_(entries[:, 1])
        return table

    def after(self, context: tuple[int, ...]) -> "Successors | None":
        """What followed exactly ``context``; None where it was never seen."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(context)

    def _read(self) -> dict[tuple[int, ...], "Successors"]:
        firsts, tokens, counts = (t.tolist() for t in (self.firsts, self.tokens, self.counts))
        known: dict[tuple[int, ...], Successors] = {}
        for row, padded in enumerate(self.contexts.tolist()):
            own = slice(firsts[row], firsts[row + 1])
            context = tuple(token for token in padded if token >= 0)
            known[context] = Successors(tokens[own], counts[own])
        return known

    def guess(self, context: Sequence[int]) -> int:
        """The most frequent successor of the longest ending of ``context`` that the table knows;
        of equally frequent ones the smallest id."""
        assert self.config.entries, "a table is counted before it is asked"
        ending = tuple(context[-self.config.longest :]) if self.config.longest else ()
        while (found := self.after(ending)) is None:
            ending = ending[1:]
        return found.tokens[0]


@dataclass(frozen=True)
class Successors:
    """Of one context, the most frequent first and equally frequent ones by id."""

    tokens: list[int]
    counts: list[int]


def by_count(pair: tuple[int, int]) -> tuple[int, int]:
    """Sorts (token, count): the most frequent first, then the smallest id."""
    return -pair[1], pair[0]
