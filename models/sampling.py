"""From logits to the distribution that is sampled, and draws from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from conf.eval_rules import TEMPERATURES, is_temperature
from conf.schema import ConfigError, JobError

NO_TOKEN = -1  # the id that a broken row of logits gives
HEAD = 256  # sorted first for top-p: sorting a whole vocabulary a row costs more than the forward


@dataclass(frozen=True)
class Sampling:
    """Temperature, then the filters in this order, as the library's generate applies them."""

    temperature: float = 0.0  # 0: greedy, the filters are ignored
    top_k: int = 0  # keep so many of the likeliest tokens, and those that equal the last; 0: off
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this mass; 1: off
    min_p: float = 0.0  # keep tokens at least so likely, relative to the likeliest; 0: off

    def __post_init__(self) -> None:
        """Raises ConfigError for a value outside its range."""
        checks = (
            ("temperature", is_temperature(self.temperature), f"{TEMPERATURES}; 0 is greedy"),
            ("top_k", self.top_k >= 0, "at least 0; 0 is off"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1; 1 is off"),
            ("min_p", 0 <= self.min_p <= 1, "at least 0 and at most 1; 0 is off"),
        )
        for name, fine, rule in checks:
            if not fine:
                raise ConfigError(f"{name}={getattr(self, name)}: must be {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def likeliest(scores: Tensor) -> Tensor:
    """[..., V] -> [...]: the first of the largest, as argmax has it; NO_TOKEN where there is none.

    A row with a NaN, or of -inf alone, has none. It is told by its id, not by an error, so that
    nothing waits for the device; who reads the ids calls ``refuse_no_token``. On a CPU argmax reads
    bfloat16 four times slower, a millisecond for five rows of 49152.
    """
    top = scores.max(dim=-1)  # NaN counts as the largest
    unusable = top.values.isnan() | (top.values == -torch.inf)
    return top.indices.masked_fill_(unusable, NO_TOKEN)


def refuse_no_token(ids: Sequence[int]) -> None:
    """Raise JobError when one of them is no token: the logits it was chosen from are broken."""
    if NO_TOKEN in ids:
        raise nothing_to_choose()


def nothing_to_choose() -> JobError:
    return JobError(
        "logits: a row is NaN or -inf, so there is nothing to choose; compute in float32 "
        "(verifier.dtype, eval.speed_dtype) or look for NaN among the weights"
    )


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[..., V] logits -> [..., V] float32 distribution after temperature and filters, sum 1.

    Tokens at -inf or NaN have probability 0; of several at +inf each has the same. Temperature 0
    is the one-hot of the first largest logit. Raises JobError when a row has no usable token.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    wide = wide.masked_fill(wide.isnan(), -torch.inf)
    top = wide.amax(dim=-1, keepdim=True)
    if bool((top == -torch.inf).any()):
        raise nothing_to_choose()
    if sampling.greedy:
        return torch.zeros_like(wide, dtype=torch.float32).scatter_(
            -1, wide.argmax(dim=-1, keepdim=True), 1.0
        )
    shifted = torch.where(wide == top, 0.0, wide - top)  # inf - inf is NaN, and those are the top
    scores = shifted / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        last = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < last, -torch.inf)
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        probs = _nucleus(probs, sampling.top_p)
    if sampling.min_p > 0:
        least = sampling.min_p * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
    return (probs / probs.sum(dim=-1, keepdim=True)).float()


def _nucleus(probs: Tensor, mass: float) -> Tensor:
    """Zero all but the fewest likeliest tokens that together hold at least ``mass``.

    The token that crosses the border stays, so one always does; equal tokens enter by sort order.
    """
    rows = probs.reshape(-1, probs.shape[-1])  # [N, V]
    values, ids = rows.topk(min(HEAD, rows.shape[-1]), dim=-1)  # sorted, largest first
    kept = torch.zeros_like(rows).scatter_(-1, ids, _up_to(values, mass))
    flat = values.sum(dim=-1) < mass  # rows whose border lies beyond the head
    if bool(flat.any()):
        values, ids = rows[flat].sort(dim=-1, descending=True)
        kept[flat] = torch.zeros_like(rows[flat]).scatter_(-1, ids, _up_to(values, mass))
    return kept.view_as(probs)


def _up_to(values: Tensor, mass: float) -> Tensor:
    """Zero those of descending ``values`` before which ``mass`` is already reached."""
    before = values.cumsum(dim=-1) - values
    return values.masked_fill(before >= mass, 0.0)


class Dice(Protocol):
    """Random numbers for sequences with leading dimensions [...]."""

    def roll(self, *shape: int) -> Tensor:
        """fp64 in [0, 1), [..., *shape]: 53 random bits, so that rare tokens stay as rare."""
        ...


class SharedDice:
    """One generator for all sequences: for many that are alike."""

    def __init__(self, seed: int, *leading: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.leading = leading

    def roll(self, *shape: int) -> Tensor:
        size = (*self.leading, *shape)
        return torch.rand(size, generator=self.generator, dtype=torch.float64)


class OwnDice:
    """A generator a sequence: its numbers do not depend on what else is in the batch."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def roll(self, *shape: int) -> Tensor:
        rolls = [torch.rand(shape, generator=g, dtype=torch.float64) for g in self.generators]
        return torch.stack(rolls).to(self.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with sequences ``rows``, in that order."""
        self.generators = [self.generators[row] for row in rows]

    def only(self, rows: Sequence[int]) -> "OwnDice":
        """The dice of some of the sequences; the others' numbers stay as they are."""
        chosen = OwnDice((), self.device)
        chosen.generators = [self.generators[row] for row in rows]
        return chosen


def draw_at(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which each cumulative distribution [..., V] passes ``uniform`` [...] in [0, 1).

    Inverting the distribution, unlike a race of V random numbers, lets rounding of the logits
    change a draw only where ``uniform`` falls on a border. A token of probability 0 is never drawn.
    """
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform.double()[..., None] * total, below)  # u*total may round to total
    return torch.searchsorted(cumulative, target, right=True)[..., 0]
