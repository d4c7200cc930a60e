"""The n-gram family as a drafter: what followed the last tokens before, here or in training.

Logits are a function of the tokens before alone, those of the guesses included. A token's score is
that of the longest context after which it was seen; of equally long ones the sequence's own text
comes before the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

from conf.shapes import Shape
from models.phrases import PhraseTable
from models.verifier import VerifierStates

STEP = 8.0  # between contexts of two lengths, in logits: no shorter one outweighs a longer
RARE = 7.5  # most that a token lies below the first of its own context
RECENT = 8  # places of the text that are looked at for a phrase
FAR = 2**31  # no position is too far for a phrase


@dataclass
class Text:
    """The tokens of a sequence, and where each phrase in it was followed by what."""

    longest: int  # tokens of a phrase
    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            at = len(self.tokens)
            for size in range(1, min(self.longest, at) + 1):
                self.places.setdefault(tuple(self.tokens[at - size :]), []).append(at)
            self.tokens.append(token)

    def ending(self, path: list[int], size: int) -> tuple[int, ...] | None:
        """The last ``size`` tokens before the guess after ``path``; None where there are fewer."""
        if len(self.tokens) + len(path) < size:
            return None
        return tuple([*self.tokens[-self.longest :], *path][-size:] if size else [])

    def followers(self, path: list[int], ending: tuple[int, ...]) -> list[int]:
        """What followed ``ending`` in text and path, the most recent first, each token once."""
        near = [*self.tokens[-self.longest :], *path]
        size, own = len(ending), len(near) - len(path)
        found = [
            near[at]
            for at in range(len(near) - 1, own - 1, -1)
            if at >= size and tuple(near[at - size : at]) == ending
        ]
        found += [self.tokens[at] for at in self.places.get(ending, [])[: -RECENT - 1 : -1]]
        return list(dict.fromkeys(found[:RECENT]))


class PhraseDrafter:
    """Texts on the host; only the rows of logits are on the device."""

    def __init__(self, table: PhraseTable, batch: int, device: torch.device):
        self.table, self.config = table, table.config
        self.device = device
        self.target_ids = torch.arange(self.config.vocab_size, device=device)
        self.last_position = FAR
        self.texts = [Text(self.config.longest) for _ in range(batch)]
        self.paths: list[list[list[int]]] = []  # of the nodes asked for last, by sequence

    def refuse(self, shape: Shape) -> None:
        """Chains and trees of any kind."""

    def begin(
        self, prompts: Tensor, states: VerifierStates, roots: Tensor, lengths: list[int]
    ) -> None:
        rows = zip(prompts.tolist(), roots.tolist(), lengths, strict=True)
        self.texts = [Text(self.config.longest) for _ in lengths]
        for text, (prompt, root, length) in zip(self.texts, rows, strict=True):
            text.add([*prompt[:length], *root])

    def feed(self, tokens: Tensor, states: VerifierStates, counts: list[int]) -> None:
        for text, new, count in zip(self.texts, tokens.tolist(), counts, strict=True):
            text.add(new[:count])

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    def start(self) -> Tensor:
        self.paths = [[[]] for _ in self.texts]
        return self._logits()

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        rows = zip(self.paths, ids.tolist(), parents.tolist(), strict=True)
        self.paths = [
            [[*paths[parent], token] for token, parent in zip(tokens, above, strict=True)]
            for paths, tokens, above in rows
        ]
        return self._logits()

    def _logits(self) -> Tensor:
        """[B, W, V] after the nodes of ``paths``."""
        size = len(self.paths), len(self.paths[0]), self.config.vocab_size
        never = -STEP * (2 * self.config.order + 1)
        logits = torch.full(size, never, dtype=torch.float32, device=self.device)
        places: list[list[int]] = []
        values: list[float] = []
        for row, (text, paths) in enumerate(zip(self.texts, self.paths, strict=True)):
            for node, path in enumerate(paths):
                scores = self._scores(text, path)
                places += [[row, node, token] for token in scores]
                values += scores.values()
        if places:
            at = torch.tensor(places, device=self.device).unbind(-1)
            logits[at] = torch.tensor(values, device=self.device)
        return logits

    def _scores(self, text: Text, path: list[int]) -> dict[int, float]:
        """Logits of the tokens seen after some ending of text and path."""
        scores: dict[int, float] = {}
        for size in range(self.config.longest, -1, -1):
            ending = text.ending(path, size)
            if ending is None:
                continue
            level = -2 * STEP * (self.config.longest - size)
            if size and self.config.looks_up:
                for rank, token in enumerate(text.followers(path, ending)):
                    scores.setdefault(token, level - rank * log(2))  # half of what came later
            for token, share in self._shares(ending):
                scores.setdefault(token, level - STEP + max(log(share), -RARE))
        return scores

    def _shares(self, ending: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        """The table's successors of exactly ``ending``, each with its share."""
        found = self.table.after(ending)
        if found is not None:
            total = sum(found.counts)
            for token, count in zip(found.tokens, found.counts, strict=True):
                yield token, count / total
