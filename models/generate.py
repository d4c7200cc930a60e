"""Batched generation: many prompts side by side, each ends on its own."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conf.schema import ConfigError
from models.kv import KVCache
from models.sampling import OwnDice, Sampling, draw_at, likeliest, probabilities, refuse_no_token
from models.verifier import Verifier


@dataclass(frozen=True)
class Request:
    """One answer to be made. The seed decides the draws, whatever else is in the batch."""

    prompt_ids: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    index: int  # of its request
    ids: list[int]  # the end token included, unless cut
    cut: bool  # stopped by max_new_tokens


def end_ids(verifier: Verifier) -> list[int]:
    """Tokens that end an answer: of the config, the generation config and the tokenizer."""
    found = set(verifier.facts.eos_ids)
    if isinstance(verifier.tokenizer.eos_token_id, int):
        found.add(verifier.tokenizer.eos_token_id)
    ends = getattr(verifier.model.generation_config, "eos_token_id", None)
    found.update([ends] if isinstance(ends, int) else ends or [])
    return sorted(found)


class _Live:
    """The requests still running, in the order of the cache's sequences."""

    def __init__(self, requests: list[Request], device: torch.device):
        self.index = list(range(len(requests)))
        self.ids: list[list[int]] = [[] for _ in requests]
        self.sampling = [request.sampling for request in requests]
        self.dice = OwnDice([request.seed for request in requests], device)

    def choose(self, logits: Tensor) -> list[int]:
        """[B, V] -> the next token of each sequence; sequences of equal sampling go together."""
        tokens = likeliest(logits)  # [B]
        uniform = self.dice.roll()  # [B]
        for sampling in set(self.sampling):
            if sampling.greedy:
                continue
            rows = [i for i, own in enumerate(self.sampling) if own == sampling]
            where = torch.tensor(rows, device=tokens.device)
            tokens[where] = draw_at(probabilities(logits[where], sampling), uniform[where])
        chosen = tokens.tolist()
        refuse_no_token(chosen)
        return chosen

    def keep(self, order: list[int]) -> None:
        self.index = [self.index[i] for i in order]
        self.ids = [self.ids[i] for i in order]
        self.sampling = [self.sampling[i] for i in order]
        self.dice.keep(order)


def generate(
    verifier: Verifier, requests: list[Request], max_new_tokens: int, eos_ids: list[int]
) -> Iterator[Answer]:
    """Answer all ``requests`` in one batch; yields each answer when it is complete.

    Prompts are right-padded for one prefill; then a step is one token a live sequence, at its own
    position, and only the last row of each meets the head. Finished sequences leave the batch, so
    a step costs what is still running. Raises ConfigError for an empty prompt.
    """
    if not requests:
        return
    live = _Live(requests, verifier.device)
    cache, last = _prefill(verifier, [r.prompt_ids for r in requests], max_new_tokens)
    while True:
        tokens = live.choose(verifier.logits_from(last))
        running: list[int] = []
        for i, token in enumerate(tokens):
            live.ids[i].append(token)
            ended = token in eos_ids
            if ended or len(live.ids[i]) == max_new_tokens:
                yield Answer(live.index[i], live.ids[i], cut=not ended)
            else:
                running.append(i)
        if not running:
            return
        if len(running) < len(tokens):
            order = into_holes(running)
            live.keep(order)
            cache.keep(torch.tensor(order, device=verifier.device))
            tokens = [tokens[i] for i in order]
        step = torch.tensor(tokens, device=verifier.device)[:, None]  # [B, 1]
        last = verifier.states(step, cache).last[:, 0]  # [B, D]
        cache.advance(1)


def _prefill(
    verifier: Verifier, prompts: list[list[int]], max_new_tokens: int
) -> tuple[KVCache, Tensor]:
    """A cache that holds the prompts, and the state [B, D] at each one's last token."""
    if any(not prompt for prompt in prompts):
        raise ConfigError(
            f"verifier.path={verifier.facts.path}: a prompt has no tokens; give its tokenizer a "
            "chat template that writes the turns"
        )
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=verifier.device)
    longest = int(lengths.max())
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]  # never attended
    room = longest + max_new_tokens
    cache = KVCache(verifier.model.config, len(prompts), room, verifier.device, verifier.dtype)
    last = verifier.states(torch.tensor(padded, device=verifier.device), cache).last  # [B, T, D]
    cache.advance(lengths)
    return cache, last[torch.arange(len(prompts), device=verifier.device), lengths - 1]


def into_holes(running: list[int]) -> list[int]:
    """Ascending survivors -> an order of them that moves as few as possible."""
    count = len(running)
    stay = {row for row in running if row < count}
    movers = [row for row in running if row >= count]
    return [row if row in stay else movers.pop() for row in range(count)]
