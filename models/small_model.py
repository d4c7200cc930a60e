"""The small model: any causal language model with the verifier's tokenizer, as a draft.

Vanilla speculative decoding (Leviathan et al., 2211.17192) asks nothing of the verifier but its
tokens. The model is the library's own, so its folder is one that every engine opens.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from conf.schema import ConfigError, DraftSection
from models.facts import LIBRARY_ERRORS, VerifierFacts
from models.layer_shape import MLP_FACTOR
from models.masks import Mask, Sight, masks_of, reaches_of
from models.rope import settle_longrope
from models.verifier import scaled_logits

FAMILY = "model"
ATTENTION = "sdpa"  # takes a mask, which packs and caches with a length per sequence need
HEAD_WIDTH, NARROW = 64, 512  # below so wide a model has heads of half that width


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build it: what the library's config.json says, and the verifier."""

    layout: dict[str, Any]  # of config.json
    vocab_size: int  # the verifier's
    max_positions: int

    @classmethod
    def of(cls, section: DraftSection, facts: VerifierFacts) -> "ModelConfig":
        """The model in draft.init, or a small Llama. Raises ConfigError."""
        if section.init is None:
            layout = llama(section, facts)
        else:
            with errors_named(Path(section.init)):
                layout = AutoConfig.from_pretrained(section.init)
        text = layout.get_text_config(decoder=True)
        if getattr(text, "rope_parameters", None) is None or getattr(text, "alibi", False):
            raise ConfigError(
                f"draft.init={section.init}: its positions are not rotary, and a draft decodes "
                "with a length of its own in each sequence; give a model such as Llama or Qwen3"
            )
        own = getattr(text, "max_position_embeddings", None) or facts.max_positions
        asked = section.max_positions or facts.max_positions
        whole = json.loads(layout.to_json_string(use_diff=False))
        return cls(whole, facts.vocab_size, min(own, asked))

    @property
    def draft_vocab_size(self) -> int:
        """Ids 0..Vd-1 are proposed. Rows beyond the other side's are padding."""
        return min(self.vocab_size, self.library.get_text_config(decoder=True).vocab_size)

    @property
    def library(self) -> PreTrainedConfig:
        return AutoConfig.for_model(**self.layout)

    def to_json(self) -> str:
        return json.dumps({"family": FAMILY, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """Raises ConfigError when the text is no JSON, or has other keys or kinds of values."""
        try:
            found = json.loads(text)
            config = cls(**{name: value for name, value in found.items() if name != "family"})
            sizes = config.vocab_size > 0 and config.max_positions > 0
            sound = sizes and isinstance(config.layout, dict)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"draft.json: not a draft of this version ({error})") from error
        if not sound:
            raise ConfigError(
                "draft.json: its sizes must be above 0 and its layout an object; give the file as "
                "training wrote it"
            )
        return config


def llama(section: DraftSection, facts: VerifierFacts) -> LlamaConfig:
    """Width, layers and MLP by the knobs; heads of 32 or 64, one key head each; a tied head.

    The table of tokens is most of a narrow model: V * width of it against about 16 * width^2 a
    layer. There is no padding token, whose row the library would not train.
    """
    width = section.width or facts.hidden_size // 4 // HEAD_WIDTH * HEAD_WIDTH or HEAD_WIDTH
    heads = width // (HEAD_WIDTH if width >= NARROW else HEAD_WIDTH // 2)
    eos = facts.eos_ids
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts.vocab_size,
        hidden_size=width,
        intermediate_size=section.intermediate_size or MLP_FACTOR * width,
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        rms_norm_eps=facts.layer.rms_norm_eps,
        max_position_embeddings=section.max_positions or facts.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=True,
        bos_token_id=facts.bos_id,
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=None,
    )


@dataclass(frozen=True)
class Rows:
    """The part of a head that the draft vocabulary has."""

    weight: Tensor  # [Vd, width]


class SmallModel(nn.Module):
    """The library's model behind the names that training and drafting know."""

    def __init__(self, config: ModelConfig, lm: PreTrainedModel):
        super().__init__()
        self.config = config
        self.lm = lm
        settle_longrope(lm, config.max_positions)
        self.library = lm.config
        self.size = config.draft_vocab_size

    @classmethod
    def new(cls, config: ModelConfig) -> "SmallModel":
        """Random weights, as the library begins with. The seed is the caller's."""
        model: Any = AutoModelForCausalLM
        kinds = {"dtype": torch.float32, "attn_implementation": ATTENTION}
        return cls(config, model.from_config(config.library, **kinds))

    def _apply(self, fn: Any, recurse: bool = True) -> "SmallModel":
        """A cast of the model must not round its rotary tables: bfloat16 has 8 bits."""
        tables = [
            (module, name, table)
            for module in self.lm.modules()
            for name, table in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set and table.is_floating_point()
        ]
        super()._apply(fn, recurse)
        for module, name, before in tables:
            setattr(module, name, before.to(module.get_buffer(name).device))
        return self

    @property
    def rows(self) -> int:
        """Of the embedding."""
        table: Any = self.lm.get_input_embeddings()
        return table.num_embeddings

    @property
    def lm_head(self) -> Any:
        """As the loss reads it: ``weight`` [Vd, width]."""
        head: Any = self.lm.get_output_embeddings()
        return Rows(head.weight[: self.size])

    @property
    def t2d(self) -> Tensor:
        """[V] bool: which of the verifier's tokens can be proposed."""
        return torch.arange(self.config.vocab_size, device=self.lm.device) < self.size

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """A valid id, but junk, for tokens that the model lacks."""
        return target_ids.clamp_max(self.size - 1)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """input_ids [B, T], positions [B, T] -> [B, T, width], what the head reads.

        An id beyond the embedding is a row to spare that the verifier may name: its last row then
        stands for it, since a draft may guess badly and may not stop.
        """
        backbone: Any = self.lm.get_decoder()
        output = backbone(
            input_ids=input_ids.clamp_max(self.rows - 1),
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def pack_mask(self, positions: Tensor) -> Mask:
        """positions [T], from 0 in each document -> who sees whom in a pack: [1, 1, T, T].

        Itself and what comes before it in its document, as far as a kind of layer looks back.
        """
        document = (positions == 0).cumsum(0)
        seen = (document[:, None] == document).tril()
        sight = Sight(seen[None], positions[None], positions[None])
        return masks_of(sight, reaches_of(self.library, len(positions) + 1))

    def logits(self, states: Tensor) -> Tensor:
        """[..., width] -> [..., Vd], with the model's own scale or soft-cap."""
        head: Any = self.lm.get_output_embeddings()
        return scaled_logits(head(states)[..., : self.size], self.library.get_text_config())


@contextmanager
def errors_named(folder: Path) -> Iterator[None]:
    """What the library says of a model in ``folder`` as one ConfigError."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".: ")
        raise ConfigError(
            f"draft.init={folder}: cannot be loaded ({reason}); give a folder of a causal language "
            "model with its tokenizer, written by save_pretrained"
        ) from error
