"""The small model as the draft of a round, with its own cache.

Index table. Text x[0..L] is committed, x[L] is the root; the model reads tokens alone, so its rows
are those of the text, and what it wrote of a guess that stands is what the text would have given:

    cache            rows 0..r-1 of the text, L-1 <= r <= L
    start            feeds x[r..L], one token or two; its last row gives depth 1, for x[L+1]
    depth k+1        feeds guesses of depth k, one of them at position L+k
    n stand of N     in a chain rows L..L+min(n, N-1) stay: rolling back is not advancing. The last
                     guess was never fed, so where all stand, x[L+N] waits beside the new root
    in a tree        rows of a path lie apart: those after its first fork go, and are fed anew

States that come from the verifier are not read.
"""

import torch
from torch import Tensor

from conf.shapes import Shape
from models.kv import KVCache
from models.masks import Mask, Sight, additive, masks_of
from models.small_model import SmallModel
from models.verifier import VerifierStates


class SmallModelDrafter:
    """Rows of the cache beyond those committed belong to guesses and are overwritten."""

    def __init__(self, draft: SmallModel, batch: int, capacity: int, device: torch.device):
        self.draft = draft
        self.cache = KVCache(draft.library, batch, capacity + 1, device, draft.lm.dtype)
        self.target_ids = torch.arange(draft.size, device=device)
        # The model is fed up to position L+N-1, one further than the rounds reckon for heads.
        self.last_position = draft.config.max_positions - 2
        self._guessed = 0  # rows of guesses in each sequence
        self._depth = 0  # of the nodes fed last
        self._line: list[Tensor] = []  # [B, 1] each: guesses fed before the tree forked
        self._lineage: Tensor | None = None  # [B, W, S] the nodes so far that those fed last see
        self._depths: list[int] = []  # of each node so far, once they are a tree
        self._waiting: Tensor | None = None  # [B, R] tokens to come, each sequence's own first
        self._counts = [0] * batch  # how many of them it has

    def refuse(self, shape: Shape) -> None:
        """Every shape can be proposed."""

    def begin(
        self, prompts: Tensor, states: VerifierStates, roots: Tensor, lengths: list[int]
    ) -> None:
        """Run the prompts [B, P], right-padded; their first tokens [B, 1] wait."""
        self.cache.begin(len(lengths))
        self._begin_round()
        self._feed(prompts)
        self.cache.advance(lengths)
        self._waiting, self._counts = roots, [1] * len(lengths)

    def feed(self, tokens: Tensor, states: VerifierStates, counts: list[int]) -> None:
        """Each sequence has gained the first ``counts`` of tokens [B, R], the new root the last."""
        kept = self._standing(tokens, counts)
        self.cache.advance([stay - self._guessed for stay in kept])
        self._counts = [count - stay for count, stay in zip(counts, kept, strict=True)]
        most = torch.arange(max(self._counts), device=tokens.device)
        rows = torch.tensor(kept, device=tokens.device)[:, None] + most
        self._waiting = tokens.gather(1, rows.clamp_max(tokens.shape[1] - 1))
        self._begin_round()

    def _standing(self, tokens: Tensor, counts: list[int]) -> list[int]:
        """How many of the line's guesses are what the text now has.

        Comparing waits for the device, once a round: a guess beside the line may stand as well.
        """
        if not self._line:
            return [0] * len(counts)
        line = torch.cat(self._line, 1)[:, : tokens.shape[1]]
        same = (tokens[:, : line.shape[1]] == line).cumprod(1).sum(1).tolist()
        return [min(count - 1, equal) for count, equal in zip(counts, same, strict=True)]

    def _begin_round(self) -> None:
        self._guessed = self._depth = 0
        self._line, self._lineage, self._depths = [], None, []

    def start(self) -> Tensor:
        """Logits [B, 1, Vd] after the roots."""
        assert self._waiting is not None, "start before begin"
        states = self._feed(self._waiting)
        self.cache.advance(self._counts)
        rows = torch.arange(len(self._counts), device=states.device)
        ends = torch.tensor(self._counts, device=states.device) - 1
        self._begin_round()
        return self.draft.logits(states[rows, ends])[:, None]

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        """Logits [B, W, Vd] after nodes ``ids`` [B, W], one level below those before.

        ``parents`` [B, W]: the row of each one's parent in the call before.
        """
        width = ids.shape[1]
        if self._lineage is None and width == 1:
            states = self._feed(ids)
            self._line.append(ids)
        else:
            self._branch(parents)
            positions = (self.cache.lengths - self._guessed + self._depth)[:, None]
            states = self._feed(ids, self._tree_mask(positions), positions.expand(-1, width))
        self.cache.advance(width)
        self._guessed += width
        self._depth += 1
        return self.draft.logits(states)

    def keep(self, rows: list[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        chosen = torch.tensor(rows, device=self.target_ids.device)
        if self._waiting is not None:
            self._waiting = self._waiting[chosen]
        self._counts = [self._counts[row] for row in rows]
        self.cache.keep(chosen)

    def _feed(
        self, tokens: Tensor, mask: Mask | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Write tokens [B, T] behind what the cache holds -> [B, T, width].

        Guesses beyond the last position may not stand (see ``Speculation.rooms``), and sit on it
        meanwhile.
        """
        cache, steps = self.cache, tokens.shape[1]
        places = cache.positions(steps) if positions is None else positions
        seen = cache.mask(steps) if mask is None else mask
        return self.draft(tokens, places.clamp_max(self.last_position + 1), seen, cache)

    def _branch(self, parents: Tensor) -> None:
        """The nodes that the level to come sees: its parents' and each its own.

        Until the first branching the nodes are a line, and each level saw all before.
        """
        batch, width = parents.shape
        if self._lineage is None:
            self._lineage = parents.new_ones(batch, 1, self._depth).bool()
            self._depths = list(range(1, self._depth + 1))
        lineage = self._lineage
        inherited = lineage.gather(1, parents[..., None].expand(-1, -1, lineage.shape[-1]))
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        self._lineage = torch.cat([inherited, own], -1)
        self._depths += [self._depth + 1] * width

    def _tree_mask(self, positions: Tensor) -> Mask:
        """What the level to come sees, in a cache whose last rows are guesses: [B, 1, W, S]."""
        assert self._lineage is not None
        cache, (_, width, nodes) = self.cache, self._lineage.shape
        slots = torch.arange(cache.get_seq_length() + width, device=cache.device)
        base = (cache.lengths - self._guessed)[:, None]
        node = slots - base  # [B, S] which node a slot holds, below 0: committed
        inside = node.clamp(0, nodes - 1)
        branch = self._lineage.gather(2, inside[:, None].expand(-1, width, -1))
        seen = (node < 0)[:, None] | (branch & (node < nodes)[:, None])
        depths = torch.tensor(self._depths, device=cache.device)
        key = torch.where(node < 0, slots, base + depths[inside] - 1)
        masks = masks_of(Sight(seen, positions.expand(-1, width), key), cache.reaches)
        return additive(masks, cache.dtype) if cache.additive else masks
