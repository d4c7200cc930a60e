"""The dataclasses that travel between the folders, and the shape legend.

B samples of a batch, T tokens, D verifier width, A aux layers, V verifier vocabulary, Vd draft
vocabulary, K unroll depth, N draft tokens a round. ``last`` is the state after the verifier's final
norm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor

from data.chains import Chains


@dataclass(frozen=True)
class ToolCall:
    """What an assistant asks of a tool."""

    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True)
class Turn:
    role: str  # "system", "user", "assistant" or "tool"
    content: str
    reasoning: str = ""  # an assistant's thoughts, where a row keeps them apart from the answer
    calls: tuple[ToolCall, ...] = ()  # an assistant's; the content may then be empty
    name: str = ""  # of the tool whose result this is, where known


@dataclass(frozen=True)
class Tokenised:
    """A row that was handed in as token ids: no template is applied."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # equally many


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: tuple[Turn, ...]
    task: str = ""  # a label of the prompt, reported on its own
    greedy: bool = False  # the last answer is the verifier's own greedy text
    cut: bool = False  # the last answer was cut by a length limit: it has no end of turn
    answer_ids: tuple[tuple[int, ...], ...] = ()  # the last answers as generated, ends of turn too
    tools: str = ""  # JSON list of the tools' schemas, for the chat template
    tokenised: Tokenised | None = None  # in place of turns


@dataclass(frozen=True)
class TokenizedSample:
    id: str
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool: answer tokens, the end-of-turn token included
    greedy: bool
    held_out: bool


@dataclass(frozen=True, eq=False)
class Samples(Sequence[TokenizedSample]):
    """S samples with N tokens in flat tensors, mapped from their file: a record is made when it is
    asked for, and a million of them take no memory."""

    tokens: Tensor  # [N] int32
    mask: Tensor  # [N] uint8
    offsets: Tensor  # [S+1] int64 places in tokens
    id_text: Tensor  # uint8: the ids in UTF-8, one behind the other
    id_offsets: Tensor  # [S+1] int64 places in id_text
    greedy: Tensor  # [S] bool
    held_out: Tensor  # [S] bool
    prompts: Tensor  # [S] int64: data.split's digest of the tokens before the first answer

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sample."""
        return self.offsets.diff()

    @property
    def asking(self) -> Tensor:
        """[S] rows of each sample whose next token is supervised."""
        mask, firsts = self.mask.numpy(), self.offsets[:-1].numpy()
        supervised = np.add.reduceat(mask, firsts, dtype=np.int64)
        return torch.from_numpy(supervised - mask[firsts])

    def __len__(self) -> int:
        return len(self.greedy)

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedSample]: ...
    def __getitem__(self, index: int | slice) -> TokenizedSample | list[TokenizedSample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # counts from the end too; IndexError beyond
        start, end = self.offsets[place : place + 2].tolist()
        first, last = self.id_offsets[place : place + 2].tolist()
        return TokenizedSample(
            id=self.id_text[first:last].numpy().tobytes().decode("utf-8", "surrogatepass"),
            input_ids=self.tokens[start:end].long(),
            loss_mask=self.mask[start:end].bool(),
            greedy=bool(self.greedy[place]),
            held_out=bool(self.held_out[place]),
        )


class Part(Sequence[TokenizedSample]):
    """Some of ``samples``, by their places: like them, made when asked for."""

    def __init__(self, samples: Sequence[TokenizedSample], places: Sequence[int]):
        self.samples = samples
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TokenizedSample: ...
    @overload
    def __getitem__(self, index: slice) -> "Part": ...
    def __getitem__(self, index: int | slice) -> "TokenizedSample | Part":
        if isinstance(index, slice):
            return Part(self.samples, self.places[index])
        return self.samples[self.places[index]]


@dataclass(frozen=True)
class SampleStates:
    """What the verifier says about T tokens, L of whose rows ask: their next token is supervised
    (see data/chains.py).

    States are in the cache's dtype; in fp8 a value counts ``scales`` of its row and state.
    """

    aux: Tensor  # [T, A*D] residual streams after the aux layers, ascending
    last: Tensor  # [L, D]
    argmax: Tensor  # [L] int64: the verifier's own next token at each row that asks
    lse: Tensor  # [L] fp32: log-sum-exp of the verifier's logits there
    aux_scales: Tensor | None = None  # [T, A] fp32, of fp8 alone
    last_scales: Tensor | None = None  # [L, 1] fp32, of fp8 alone


def named(states: SampleStates) -> Iterator[tuple[str, Tensor]]:
    """The tensors of states that are there, by name."""
    for item in fields(SampleStates):
        rows = getattr(states, item.name)
        if rows is not None:
            yield item.name, rows


@dataclass(frozen=True)
class CachedSample(SampleStates):
    """A sample beside its states."""

    sample: TokenizedSample = field(kw_only=True)


@dataclass(frozen=True)
class CachedPack(SampleStates):
    """B cached samples end to end: T rows, L of which ask."""

    samples: list[TokenizedSample] = field(kw_only=True)

    @classmethod
    def of(cls, cached: Sequence[CachedSample]) -> "CachedPack":
        """One sample behind the other, copied."""
        aux_scales = [one.aux_scales for one in cached if one.aux_scales is not None]
        last_scales = [one.last_scales for one in cached if one.last_scales is not None]
        assert len(aux_scales) == len(last_scales) and len(aux_scales) in (0, len(cached))
        return cls(
            samples=[one.sample for one in cached],
            aux=torch.cat([one.aux for one in cached]),
            last=torch.cat([one.last for one in cached]),
            argmax=torch.cat([one.argmax for one in cached]),
            lse=torch.cat([one.lse for one in cached]),
            aux_scales=torch.cat(aux_scales) if aux_scales else None,
            last_scales=torch.cat(last_scales) if last_scales else None,
        )

    @property
    def starts(self) -> Tensor:
        """[B+1] first packed row of each sample, and the end of the last."""
        return torch.tensor([0, *(len(sample.input_ids) for sample in self.samples)]).cumsum(0)


@dataclass(frozen=True)
class TTTBatch:
    """B samples end to end, without padding: T rows, L of which ask. Nothing crosses a border.

    Scales are there until the states are restored on the device (see data/loader.py).
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sample
    aux: Tensor  # [T, A*D]
    last: Tensor  # [L, D]
    argmax: Tensor  # [L] int64
    lse: Tensor  # [L] fp32
    samples: int  # B
    chains: Chains  # the rows that are unrolled
    asking: Tensor | None = None  # [T] number of a row that asks among the L; None: all T do
    aux_scales: Tensor | None = None  # [T, A] fp32, of fp8 alone
    last_scales: Tensor | None = None  # [L, 1] fp32, of fp8 alone
    draw: int = 0  # seeds what a step draws: of run.seed, the step and the pack, not of the rank


@dataclass(frozen=True)
class Skipped:
    """Rows that did not become samples: how many, by reason. in = out + sum(reasons)."""

    rows_in: int
    rows_out: int
    reasons: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)  # rows kept with a change, by its name
    first: dict[str, str] = field(default_factory=dict)  # reason -> the first row it befell


@dataclass(frozen=True)
class PreparedData:
    """What the prepare stage leaves behind."""

    folder: Path
    fingerprint: str
    samples: Samples
    token_counts: Tensor  # [V] int64: how often each token is a label in the training split
    held_out_counts: Tensor  # [V] int64: and in the held-out samples
    skipped: Skipped
