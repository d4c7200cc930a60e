"""Every family of drafts under one name: what they have in common, and what each reads."""

from pathlib import Path

from conf.schema import ConfigError
from models.eagle3 import DraftConfig, Eagle3Draft
from models.small_model import ModelConfig, SmallModel
from models.verifier import VerifierFacts

Draft = Eagle3Draft | SmallModel
AnyConfig = DraftConfig | ModelConfig


def facts_read(config: AnyConfig) -> tuple[str, ...]:
    """The facts of a verifier that must be those of the one the draft was trained on."""
    match config:
        case DraftConfig():
            return ("aux_layers", "hidden_size", "vocab_size")
        case ModelConfig():
            return ("vocab_size",)


def refuse_other_verifier(folder: Path, config: AnyConfig, facts: VerifierFacts) -> None:
    """Raise ConfigError unless the states and tokens are those that the draft reads."""
    named = facts_read(config)
    sizes = [name for name in ("vocab_size", "hidden_size") if name in named]
    if any(getattr(config, name) != getattr(facts, name) for name in sizes):
        raise ConfigError(
            f"{folder}: the head is for {words(config, sizes)}, and the verifier has "
            f"{words(facts, sizes, noun='')}; give the verifier it was trained on"
        )
    if isinstance(config, DraftConfig) and config.aux_layers != facts.aux_layers:
        layers = ",".join(map(str, config.aux_layers))
        raise ConfigError(
            f"{folder}: the head reads the streams after {config.aux_layers} layers, and the "
            f"verifier gives those after {facts.aux_layers}; set verifier.aux_layers=[{layers}]"
        )


def words(found: AnyConfig | VerifierFacts, sizes: list[str], noun: str = " tokens") -> str:
    """128 tokens of width 64."""
    width = "" if isinstance(found, ModelConfig) else f" of width {found.hidden_size}"
    width = width if "hidden_size" in sizes else ""
    return f"{found.vocab_size}{noun}{width}"
