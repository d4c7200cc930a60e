"""The two models as the sides of a round: the verifier and the draft, each with its cache.

Index table. Text x[0..L] is committed, x[L] (the root, emitted last) has no KV yet:

    verifier cache   rows 0..L-1; a round feeds x[L] and N guesses at positions L..L+N
    draft cache      rows 0..L-1, row t made of x[t+1] and the verifier's states of x[t]
    first guess      read from row L-1, for x[L+1]
    guess k+1        row L-1+k, made of guess k and the draft's own output; dropped after the round

After a round that accepts n, rows L..L+n of the draft are made anew from verifier states, by the
first draft forward of the next round.
"""

import torch
from torch import Tensor

from conf.schema import ConfigError
from models.eagle3 import DraftOutput, Eagle3Draft
from models.kv import KVCache
from models.memory import DraftCache
from models.verifier import Verifier, VerifierStates


class TargetDecoder:
    """The verifier with its cache. Its root is the token emitted last."""

    def __init__(self, verifier: Verifier, capacity: int):
        self.verifier = verifier
        self.cache = KVCache(verifier.model.config, 1, capacity, verifier.device, verifier.dtype)
        self.root = torch.empty(1, 1, dtype=torch.long, device=verifier.device)
        self.states: VerifierStates  # of the rows fed last

    def prefill(self, prompt: Tensor) -> Tensor:
        """Feed prompt [1, P]; logits [1, V] of the first token."""
        self.states = self.verifier.states(prompt, self.cache)
        self.cache.advance(prompt.shape[1])
        return self.verifier.logits_from(self.states.last[:, -1])

    def step(self) -> Tensor:
        """Feed the root alone: logits [1, V] of the next token."""
        self.states = self.verifier.states(self.root, self.cache)
        self.cache.advance(1)
        return self.verifier.logits_from(self.states.last[:, -1])

    def score(self, ids: Tensor) -> Tensor:
        """Feed the root and guesses [1, N]: logits [1, N+1, V]. ``commit`` says what stays."""
        self.states = self.verifier.states(torch.cat([self.root, ids], -1), self.cache)
        return self.verifier.logits_from(self.states.last)

    def commit(self, accepted: int) -> Tensor:
        """Keep the root and ``accepted`` guesses; their states [1, accepted + 1, A*D]."""
        self.cache.advance(accepted + 1)
        return self.states.aux[:, : accepted + 1]


class DraftDecoder:
    """The draft with its cache: rows made of verifier states stay, rows of guesses do not."""

    def __init__(self, draft: Eagle3Draft, capacity: int, device: torch.device):
        self.draft = draft
        self.cache = DraftCache(capacity)
        self.positions = torch.arange(capacity, device=device)[None]
        own_ids = torch.arange(draft.config.draft_vocab_size, device=device)
        self.target_ids = draft.to_target_ids(own_ids)  # [Vd]
        self.committed = 0  # rows made of verifier states
        self._waiting: tuple[Tensor, Tensor]  # tokens and states of the rows to come
        self._output: DraftOutput  # of the rows run last

    def feed(self, tokens: Tensor, aux: Tensor) -> None:
        """Forget guesses and note new rows: row t is x[t+1] in [1, R] and aux[t] in [1, R, A*D].

        They run when the next round starts, so that nothing is computed after the last round.
        """
        self.cache.truncate(self.committed)
        self._waiting = (tokens, aux)

    def remember(self, tokens: Tensor, aux: Tensor) -> None:
        """Rows of a prompt, at once: nothing is guessed from them, so they only give keys."""
        positions = self.positions[:, : tokens.shape[1]]
        share = self.draft.share_of(tokens, asks=False)
        self.draft.remember(share, self.draft.fuse(aux), positions, self.cache)
        self.committed = self.cache.length

    def start(self) -> Tensor:
        tokens, aux = self._waiting
        self._run(tokens, self.draft.fuse(aux))
        self.committed = self.cache.length
        return self.draft.logits(self._output.normed[:, -1])

    def step(self, ids: Tensor) -> Tensor:
        self._run(ids[:, None], self._output.hidden[:, -1:])
        return self.draft.logits(self._output.normed[:, -1])

    def _run(self, tokens: Tensor, hidden: Tensor) -> None:
        begin = self.cache.length
        positions = self.positions[:, begin : begin + tokens.shape[1]]
        share = self.draft.share_of(tokens)
        self._output = self.draft(share, hidden, positions, self.cache)


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
