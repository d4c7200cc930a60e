"""The verifier as a side of a round, with its cache; the drafts' sides are in eval/drafters/.

Index table, of a draft with a cache. Text x[0..L] is committed, x[L] (the root, emitted last) has
no KV yet. Guesses are nodes of a tree below the root; a chain is a tree, too:

    verifier cache   rows 0..L-1; a round feeds x[L] and its guesses, one of depth k at position L+k
    draft cache      rows 0..L-1, row t made of x[t+1] and the verifier's states of x[t]
    depth 1          read from row L-1, for x[L+1]
    depth k+1        from the row of its parent, a guess of depth k with the draft's own output of
                     the row before, at position L-1+k; it sees its ancestors, and is dropped after

After a round that accepts n, rows L..L+n of the draft are made anew from verifier states, by the
first draft forward of the next round. Sequences of a batch have lengths, trees and n of their own.
"""

import torch
from torch import Tensor

from eval.propose import Proposal
from models.branches import Branches
from models.steps import Steps
from models.verifier import VerifierStates


class TargetDecoder:
    """The verifier with its cache. Its roots are the tokens emitted last."""

    def __init__(self, steps: Steps, batch: int, capacity: int):
        self.steps, self.verifier = steps, steps.verifier
        self.cache = steps.cache(batch, capacity)
        self.root = torch.empty(batch, 1, dtype=torch.long, device=self.verifier.device)
        self.states: VerifierStates  # of the rows fed last

    def prefill(self, prompts: Tensor, lengths: list[int]) -> Tensor:
        """Feed right-padded prompts [B, P]; logits [B, V] of the first tokens."""
        self.states = self.verifier.states(prompts, self.cache)
        ends = torch.tensor(lengths, device=prompts.device)
        self.cache.advance(ends)
        rows = torch.arange(len(lengths), device=prompts.device)
        return self.verifier.logits_from(self.states.last[rows, ends - 1])

    def step(self) -> Tensor:
        """Feed the roots alone: logits [B, V] of the next tokens."""
        step = self.steps.take(self.root, self.cache)
        self.states = step.states
        self.cache.advance(1)
        return step.logits[:, -1]

    def score(self, proposal: Proposal, branches: Branches | None) -> Tensor:
        """Feed roots and guesses: logits [B, M+1, V]. ``commit`` says what stays.

        ``branches``: how guesses hang together; None: they are a chain.
        """
        tokens = torch.cat([self.root, proposal.ids], -1)
        step = self.steps.take(tokens, self.cache, branches)
        self.states = step.states
        return step.logits

    def commit(self, path: Tensor, accepted: list[int], line: bool) -> VerifierStates:
        """Keep the roots and the first ``accepted`` nodes of ``path`` [B, K], 1 and up.

        Gives their states [B, max(accepted) + 1, ...]; rows beyond a sequence's own are junk.
        ``line``: the guesses are a chain, which leaves every row where it is.
        """
        longest = max(accepted)
        self.cache.commit(path, accepted, line)
        if line:
            return self.states[:, : longest + 1]
        rows = torch.cat([torch.zeros_like(path[:, :1]), path[:, :longest]], -1)
        batch = torch.arange(len(rows), device=rows.device)
        return self.states[batch[:, None], rows]

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        chosen = torch.tensor(rows, device=self.root.device)
        self.cache.keep(chosen)
        self.root = self.root[chosen]
