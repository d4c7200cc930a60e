"""What a draft starts from: the verifier and chance, or the weights of the head in draft.init."""

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from conf.runtime import note_once
from conf.schema import FULL, ConfigError, DraftFamily, DraftSection, HeadInit
from models.drafts import AnyConfig, Draft
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.heads import config_of, load_head, vocabulary_of
from models.medusa import MedusaConfig, MedusaDraft
from models.model_folder import read_model, refuse_untrainable
from models.phrases import PhraseConfig
from models.rope import Rope, Rotary
from models.small_model import ModelConfig, SmallModel
from models.verifier import VerifierEnds, VerifierFacts
from models.vocab import DraftVocab, draft_vocab_size

# No knob sets these: without draft.init they are the verifier's, with it the head's.
OF_THE_HEAD = ("num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope")
OF_THE_VERIFIER = ("hidden_size", "vocab_size")
KNOBS = {"aux_layers": "verifier.aux_layers", "draft_vocab_size": "draft.vocab_size"}


def config_to_train(section: DraftSection, facts: VerifierFacts, depth: int = 0) -> AnyConfig:
    """The draft that ``section`` asks for, of Medusa one with ``depth`` heads (ttt.depth).

    Raises ConfigError where draft.init is another one.
    """
    match section.family:
        case DraftFamily.eagle3:
            return eagle3_to_train(section, facts)
        case DraftFamily.ngram:
            return PhraseConfig.of(section, facts)
        case DraftFamily.eagle1:
            return Eagle1Config.of(section, facts)
        case DraftFamily.medusa:
            return MedusaConfig.of(section, facts, depth)
        case DraftFamily.model:
            return ModelConfig.of(section, facts)
        case other:
            raise not_trained(other)


def not_trained(family: DraftFamily) -> ConfigError:
    return ConfigError(
        f"draft.family={family.value}: this version cannot train it; take draft.family=eagle3"
    )


def eagle3_to_train(section: DraftSection, facts: VerifierFacts) -> DraftConfig:
    """The head that ``section`` asks for; with draft.init, as far as knobs go, that one's twin.

    The position limit is the section's: it is no weight, and a published head often has a low one.
    Raises ConfigError with the first field that differs from the head in draft.init.
    """
    asked = DraftConfig.of(section, facts)
    if asked.max_positions < facts.max_positions:
        note_once(
            f"draft.max_positions={asked.max_positions}: below the verifier's "
            f"{facts.max_positions}; beyond it nothing will be drafted"
        )
    return asked if section.init is None else twin_of_head(section.init, asked, facts)


def twin_of_head(init: str, asked: DraftConfig, facts: VerifierFacts) -> DraftConfig:
    """``asked``, but where no knob says what the head in ``init`` says."""
    found = config_of(Path(init), facts)
    if not isinstance(found, DraftConfig):
        raise ConfigError(f"draft.init={init}: is no EAGLE-3 head; give one, or draft.init=null")
    for name in [field.name for field in fields(DraftConfig)]:
        theirs, ours = getattr(found, name), getattr(asked, name)
        if name not in (*OF_THE_HEAD, "max_positions") and theirs != ours:
            raise ConfigError(
                f"draft.init={init}: its {name} is {theirs}, here it would be {ours}; "
                + remedy(name, found)
            )
    kept = {name: getattr(found, name) for name in OF_THE_HEAD}
    for name, value in kept.items():
        if value != getattr(asked, name):
            note_once(f"draft.init: {name} is the head's, {value}, not {getattr(asked, name)}")
    trained = replace(asked, **kept)
    refuse_other_table(init, found, trained)
    return trained


def remedy(name: str, found: DraftConfig) -> str:
    if name in OF_THE_VERIFIER:
        return "give the verifier it was trained on"
    value = getattr(found, name)
    words = str(value).lower().replace(" ", "")  # true, false, [2,4,5] or a number
    if name == "draft_vocab_size" and value == found.vocab_size:
        words = FULL
    return f"set {KNOBS.get(name, f'draft.{name}')}={words}"


