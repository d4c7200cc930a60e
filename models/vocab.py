"""The draft vocabulary: which verifier tokens the draft head can propose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.schema import DraftSection


def draft_vocab_size(section: DraftSection, total: int) -> int:
    """Vd of a head for a verifier of ``total`` tokens: what is asked for, V at most."""
    return total if isinstance(section.vocab_size, str) else min(section.vocab_size, total)


@dataclass(frozen=True)
class DraftVocab:
    """``d2t`` [Vd] int64: offsets, target id = draft id + d2t. ``t2d`` [V] bool: membership."""

    d2t: Tensor
    t2d: Tensor

    @classmethod
    def from_counts(cls, counts: Tensor, size: int) -> "DraftVocab":
        """Take the ``size`` most frequent tokens of ``counts`` [V]; ties go to the smaller id.

        With a ``size`` of V or more every token is in. Tokens never seen fill what is left over,
        smallest ids first, so that the size is always the one asked for.
        """
        total = counts.numel()
        size = min(size, total)
        order = counts.argsort(descending=True, stable=True)
        return cls.of_ids(order[:size].sort().values, total)

    @classmethod
    def of_ids(cls, ids: Tensor, total: int) -> "DraftVocab":
        """``ids`` [Vd] of a verifier with ``total`` tokens, ascending."""
        member = torch.zeros(total, dtype=torch.bool)
        member[ids] = True
        return cls(ids - torch.arange(len(ids)), member)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the verifier ids, ascending."""
        return self.d2t + torch.arange(self.d2t.numel())

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens that are members: no acceptance can exceed it."""
        total = int(counts.sum())
        return float(counts[self.t2d].sum()) / total if total else 0.0
