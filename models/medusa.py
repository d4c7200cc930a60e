"""Medusa's draft: one head a position ahead, each on the verifier's last state alone.

Head k (0-based) at row t reads last[t] and guesses x[t+2+k], whatever the tokens between; nothing
is fed back, so a round costs one pass of small products and no cache (2401.10774, section 3.1).
"""

import json
from dataclasses import asdict, dataclass
from typing import get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ConfigError, DraftSection, HeadInit
from models.draft_limits import LARGEST
from models.facts import VerifierFacts
from models.verifier import VerifierEnds
from models.vocab import DraftVocab, draft_vocab_size

FAMILY = "medusa"
MOST_HEADS = 64  # of a file; beyond it a number is a mistake
INIT_STD = 0.02  # of rows that are not the verifier's


@dataclass(frozen=True)
class MedusaConfig:
    """All that is needed to build one."""

    hidden_size: int
    vocab_size: int  # the verifier's
    draft_vocab_size: int
    heads: int  # positions ahead: the depth of the longest chain
    layers: int  # residual blocks a head
    shared_rows: bool  # the verifier's own rows, one frozen copy for all heads
    family: str = FAMILY

    @classmethod
    def of(cls, section: DraftSection, facts: VerifierFacts, heads: int) -> "MedusaConfig":
        """The draft that ``section`` asks for, with ``heads`` of ttt.depth."""
        assert heads >= 1, "a Medusa draft has a head a step"
        return cls(
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            draft_vocab_size=draft_vocab_size(section, facts.vocab_size),
            heads=heads,
            layers=section.layers,
            shared_rows=section.head_init is HeadInit.frozen,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "MedusaConfig":
        """Raises ConfigError when the text is no JSON, or has other keys or impossible values."""
        try:
            config = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"draft.json: not a draft of this version ({error})") from error
        for fault in config.faults():
            raise ConfigError(f"draft.json: {fault}; give the file as training wrote it")
        return config

    def faults(self) -> list[str]:
        """Each names the field, its value and the rule."""
        found: list[str] = []
        most = {"heads": MOST_HEADS, "layers": MOST_HEADS}
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if type(value) is not kind:
                found.append(f"{name}={value!r}: must be of kind {kind.__name__}")
            elif kind is int and not 1 <= value <= most.get(name, LARGEST):
                found.append(f"{name}={value}: must be in 1..{most.get(name, LARGEST)}")
        if not found and self.draft_vocab_size > self.vocab_size:
            found.append(f"draft_vocab_size={self.draft_vocab_size}: above {self.vocab_size}")
        if self.family != FAMILY:
            found.append(f"family={self.family!r}: must be {FAMILY}")
        return found


class Residual(nn.Module):
    """Blocks x + SiLU(W x + b), zero at the start: the head begins as the verifier's own."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + F.silu(layer(states))
        return states


class MedusaDraft(nn.Module):
    """Parameters carry vLLM's names; ``d2t`` and ``t2d`` are buffers."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        width, size = config.hidden_size, config.draft_vocab_size
        self.blocks = nn.ModuleList(Residual(width, config.layers) for _ in range(config.heads))
        if config.shared_rows:
            self.lm_head = nn.Linear(width, size, bias=False)
            self.lm_head.requires_grad_(False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(width, size, bias=False) for _ in range(config.heads)
            )
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.d2t: Tensor
        self.t2d: Tensor

    @torch.no_grad()
    def initialise(self, ends: VerifierEnds, vocab: DraftVocab, head_init: HeadInit) -> None:
        """Blocks that change nothing yet, and rows as ``head_init`` says.

        Raises ConfigError for a verifier of another width or vocabulary.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        if tuple(ends.head.shape) != shape:
            raise ConfigError(
                f"verifier.path: its head is {tuple(ends.head.shape)}, its config says {shape}; "
                "a draft must be as wide as its verifier"
            )
        for block in self.blocks.modules():
            if isinstance(block, nn.Linear):
                block.weight.zero_()
                block.bias.zero_()
        self.d2t.copy_(vocab.d2t)
        self.t2d.copy_(vocab.t2d)
        rows = ends.head[vocab.target_ids]
        for k in range(1 if self.config.shared_rows else self.config.heads):
            if head_init is HeadInit.random:
                self.rows(k).weight.normal_(std=INIT_STD)
            else:
                self.rows(k).weight.copy_(rows)

    def rows(self, k: int) -> nn.Linear:
        """The output rows of head ``k``."""
        found = self.lm_head if self.config.shared_rows else self.lm_heads[k]
        assert isinstance(found, nn.Linear)
        return found

    def read(self, last: Tensor, k: int) -> Tensor:
        """last [..., D] -> [..., D], what the rows of head ``k`` read."""
        return self.blocks[k](last)

    def logits(self, last: Tensor, k: int) -> Tensor:
        """last [..., D] at row t -> [..., Vd] of x[t+2+k]."""
        return self.rows(k)(self.read(last, k))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """Its rank among the draft vocabulary; a valid id, but junk, for tokens outside it."""
        return (self.t2d.long().cumsum(0) - 1)[target_ids].clamp_min(0)
