"""Which of the library's model classes a verifier is, and whether Eyrie finds its way about it."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from conf.schema import Attention, ConfigError, VerifierSection

FLAGS = {  # of a model class: which attention it has beside eager
    Attention.sdpa: "_supports_sdpa",
    Attention.flash_attention_2: "_supports_flash_attn",
}


def auto_class(config: PreTrainedConfig) -> Any:
    """The library's door to a model that writes text; some wrappers of images have one alone."""
    kind = type(config)
    wrapped = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if wrapped and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def stored_name(model: PreTrainedModel, stored: Iterable[str], name: str) -> str:
    """That of the tensors ``stored`` which the library loads as parameter ``name``; else ``name``.

    Files spell embed_out for GPT-NeoX's lm_head, and older ones of wrapped models have prefixes of
    their own. Give those alone that may be it: a mixture has 100,000 inside its layers.
    """
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    parameters = model.state_dict()
    for key in stored:
        prefix = model.base_model_prefix
        if rename_source_key(key, renamings, [], prefix, parameters)[0] == name:
            return key
    return name


def refuse_attention(section: VerifierSection, config: PreTrainedConfig) -> None:
    """Raise ConfigError when the architecture has not the attention asked for (gpt-oss: eager)."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            model: Any = mapping[type(config)]
            break
    else:
        return  # code that comes with the weights: the library says it when it builds the model
    flag = FLAGS.get(section.attention)
    if flag and not getattr(model, flag, True):
        raise ConfigError(
            f"verifier.attention={section.attention.value}: {model.__name__} has no such kernel; "
            "take verifier.attention=eager"
        )


def refuse_structure(section: VerifierSection, model: PreTrainedModel, num_layers: int) -> None:
    """Raise ConfigError unless the states can be watched: a list of decoder layers and a head.

    That a layer's input is the library's hidden_states[n] is compared before a capture.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    head = model.get_output_embeddings()
    if not isinstance(layers, nn.ModuleList) or len(layers) != num_layers:
        reason = f"keeps its {num_layers} decoder layers where Eyrie does not find them"
    elif not isinstance(head, nn.Linear):
        reason = "has no head of one matrix"
    elif head.bias is not None:
        reason = "has a bias on its head, which training has not"
    else:
        return
    raise ConfigError(
        f"verifier.path={section.path}: {type(model).__name__} {reason}; choose another verifier, "
        "such as Llama or Qwen3"
    )


def missing_package(
    section: VerifierSection, config: PreTrainedConfig, error: ImportError
) -> ConfigError:
    """The ConfigError for a package that the library names and does not find."""
    named = str(error).splitlines()[0].rstrip(".")
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method:
        return ConfigError(
            f"verifier.path={section.path}: its weights are quantised with {method}, and the "
            f"library says: {named}; install that or give the unquantised weights"
        )
    return ConfigError(
        f"verifier.attention={section.attention.value}: {named}; take verifier.attention=sdpa"
    )


def refuse_missing_weights(section: VerifierSection, missing: Collection[str]) -> None:
    """The library fills what a file lacks with random numbers, and only warns."""
    if missing:
        raise ConfigError(
            f"verifier.path={section.path}: {len(missing)} weights of the model are not in its "
            f"files, {min(missing)} for one; fetch or save it again, unquantised if its "
            "quantisation is one that the library does not know"
        )
