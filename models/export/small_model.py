"""A small model as a folder that vLLM serves as a draft: the library's own layout, and its check.

vLLM 0.32 (method draft_model) wants equally many rows on both sides, and compares no token.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.schema import ConfigError, ExportFormat, Precision
from models.export.card import CardFacts, Subject, written
from models.export.check_tensors import numbers
from models.export.check_verifier import other_tokens, other_weights, sizes_of
from models.export.folder import origin_of, put
from models.export.layout import CARD, CONFIG, ORIGIN, WEIGHTS
from models.model_folder import write_model
from models.small_model import SmallModel
from models.token_strings import FILE as TOKENS
from models.token_strings import TOKENIZER

LIMITS = [
    "- Not a judge of anything: the verifier decides, and the text is the verifier's own.",
    "- Not a promise of speed: acceptance falls on text unlike the training data, and the",
    "  speed-up depends on machine, engine, batch size and chain length. Measure your own.",
]


def refuse_for_engine(draft: SmallModel, kind: ExportFormat) -> None:
    """Raise ConfigError for an engine that is not known to serve it, or that would refuse it."""
    if kind is not ExportFormat.vllm:
        raise ConfigError(
            f"--to {kind.value}: a draft of the family model is written for vLLM alone; take "
            "--to vllm, whose folder is the library's own"
        )
    if draft.rows != draft.config.vocab_size:
        raise ConfigError(
            f"--to vllm: the model's embedding has {draft.rows} rows and the verifier's "
            f"{draft.config.vocab_size}, and vLLM serves a draft model with equally many alone; "
            "pad the smaller one's embedding and head with save_pretrained first"
        )


def export_model(
    draft: SmallModel,
    folder: Path,
    card: CardFacts,
    dtype: Precision,
    kind: ExportFormat,
    tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """Weights, config.json, the verifier's tokenizer and a card; an older export is replaced.

    Raises ConfigError where the engine would refuse it, or the written files do not pass the check.
    """
    refuse_for_engine(draft, kind)

    def fill(place: Path) -> list[str]:
        width = getattr(torch, dtype.value)
        state = {name: tensor.to(width) for name, tensor in draft.state_dict().items()}
        write_model(place, draft.config, state)
        tokenizer.save_pretrained(place)
        (place / ORIGIN).write_text(origin_of(card), encoding="utf-8")
        if card.tokens is not None:
            shutil.copyfile(card.tokens, place / TOKENS)
        text = card_text(draft, card, serve(card, folder))
        (place / CARD).write_text(text, encoding="utf-8")
        return check_model(place)

    return put(folder, fill)


def serve(card: CardFacts, folder: Path) -> list[str]:
    speculative = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": card.serve_n,
    }
    return [
        f"vllm serve {quote(card.served_verifier)} "
        f"--speculative-config {quote(json.dumps(speculative))}"
    ]


def card_text(draft: SmallModel, card: CardFacts, commands: list[str]) -> str:
    """README.md of the folder."""
    text = draft.library.get_text_config(decoder=True)
    total = sum(parameter.numel() for parameter in draft.parameters())
    table = draft.rows * text.hidden_size
    opening = [
        f"A language model that guesses tokens which `{card.verifier}` then verifies, so that",
        "several tokens come out of one verifier step and the text stays the verifier's own.",
        "Made with Eyrie.",
    ]
    model = [
        f"- {text.model_type}: {text.num_hidden_layers} layers of width {text.hidden_size}",
        f"- {total:,} parameters, {table / total:.0%} of them the embedding of {draft.rows:,} "
        "tokens",
        f"- positions up to {draft.config.max_positions:,}",
        f"- for `{card.verifier}`, weights fingerprint "
        f"{card.verifier_fingerprint or 'not recorded'}",
    ]
    subject = Subject("draft-model", "Small draft model", opening, {"Model": model}, LIMITS)
    return written(card, subject, commands)


def check_model(folder: Path, verifier: Path | None = None) -> list[str]:
    """What vLLM would not notice in a draft model's folder, a sentence each.

    Names, shapes and kinds of the weights against the model that config.json describes, numbers,
    tokenizer; with the verifier's folder rows, tokens and weights are compared, too.
    """
    if not (folder / WEIGHTS).is_file():
        return [f"{WEIGHTS}: missing in {folder}"]
    try:
        config = AutoConfig.from_pretrained(folder)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            findings = [*weights(file, config), *numbers(file)]
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        return [f"{folder}: cannot be read ({error})"]
    if not (folder / TOKENIZER).is_file() and not list(folder.glob("*.model")):
        findings.append(f"{TOKENIZER}: missing in {folder}; save the verifier's tokenizer there")
    if verifier is not None:
        ours, theirs = config.get_text_config(decoder=True).vocab_size, sizes_of(verifier)
        if ours != theirs["vocab_size"]:
            findings.append(
                f"{CONFIG}: vocab_size={ours}: the verifier's is {theirs['vocab_size']}, and vLLM "
                "serves a draft model with equally many rows alone"
            )
        if (folder / ORIGIN).is_file():
            findings += other_weights(folder, verifier)
        findings += other_tokens(folder, verifier)
    return findings


def weights(file: Any, config: Any) -> Iterator[str]:
    """Against the model that ``config`` describes, made without memory."""
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = model.from_config(config)
    tied = skeleton.all_tied_weights_keys
    expected = {name: tuple(one.shape) for name, one in skeleton.state_dict().items()}
    present = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    for name in sorted(expected.keys() - present.keys() - set(tied)):
        yield f"{WEIGHTS}: {name} missing; vLLM would run with uninitialised or wrong values"
    for name in sorted(present.keys() - expected.keys()):
        yield f"{WEIGHTS}: {name}: unknown to a {config.model_type} model"
    for name in sorted(present.keys() & expected.keys()):
        if present[name] != expected[name]:
            yield f"{WEIGHTS}: {name}: shape {present[name]}, must be {expected[name]}"