def refuse_other_table(init: str, found: DraftConfig, trained: DraftConfig) -> None:
    """Another position limit must leave the rotary table as the weights know it."""
    if trained.max_positions == found.max_positions:
        return
    before, after = (Rotary(Rope(c.head_dim, c.max_positions, c.rope)) for c in (found, trained))
    same = torch.equal(before.inverse_frequencies, after.inverse_frequencies)
    if not same or before.scaling != after.scaling:
        raise ConfigError(
            f"draft.init={init}: its rotary table holds for {found.max_positions} "
            f"positions, and {trained.max_positions} would change it; set "
            f"draft.max_positions={found.max_positions}"
        )
    note_once(
        f"draft.init: the position limit becomes {trained.max_positions}, the head had "
        f"{found.max_positions} (draft.max_positions)"
    )


def vocabulary_to_train(section: DraftSection, facts: VerifierFacts, counts: Tensor) -> DraftVocab:
    """That of the head in draft.init, else the most frequent tokens of ``counts`` [V]."""
    if section.family is DraftFamily.model:  # its ids come first among the verifier's
        size = ModelConfig.of(section, facts).draft_vocab_size
        return DraftVocab.of_ids(torch.arange(size), counts.numel())
    if section.init is None:
        return DraftVocab.from_counts(counts, draft_vocab_size(section, counts.numel()))
    return vocabulary_of(Path(section.init), eagle3_to_train(section, facts))


def new_draft(
    section: DraftSection,
    facts: VerifierFacts,
    ends: VerifierEnds,
    vocab: DraftVocab,
    depth: int = 0,
) -> Draft:
    """A draft to train, of the family that ``section`` names; ``depth`` as in config_to_train."""
    match section.family:
        case DraftFamily.eagle3:
            return new_eagle3(section, facts, ends, vocab)
        case DraftFamily.eagle1:
            draft = Eagle1Draft(Eagle1Config.of(section, facts))
            draft.initialise(ends)
            return draft
        case DraftFamily.medusa:
            heads = MedusaDraft(MedusaConfig.of(section, facts, depth))
            heads.initialise(ends, vocab, section.head_init)
            return heads
        case DraftFamily.model:
            return new_model(section, facts)
        case other:
            raise not_trained(other)


def new_model(section: DraftSection, facts: VerifierFacts) -> SmallModel:
    """Random weights, or those of the model in draft.init. Raises ConfigError."""
    config = ModelConfig.of(section, facts)
    if section.init is None:
        return SmallModel.new(config)
    draft = read_model(Path(section.init), config, torch.float32)
    refuse_untrainable(draft)
    return draft


def new_eagle3(
    section: DraftSection, facts: VerifierFacts, ends: VerifierEnds, vocab: DraftVocab
) -> Eagle3Draft:
    """A head to train. The embedding is the verifier's, frozen; with ``head_init: frozen`` the
    head's rows are, too, whatever the head in draft.init has."""
    draft = Eagle3Draft(eagle3_to_train(section, facts))
    draft.initialise(ends, vocab, section.head_init)
    if section.init is not None:
        source = load_head(Path(section.init), facts, ends)
        assert isinstance(source, Eagle3Draft)  # twin_of_head has refused others
        take_weights(draft, source, section.head_init)
    return draft


@torch.no_grad()
def take_weights(draft: Eagle3Draft, source: Eagle3Draft, head_init: HeadInit) -> None:
    if head_init is HeadInit.frozen and rows_differ(draft, source):
        note_once(
            "draft.init: that head has rows of its own, which are not taken, for "
            "draft.head_init=frozen reads with the verifier's; draft.head_init=verifier trains "
            "them on"
        )
    for name, parameter in draft.named_parameters():
        rows = name.startswith("lm_head.") and head_init is HeadInit.frozen
        if not rows and not name.startswith("embed_tokens."):
            parameter.copy_(source.get_parameter(name))


def rows_differ(draft: Eagle3Draft, source: Eagle3Draft) -> bool:
    """Beyond what storing them in bfloat16 rounds."""
    ours, theirs = draft.lm_head.weight, source.lm_head.weight.to(draft.lm_head.weight)
    return not torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6)
