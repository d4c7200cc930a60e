"""EAGLE-3 and EAGLE-1 as drafters: decoder layers over the verifier's states, a cache each."""

import torch
from torch import Tensor

from conf.shapes import Shape
from models.eagle1 import Eagle1Draft
from models.eagle3 import DraftOutput, Eagle3Draft
from models.memory import DraftCache
from models.verifier import VerifierStates


class Eagle3Drafter:
    """The draft with its caches: rows made of verifier states stay, rows of guesses do not."""

    def __init__(
        self, draft: Eagle3Draft | Eagle1Draft, batch: int, capacity: int, device: torch.device
    ):
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

    def refuse(self, shape: Shape) -> None:
        """Chains and trees of any kind."""

    def begin(
        self, prompts: Tensor, states: VerifierStates, roots: Tensor, lengths: list[int]
    ) -> None:
        """The prompts' rows give keys at once; those that pair with the roots wait."""
        self.committed = [0] * len(lengths)
        self._truncate()
        if max(lengths) > 1:
            self._remember(prompts[:, 1:], states.aux[:, :-1], [n - 1 for n in lengths])
        rows = torch.arange(len(lengths), device=prompts.device)
        ends = torch.tensor(lengths, device=prompts.device) - 1
        self.feed(roots, states[rows, ends][:, None], [1] * len(lengths))

    def feed(self, tokens: Tensor, states: VerifierStates, counts: list[int]) -> None:
        """The rows run when the next round starts, so that nothing is computed after the last."""
        self._truncate()
        self._waiting, self._counts = (tokens, states.aux), counts

    def _remember(self, tokens: Tensor, aux: Tensor, counts: list[int]) -> None:
        """Rows of prompts: nothing is guessed from them, so they only give keys."""
        positions = self._positions(torch.arange(tokens.shape[1], device=tokens.device))
        share = self.draft.share_of(tokens, asks=False)
        self.draft.remember(share, self.draft.fuse(aux), positions, self.caches)
        self._commit(counts)

    def start(self) -> Tensor:
        """Logits [B, 1, Vd] after the roots."""
        assert self._waiting is not None, "start before begin"
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
