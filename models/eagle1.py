"""The EAGLE-1 draft head: one decoder layer that guesses the verifier's next final state.

Li et al. 2401.15077, sections 3.1 and 4.1, in the form that engines read. The state f[t] is the
stream after the verifier's last layer, normed by its final norm; the head on a guessed state is the
verifier's own, so a state is all that is learnt:

    x[t+1], f[t]  ->  fc([embedding of x[t+1] ; f[t]])  ->  layer  ->  guess of f[t+1]

EAGLE-2 (2406.16858) is the same head with a tree that follows its confidence.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ConfigError, DraftSection
from models.draft_limits import refuse_unfit
from models.eagle3 import INIT_STD, DraftOutput
from models.facts import VerifierFacts
from models.layers import GatedMLP, StreamNorm
from models.memory import Memory
from models.rope import Rope, Rotary, Rotation, settled
from models.verifier import VerifierEnds

FAMILY = "eagle1"


@dataclass(frozen=True)
class Eagle1Config:
    """Sizes of an EAGLE-1 head; all that is needed to build it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # the verifier's; the head guesses every token
    aux_layers: list[int]  # [L]: the stream after the verifier's last layer, before its final norm
    rms_norm_eps: float  # of the layer and of the final norm
    max_positions: int
    rope: dict[str, Any]

    @classmethod
    def of(cls, section: DraftSection, facts: VerifierFacts) -> "Eagle1Config":
        """A head as wide as the verifier. Raises ConfigError unless its last stream is at hand."""
        if facts.aux_layers != [facts.num_layers]:
            raise ConfigError(
                f"verifier.aux_layers={facts.aux_layers}: draft.family={FAMILY} reads the stream "
                f"after the last layer alone; set verifier.aux_layers=[{facts.num_layers}]"
            )
        layer, max_positions = facts.layer, section.max_positions or facts.max_positions
        return cls(
            hidden_size=facts.hidden_size,
            intermediate_size=section.intermediate_size or layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            vocab_size=facts.vocab_size,
            aux_layers=list(facts.aux_layers),
            rms_norm_eps=layer.rms_norm_eps,
            max_positions=max_positions,
            rope=settled(Rope(layer.head_dim, max_positions, facts.rope)),
        )

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return 1

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    def to_json(self) -> str:
        return json.dumps({"family": FAMILY, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Eagle1Config":
        """Raises ConfigError when the text is no JSON, or has other keys or kinds of values."""
        try:
            values = dict(json.loads(text))
            if values.pop("family", None) != FAMILY:
                raise ValueError(f"its family is not {FAMILY}")
            config = cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"draft.json: not a draft of this version ({error})") from error
        refuse_unfit(config)
        return config


class PlainAttention(nn.Module):
    """Grouped-query attention of a Llama layer, D wide in and out."""

    def __init__(self, config: Eagle1Config):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, key, bias=False)
        self.o_proj = nn.Linear(query, width, bias=False)
        self.rotary = Rotary(Rope(config.head_dim, config.max_positions, config.rope))

    def heads(self, projection: nn.Linear, states: Tensor) -> Tensor:
        """[..., D] -> [..., H, Dh]."""
        return projection(states).unflatten(-1, (-1, self.head_dim))

    def remember(self, states: Tensor, rotation: Rotation, memory: Memory) -> None:
        """Give keys and values of rows to ``memory``, and compute nothing else."""
        key = rotation.rotate(self.heads(self.k_proj, states))
        memory.remember(key, self.heads(self.v_proj, states))

    def forward(self, states: Tensor, rotation: Rotation, memory: Memory) -> Tensor:
        """Rows that ``memory`` knows ask: [..., D] -> [..., D]."""
        query = rotation.rotate(self.heads(self.q_proj, states))
        return self.o_proj(memory.attend(query).flatten(-2))


class FirstLayer(nn.Module):
    """A Llama layer whose input is not normed: ``fc`` gives it."""

    def __init__(self, config: Eagle1Config):
        super().__init__()
        self.self_attn = PlainAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = StreamNorm(config.hidden_size, eps=config.rms_norm_eps)


