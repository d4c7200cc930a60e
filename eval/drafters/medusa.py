"""Medusa's heads as the draft's side of a round: level k is head k, whatever stands above it.

The root x[L] was emitted last and has no state yet: all heads read last[L-1], and head k guesses
x[L+1+k]. There is no cache, and no limit of positions but the verifier's.
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from conf.schema import ConfigError
from conf.shapes import Shape
from models.medusa import MedusaDraft
from models.verifier import VerifierStates


class MedusaDrafter:
    """The heads, and the state they read in each sequence."""

    last_position = sys.maxsize  # the verifier's limit comes first

    def __init__(self, draft: MedusaDraft, device: torch.device):
        self.draft = draft
        own_ids = torch.arange(draft.config.draft_vocab_size, device=device)
        self.target_ids = draft.to_target_ids(own_ids)  # [Vd]
        self._last: Tensor  # [B, D] the verifier's state before each root
        self._level = 0  # of the guesses proposed last

    def refuse(self, shape: Shape) -> None:
        """Raise ConfigError for a shape with more levels than there are heads."""
        heads = self.draft.config.heads
        if shape.depth > heads:
            raise ConfigError(
                f"shape {shape.name}: its guesses are {shape.depth} deep, and the draft has "
                f"{heads} Medusa heads, one a level; take a shape of at most {heads} levels "
                f"(eval.n_draft, eval.n_sweep, eval.trees), or train with ttt.depth={shape.depth}"
            )

    def begin(
        self, prompts: Tensor, states: VerifierStates, roots: Tensor, lengths: Sequence[int]
    ) -> None:
        """prompts [B, P] right-padded, of ``lengths`` tokens, their states [B, P, ...], and the
        first tokens emitted [B, 1]."""
        self.feed(roots, states, lengths)

    def feed(self, tokens: Tensor, states: VerifierStates, counts: Sequence[int]) -> None:
        """Of new committed rows [B, R, ...] each sequence has its first ``counts``; the last of
        them is the one before its root."""
        ends = torch.tensor(counts, device=states.last.device) - 1
        self._last = states.last[torch.arange(len(counts), device=ends.device), ends]

    def start(self) -> Tensor:
        """Logits [B, 1, Vd] of the roots' children."""
        self._level = 0
        return self.draft.logits(self._last, 0)[:, None]

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Logits [B, W, Vd] of the children of W nodes: the same for each.

        The last head answers for deeper levels: no shape has one, but each level is timed.
        """
        self._level = min(self._level + 1, self.draft.config.heads - 1)
        logits = self.draft.logits(self._last, self._level)[:, None]
        return logits.expand(-1, ids.shape[1], -1)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        self._last = self._last[torch.tensor(rows, device=self._last.device)]
