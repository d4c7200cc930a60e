"""The two models as the sides of a round: the verifier and the draft, each with its cache.

Index table. Text x[0..L] is committed, x[L] (the root, emitted last) has no KV yet. Guesses are
nodes of a tree below the root; a chain is a tree, too:

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

from conf.schema import ConfigError
from eval.propose import Proposal
from models.branches import Branches
from models.eagle3 import DraftOutput, Eagle3Draft
from models.memory import DraftCache
from models.steps import Steps
from models.verifier import Verifier, VerifierStates


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

    def commit(self, path: Tensor, accepted: list[int], line: bool) -> Tensor:
        """Keep the roots and the first ``accepted`` nodes of ``path`` [B, K], 1 and up.

        Gives their states [B, max(accepted) + 1, A*D]; rows beyond a sequence's own are junk.
        ``line``: the guesses are a chain, which leaves every row where it is.
        """
        longest = max(accepted)
        self.cache.commit(path, accepted, line)
        if line:
            return self.states.aux[:, : longest + 1]
        rows = torch.cat([torch.zeros_like(path[:, :1]), path[:, :longest]], -1)
        width = self.states.aux.shape[-1]
        return self.states.aux.gather(1, rows[..., None].expand(-1, -1, width))

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        chosen = torch.tensor(rows, device=self.root.device)
        self.cache.keep(chosen)
        self.root = self.root[chosen]


class DraftDecoder:
    """The draft with its cache: rows made of verifier states stay, rows of guesses do not."""

    def __init__(self, draft: Eagle3Draft, batch: int, capacity: int, device: torch.device):
        self.draft = draft
        self.caches = [DraftCache(capacity, batch) for _ in draft.stack]
        self.last_position = draft.config.max_positions - 1
        own_ids = torch.arange(draft.config.draft_vocab_size, device=device)
        self.target_ids = draft.to_target_ids(own_ids)  # [Vd]
        self.committed = [0] * batch  # rows made of verifier states
        self._depth = 0  # of the nodes run last
        self._lineage: Tensor | None = None  # [B, W, S] the nodes so far that those run last see
        # Tokens and states of the rows to come; None while no sequence has had room for a guess.
        self._waiting: tuple[Tensor, Tensor] | None = None
        self._counts = [0] * batch  # how many of them each sequence has
        self._hidden: Tensor  # [B, W, D] the output of the nodes run last

    def feed(self, tokens: Tensor, aux: Tensor, counts: list[int]) -> None:
        """Forget guesses and note new rows: row t is x[t+1] in [B, R] and aux[t] in [B, R, A*D].

        Each sequence has its first ``counts`` of them. They run when the next round starts, so
        that nothing is computed after the last round.
        """
        self._truncate()
        self._waiting, self._counts = (tokens, aux), counts

    def remember(self, tokens: Tensor, aux: Tensor, counts: list[int]) -> None:
        """Rows of prompts, at once: nothing is guessed from them, so they only give keys."""
        positions = self._positions(torch.arange(tokens.shape[1], device=tokens.device))
        share = self.draft.share_of(tokens, asks=False)
        self.draft.remember(share, self.draft.fuse(aux), positions, self.caches)
        self._commit(counts)

    def start(self) -> Tensor:
        """Logits [B, 1, Vd] after the roots."""
        assert self._waiting is not None, "start before feed"
        tokens, aux = self._waiting
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        output = self._run(tokens, self.draft.fuse(aux), steps)
        self._commit(self._counts)
        rows = torch.arange(len(self._counts), device=tokens.device)
        last = torch.tensor(self._counts, device=tokens.device) - 1
        self._hidden = output.hidden[rows, last][:, None]
        self._depth, self._lineage = 0, None
        return self.draft.logits(output.normed[rows, last])[:, None]

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Logits [B, W, Vd] after nodes ``ids`` [B, W], target ids, one level below those before.

        ``parents`` [B, W]: the row of each one's parent in the call before.
        """
        hidden, width = self._hidden, ids.shape[1]
        if hidden.shape[1] > 1 or width > 1 or self._lineage is not None:
            hidden = hidden.gather(1, parents[..., None].expand(-1, -1, hidden.shape[-1]))
            self._branch(parents)
        output = self._run(ids, hidden, torch.full((width,), self._depth, device=ids.device))
        self._depth += 1
        self._hidden = output.hidden
        return self.draft.logits(output.normed)

    def _branch(self, parents: Tensor) -> None:
        """Tell the caches which nodes the level to come sees: its parents' and each its own.

        Until the first branching the nodes are a line, and each level saw all before.
        """
        batch, width = parents.shape
        lineage = self._lineage
        if lineage is None:
            lineage = parents.new_ones(batch, self._hidden.shape[1], self._depth).bool()
        inherited = lineage.gather(1, parents[..., None].expand(-1, -1, lineage.shape[-1]))
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        self._lineage = torch.cat([inherited, own], -1)
        for cache in self.caches:
            cache.branches = self._lineage

    def _commit(self, counts: list[int]) -> None:
        self.committed = [n + more for n, more in zip(self.committed, counts, strict=True)]
        self._truncate()

    def _truncate(self) -> None:
        for cache in self.caches:
            cache.truncate(self.committed)

    def _positions(self, steps: Tensor) -> Tensor:
        """[B, T] of rows ``steps`` [T] past the committed ones.

        Guesses beyond the head's last position may not stand (see ``Speculation.rooms``), and sit
        on it meanwhile.
        """
        committed = torch.tensor(self.committed, device=steps.device)
        return (committed[:, None] + steps).clamp(max=self.last_position)

    def _run(self, tokens: Tensor, hidden: Tensor, steps: Tensor) -> DraftOutput:
        share = self.draft.share_of(tokens)
        return self.draft(share, hidden, self._positions(steps), self.caches)

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        if self._waiting is not None:
            tokens, aux = self._waiting
            chosen = torch.tensor(rows, device=tokens.device)
            self._waiting = (tokens[chosen], aux[chosen])
        self._counts = [self._counts[row] for row in rows]
        self.committed = [self.committed[row] for row in rows]
        for cache in self.caches:
            cache.keep(rows)


def check_pair(verifier: Verifier, draft: Eagle3Draft) -> None:
    """Raise ConfigError when the draft reads other states than this verifier gives.

    A wrong layer id changes no shape: it would only lower the acceptance.
    """
    facts, config = verifier.facts, draft.config
    pairs = (
        ("aux_layers", config.aux_layers, facts.aux_layers),
        ("hidden_size", config.hidden_size, facts.hidden_size),
        ("vocab_size", config.vocab_size, facts.vocab_size),
    )
    for name, of_draft, of_verifier in pairs:
        if of_draft != of_verifier:
            raise ConfigError(
                f"draft {name}={of_draft}: the verifier {facts.path} has {of_verifier}; "
                "evaluate the head with the verifier and verifier.aux_layers it was trained on"
            )