class Eagle1Draft(nn.Module):
    """Trainable parameters carry the names of EAGLE-1 files; the verifier's own are frozen copies.

    It takes its steps as ``Eagle3Draft`` does: a token's share, the state, positions and a memory
    for each of its layers, which is one.
    """

    def __init__(self, config: Eagle1Config):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([FirstLayer(config)])
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.final_norm = StreamNorm(width, eps=config.rms_norm_eps)
        for own in (self.embed_tokens, self.lm_head, self.final_norm):
            own.requires_grad_(False)

    @torch.no_grad()
    def initialise(self, ends: VerifierEnds) -> None:
        """Random matrices beside the verifier's embedding, head and final norm.

        Raises ConfigError for a verifier whose final state or logits are made in another way.
        """
        for module in (self.fc, *self.layers.modules()):
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=INIT_STD)
        self.share(ends, copied=True)

    @torch.no_grad()
    def share(self, ends: VerifierEnds, copied: bool = False) -> None:
        """Take the verifier's embedding, head and final norm; not ``copied``: the tensors as they
        are, in the place of the rounded copies in a file. Raises ConfigError as ``initialise``."""
        refuse_other_ends(ends, self.config)
        assert ends.norm is not None
        for module, weight in (
            (self.embed_tokens, ends.embedding),
            (self.lm_head, ends.head),
            (self.final_norm, ends.norm.weight),
        ):
            if copied:
                module.weight.copy_(weight)
            else:
                module.weight = nn.Parameter(weight, requires_grad=False)

    @property
    def layer(self) -> FirstLayer:
        layer = self.layers[0]
        assert isinstance(layer, FirstLayer)
        return layer

    @property
    def stack(self) -> list[FirstLayer]:
        """Its decoder layers, each with a memory."""
        return [self.layer]

    def fuse(self, aux: Tensor) -> Tensor:
        """The stream after the verifier's last layer [..., D] -> its final state [..., D]."""
        return self.final_norm(aux)

    def share_of(self, tokens: Tensor, asks: bool = True) -> Tensor:
        """tokens [...] -> their share of ``fc`` [..., D], the same whether a row ``asks``."""
        del asks
        width = self.config.hidden_size
        return F.linear(self.embed_tokens(tokens), self.fc.weight[:, :width])

    def entered(self, share: Tensor, states: Tensor) -> Tensor:
        """What the layer reads [..., D]: fc on the pair of token and state."""
        width = self.config.hidden_size
        return share + F.linear(states.to(share.dtype), self.fc.weight[:, width:])

    def remember(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories: Sequence[Memory]
    ) -> None:
        """Give the memory the keys of rows, and compute nothing else."""
        attention = self.layer.self_attn
        rotation = attention.rotary.at(positions, share.dtype)
        attention.remember(self.entered(share, hidden), rotation, memories[0])

    def forward(
        self,
        share: Tensor,
        hidden: Tensor,
        positions: Tensor,
        memories: Sequence[Memory],
        known: bool = False,
    ) -> DraftOutput:
        """One step: row t pairs x[t+1+k] with f[t] or the guess of it, and guesses the next one.

        share [..., D] of the tokens, hidden [..., D], positions [...]; the memory says which keys
        a row sees. ``known``: it has the rows' own keys from ``remember``.
        """
        layer, entered, memory = self.layer, self.entered(share, hidden), memories[0]
        rotation = layer.self_attn.rotary.at(positions, share.dtype)
        if not known:
            layer.self_attn.remember(entered, rotation, memory)
        residual = entered.to(torch.promote_types(entered.dtype, torch.float32))
        residual = residual + layer.self_attn(entered, rotation, memory)
        normed = layer.post_attention_layernorm(residual)
        guess = residual + layer.mlp(normed.to(share.dtype))
        return DraftOutput(guess, guess.to(share.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] final states -> [..., V], by the verifier's head."""
        return self.lm_head(states)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids


def refuse_other_ends(ends: VerifierEnds, config: Eagle1Config) -> None:
    """Raise ConfigError for a verifier that this head cannot follow."""
    wanted = (config.vocab_size, config.hidden_size)
    for name, table in (("embedding", ends.embedding), ("head", ends.head)):
        if tuple(table.shape) != wanted:
            raise ConfigError(
                f"verifier.path: its {name} is {tuple(table.shape)}, its config says {wanted}; a "
                "draft must be as wide as its verifier"
            )
    scale = next((name for name in SCALES if getattr(ends.config, name, None)), None)
    if ends.norm is None or ends.norm.eps != config.rms_norm_eps:
        reason = "its final norm is no RMSNorm with the epsilon of its config"
    elif scale is not None:
        reason = f"it changes its logits by {scale}, and engines read this head without"
    else:
        return
    raise ConfigError(
        f"verifier.path: {reason}, so draft.family={FAMILY} cannot follow it; take "
        "draft.family=eagle3"
    )


SCALES = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # see scaled_logits
