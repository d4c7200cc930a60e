"""The EAGLE-3 draft head: decoder layers over fused verifier states; forward is one step."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from conf.schema import ConfigError, DraftSection, HeadInit
from models.draft_limits import refuse_unfit
from models.layers import DraftAttention, DraftLayer, GatedMLP, StreamNorm
from models.memory import Memory
from models.rope import Rope, settled
from models.verifier import VerifierEnds, VerifierFacts
from models.vocab import DraftVocab, draft_vocab_size

INIT_STD = 0.02  # of every matrix that is not copied from the verifier


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of a draft head; all that is needed to build it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the verifier's
    draft_vocab_size: int
    aux_layers: list[int]  # n = the verifier's stream after n layers
    rms_norm_eps: float
    max_positions: int
    rope: dict[str, Any]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    qk_norm: bool = False  # files of earlier versions lack it
    layers: int = 1  # decoder layers; files of earlier versions lack it, too

    @classmethod
    def of(cls, section: DraftSection, facts: VerifierFacts) -> "DraftConfig":
        """The head that ``section`` asks for, as wide as the verifier."""
        layer, max_positions = facts.layer, section.max_positions or facts.max_positions
        return cls(
            hidden_size=facts.hidden_size,
            intermediate_size=section.intermediate_size or layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            vocab_size=facts.vocab_size,
            draft_vocab_size=draft_vocab_size(section, facts.vocab_size),
            aux_layers=list(facts.aux_layers),
            rms_norm_eps=layer.rms_norm_eps,
            max_positions=max_positions,
            rope=settled(Rope(layer.head_dim, max_positions, facts.rope)),
            norm_before_residual=section.norm_before_residual,
            norm_before_fc=section.norm_before_fc,
            fc_norm=section.fc_norm,
            norm_output=section.norm_output,
            qk_norm=section.qk_norm,
            layers=section.layers,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "DraftConfig":
        """Raises ConfigError when the text is no JSON, or has other keys or kinds of values."""
        try:
            config = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"draft.json: not a draft of this version ({error})") from error
        refuse_unfit(config)
        return config


@dataclass(frozen=True)
class DraftOutput:
    hidden: Tensor  # [..., D] what the next step is fed
    normed: Tensor  # [..., D] what the head reads


class Eagle3Draft(nn.Module):
    """Parameters carry the names of EAGLE-3 files; ``d2t`` and ``t2d`` are buffers.

    The first decoder layer is ``midlayer``; ``layers`` has those after it, numbered from 1. Each
    has a memory of its own, in this order.
    """

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        width, count = config.hidden_size, len(config.aux_layers)

        def norm(size: int = width) -> StreamNorm:
            return StreamNorm(size, eps=config.rms_norm_eps)

        if config.norm_before_fc:
            self.input_norm = norm(count * width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm() for _ in range(count))
        self.fc = nn.Linear(count * width, width, bias=False)
        rope = Rope(config.head_dim, config.max_positions, config.rope)
        qk_eps = config.rms_norm_eps if config.qk_norm else None

        def layer(pair: bool) -> DraftLayer:
            return DraftLayer(
                DraftAttention(width, config.num_heads, config.num_kv_heads, rope, qk_eps, pair),
                GatedMLP(width, config.intermediate_size),
                [norm() for _ in range(3 if pair else 2)],
                config.norm_before_residual and pair,
            )

        self.midlayer = layer(pair=True)
        self.layers = nn.ModuleDict({str(n): layer(pair=False) for n in range(1, config.layers)})
        self.norm = norm()
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.d2t: Tensor
        self.t2d: Tensor

    @torch.no_grad()
    def initialise(self, ends: VerifierEnds, vocab: DraftVocab, head_init: HeadInit) -> None:
        """Random matrices, the verifier's embedding, and the head as ``head_init`` says.

        The embedding is the table as stored, without the factor that Gemma (sqrt D) and Granite
        multiply it by: engines share the verifier's table and look rows up in it unscaled. The
        layer's first norm takes the factor out, so nothing is lost but the share of its epsilon.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=INIT_STD)
        if tuple(ends.embedding.shape) != tuple(self.embed_tokens.weight.shape):
            raise ConfigError(
                f"verifier.path: its embedding is {tuple(ends.embedding.shape)}, its config says "
                f"{tuple(self.embed_tokens.weight.shape)}; a draft must be as wide as its verifier"
            )
        self.embed_tokens.weight.copy_(ends.embedding)
        self.d2t.copy_(vocab.d2t)
        self.t2d.copy_(vocab.t2d)
        if head_init is not HeadInit.random:
            self.lm_head.weight.copy_(ends.head[vocab.target_ids])
        self.lm_head.requires_grad_(head_init is not HeadInit.frozen)

    def fuse(self, aux: Tensor) -> Tensor:
        """[..., A*D] verifier states -> [..., D], once before the first step."""
        return self.fc(self.parts(aux))

    def parts(self, aux: Tensor) -> Tensor:
        """[..., A*D] verifier states -> [..., A*D], as they enter ``fc``."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([n(part) for n, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return aux

    @property
    def stack(self) -> list[DraftLayer]:
        """The decoder layers, the first one first."""
        later: Any = self.layers.values()  # a ModuleDict knows them as modules alone
        return [self.midlayer, *later]

    def share_of(self, tokens: Tensor, asks: bool = True) -> Tensor:
        """tokens [...] -> their share of query, key and value [..., (H + 2 Hkv) * Dh].

        Rows that only ``remember`` ask nothing of the last layer: where that is the first one, too,
        their share is that of key and value alone.
        """
        return self.midlayer.share_of(self.embed_tokens(tokens), asks or self.config.layers > 1)

    def forward(
        self,
        share: Tensor,
        hidden: Tensor,
        positions: Tensor,
        memories: Sequence[Memory],
        known: bool = False,
    ) -> DraftOutput:
        """One step: row t pairs token x[t+1+k] with its state and guesses the token after it.

        share [..., (H + 2 Hkv) * Dh] of the tokens, hidden [..., D], positions [...]; a layer's
        memory says which keys a row sees in it. ``known``: the rows are among those of
        ``remember``, ``hidden`` is what that gave for them, and the last layer alone is to run.
        """
        for n, layer in enumerate(self.stack):
            if n == self.config.layers - 1 or not known:
                own = share if n == 0 else None
                hidden = layer(own, hidden, positions, memories[n], known)
        normed = self.norm(hidden)
        fed_back = normed if self.config.norm_output else hidden
        return DraftOutput(fed_back, normed.to(share.dtype))

    def remember(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories: Sequence[Memory]
    ) -> Tensor:
        """Rows that nobody asks for a guess: give each memory their keys in its layer.

        All layers but the last run, for their output is what the keys after them are made of ->
        [..., D], what enters the last layer.
        """
        *lower, last = self.stack
        for n, layer in enumerate(lower):
            hidden = layer(share if n == 0 else None, hidden, positions, memories[n], known=False)
        last.remember(None if lower else share, hidden, positions, memories[-1])
        return hidden

    def logits(self, normed: Tensor) -> Tensor:
        """[..., D] -> [..., Vd]."""
        return self.lm_head(normed)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """Its rank among the draft vocabulary; a valid id, but junk, for tokens outside it."""
        return (self.t2d.long().cumsum(0) - 1)[target_ids].clamp_min(0)
