"""Every family of drafts under one name: what they have in common, and what each reads."""

from pathlib import Path

from conf.schema import ConfigError
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.medusa import MedusaConfig, MedusaDraft
from models.phrases import PhraseConfig, PhraseTable
from models.small_model import ModelConfig, SmallModel
from models.verifier import VerifierFacts

Draft = Eagle3Draft | Eagle1Draft | MedusaDraft | SmallModel | PhraseTable
AnyConfig = DraftConfig | Eagle1Config | MedusaConfig | ModelConfig | PhraseConfig


def facts_read(config: AnyConfig) -> tuple[str, ...]:
    """The facts of a verifier that must be those of the one the draft was trained on."""
    match config:
        case DraftConfig() | Eagle1Config():
            return ("aux_layers", "hidden_size", "vocab_size")
        case PhraseConfig() | ModelConfig():
            return ("vocab_size",)
        case MedusaConfig():
            return ("hidden_size", "vocab_size")


def refuse_other_verifier(folder: Path, config: AnyConfig, facts: VerifierFacts) -> None:
    """Raise ConfigError unless the states and tokens are those that the draft reads."""
    named = facts_read(config)
    sizes = [name for name in ("vocab_size", "hidden_size") if name in named]
    if any(getattr(config, name) != getattr(facts, name) for name in sizes):
        raise ConfigError(
            f"{folder}: the head is for {words(config, sizes)}, and the verifier has "
            f"{words(facts, sizes, noun='')}; give the verifier it was trained on"
        )
    read = aux_layers_of(config)
    if read is not None and read != facts.aux_layers:
        layers = ",".join(map(str, read))
        raise ConfigError(
            f"{folder}: the head reads the streams after {read} layers, and the "
            f"verifier gives those after {facts.aux_layers}; set verifier.aux_layers=[{layers}]"
        )


def aux_layers_of(config: AnyConfig) -> list[int] | None:
    """The verifier's streams that the draft reads; None: none."""
    return config.aux_layers if isinstance(config, DraftConfig | Eagle1Config) else None


def words(found: AnyConfig | VerifierFacts, sizes: list[str], noun: str = " tokens") -> str:
    """128 tokens of width 64."""
    sized = not isinstance(found, ModelConfig | PhraseConfig)
    width = f" of width {found.hidden_size}" if sized and "hidden_size" in sizes else ""
    return f"{found.vocab_size}{noun}{width}"
