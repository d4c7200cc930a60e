"""What a verifier's own files say without its weights: configuration, sizes and tokenizer."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.schema import ConfigError, VerifierSection
from models.architecture import refuse_attention
from models.bundled import resolve
from models.layer_shape import LayerShape
from models.rope import STATIC_TYPES, table_for_llama

MIN_LAYERS = 7  # below it the default aux layers [2, L//2, L-3] are not three ascending ids
NEEDED = (  # of a verifier's config: the draft is Llama layers on its states
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_parameters",
)
# What the library raises for files that it cannot use.
LIBRARY_ERRORS = (OSError, ValueError, ImportError, StrictDataclassError, SafetensorError)


@dataclass(frozen=True)
class VerifierFacts:
    """What the rest of Eyrie needs to know about a verifier; read from its config alone."""

    path: str  # as the user gave it
    architectures: list[str]
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding; the tokenizer may have fewer
    max_positions: int
    layer: LayerShape  # of a draft that follows it
    rope: dict[str, Any]  # rope_type, rope_theta and the type's own parameters, for the draft
    aux_layers: list[int]  # n = the stream after n decoder layers
    bos_id: int | None
    eos_ids: list[int]


@contextmanager
def library_errors_named(section: VerifierSection, part: str) -> Iterator[None]:
    """Turn what the library says about ``part`` of the verifier into one ConfigError."""
    try:
        yield
    except ConfigError:
        raise  # it already is a sentence
    except LIBRARY_ERRORS as error:
        words = str(error) or type(error).__name__
        reason = textwrap.shorten(words, 200).rstrip(".: ")
        remedy = (
            "give a folder written by save_pretrained, with its tokenizer, of an architecture that "
            f"transformers {transformers.__version__} knows"
        )
        if "trust_remote_code" in words and not section.trust_remote_code:
            remedy = "read that code, then let it run with verifier.trust_remote_code=true"
        raise ConfigError(
            f"verifier.path={section.path}: its {part} cannot be loaded ({reason}); {remedy}"
        ) from error


def load_config_of(section: VerifierSection, cache: Path) -> PreTrainedConfig:
    """Raises ConfigError: an architecture the library lacks, or code that may not run."""
    folder = resolve(section.path, cache)
    with library_errors_named(section, "config.json"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)


def load_tokenizer(section: VerifierSection, cache: Path) -> PreTrainedTokenizerBase:
    """Raises ConfigError when the folder holds none that the library can read."""
    folder = resolve(section.path, cache)
    with library_errors_named(section, "tokenizer"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)


def load_facts(section: VerifierSection, cache: Path) -> VerifierFacts:
    """Read sizes from the config, a wrapped text model's from its text part.

    Raises ConfigError for a model that a Llama layer cannot follow, GPT-2 for one.
    """
    return facts_of(section, load_config_of(section, cache))


def facts_of(section: VerifierSection, config: PreTrainedConfig) -> VerifierFacts:
    """What ``load_facts`` reads, of a config that is at hand."""
    text = config.get_text_config(decoder=True)
    refuse_other_kinds(section, config, text)
    refuse_attention(section, config)
    rope = rope_of(section, text)
    eos = text.eos_token_id if text.eos_token_id is not None else config.eos_token_id
    return VerifierFacts(
        path=section.path,
        architectures=list(config.architectures or []),
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        layer=LayerShape.of(text, rope),
        rope=rope,
        aux_layers=aux_layers_of(section, text.num_hidden_layers),
        bos_id=text.bos_token_id,
        eos_ids=[] if eos is None else [eos] if isinstance(eos, int) else list(eos),
    )


def refuse_other_kinds(
    section: VerifierSection, config: PreTrainedConfig, text: PreTrainedConfig
) -> None:
    """Raise ConfigError unless this is a decoder whose positions are rotary."""
    missing = [name for name in NEEDED if getattr(text, name, None) is None]
    if config.is_encoder_decoder:
        reason = "is an encoder and a decoder, and a draft head follows a decoder alone"
    elif missing:
        reason = f"has no {', '.join(missing)}, which the draft head takes from its verifier"
    elif getattr(text, "alibi", False):
        reason = "takes its positions from ALiBi, and the draft head's are rotary"
    else:
        return
    raise ConfigError(
        f"verifier.path={section.path}: its kind, {text.model_type}, {reason}; choose one with "
        "rotary positions, such as Llama or Qwen3"
    )


def rope_of(section: VerifierSection, text: PreTrainedConfig) -> dict[str, Any]:
    """The rotary table for the draft. Raises ConfigError when it cannot have the verifier's."""
    table = table_for_llama(text.rope_parameters)
    if table is None:
        kinds = [name for name, one in text.rope_parameters.items() if isinstance(one, dict)]
        reason = f"rotary tables of its own for {' and '.join(kinds)}"
    elif (kind := table.get("rope_type", "default")) not in STATIC_TYPES:
        reason = f"a rotary table of type {kind}"
    else:
        return table
    raise ConfigError(
        f"verifier.path={section.path}: its kind, {text.model_type}, has {reason}, which the "
        f"draft head cannot have; choose one with a table of type {', '.join(STATIC_TYPES)}"
    )


def aux_layers_of(section: VerifierSection, num_layers: int) -> list[int]:
    """The ids to capture, checked: ascending, unique, each in 1..L; negative ones count from L."""
    if section.aux_layers is None:
        if num_layers < MIN_LAYERS:
            raise ConfigError(
                f"verifier.aux_layers=null: the default needs {MIN_LAYERS} layers and "
                f"{section.path} has {num_layers}; give the ids, for example "
                f"verifier.aux_layers=[1,2,{num_layers}]"
            )
        return [2, num_layers // 2, num_layers - 3]
    given = list(section.aux_layers)
    ids = [n if n >= 0 else num_layers + 1 + n for n in given]
    if not ids or sorted(set(ids)) != ids or ids[0] < 1 or ids[-1] > num_layers:
        raise ConfigError(
            f"verifier.aux_layers={given}: must be ascending, unique ids in 1..{num_layers}; "
            "null takes [2, L//2, L-3]"
        )
    return ids
