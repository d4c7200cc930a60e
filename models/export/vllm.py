"""Writes a head as the folder that vLLM serves: whole, checked, or not at all."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from conf.runtime import say, sync_folder
from conf.schema import ConfigError, Precision, RunConfig
from models.bundled import resolve
from models.draft_file import load_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts, card_of_run, serve_command, write_card
from models.export.vllm_check import check
from models.export.vllm_layout import (
    ARCHITECTURE,
    CARD,
    CONFIG,
    QK_ARCHITECTURE,
    WEIGHTS,
    TokenIds,
    config_for,
    expected_tensors,
)
from models.token_strings import refuse_other_tokens
from models.verifier import VerifierFacts, load_facts, load_tokenizer

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


def export_run(cfg: RunConfig, run: Path, data: DataFacts | None = None) -> None:
    """Write a run's best head in every format that ``cfg.export`` names; say how to serve it."""
    for kind in cfg.export.formats:
        export_head(cfg, run / "best", run / "export" / kind.value, data)


def export_head(
    cfg: RunConfig,
    head: Path,
    folder: Path,
    data: DataFacts | None = None,
    dtype: Precision = Precision.bfloat16,
) -> None:
    """Write the head in ``head`` to ``folder``, with the card of the run that ``cfg`` describes."""
    cache = Path(cfg.run.cache)
    draft = load_draft(head, torch.device("cpu"), torch.float32)
    refuse_other_tokens(head, load_tokenizer(cfg.verifier, cache))
    card = card_of_run(head, cfg, data, resolve(cfg.verifier.path, cache))
    export(draft, load_facts(cfg.verifier, cache), folder, card, dtype)
    say(f"{folder}: written and checked ({dtype.value}); serve it with")
    say(serve_command(card, folder))


def export(
    draft: Eagle3Draft,
    facts: VerifierFacts,
    folder: Path,
    card: CardFacts,
    dtype: Precision = Precision.bfloat16,
) -> Path:
    """Write config.json, model.safetensors and README.md; an older export there is replaced.

    The embedding stays out (vLLM shares the verifier's); the head's own rows always go in. Raises
    ConfigError when head and verifier do not fit, when the folder holds something else, or when
    the written files do not pass ``check``.
    """
    judge(draft.config, facts)
    refuse_foreign(folder)
    place = folder.resolve()
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir(parents=True)
        write_files(draft, facts, temporary, dtype)
        (temporary / CARD).write_text(write_card(card, draft.config, folder), encoding="utf-8")
        findings = check(temporary)
        if findings:
            raise ConfigError(f"{folder}: the head cannot be exported: {'; '.join(findings)}")
        replace_folder(temporary, place)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); mend that or give another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write_files(draft: Eagle3Draft, facts: VerifierFacts, folder: Path, dtype: Precision) -> None:
    save_file(tensors_of(draft, dtype), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600; a server is another user
    config = config_for(draft.config, TokenIds.of(facts), dtype)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tensors_of(draft: Eagle3Draft, dtype: Precision) -> dict[str, Tensor]:
    """The tensors of the layout, floating ones cast to ``dtype``, in memory of their own."""
    state = draft.state_dict()
    chosen = {}
    for name in expected_tensors(draft.config, dtype):
        tensor = state[name].detach().cpu()
        chosen[name] = tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
    return {name: tensor.contiguous() for name, tensor in chosen.items()}


def judge(config: DraftConfig, facts: VerifierFacts) -> None:
    """Refuse a head of another verifier; warn where serving would be worse than training."""
    for name in ("hidden_size", "vocab_size", "aux_layers"):
        ours, theirs = getattr(config, name), getattr(facts, name)
        if ours != theirs:
            raise ConfigError(
                f"verifier.path={facts.path}: {name} is {theirs}, the head was trained with "
                f"{ours}; give the verifier it was trained on"
            )
    if config.max_positions < facts.max_positions:
        say(
            f"warning: the head's position limit {config.max_positions} is below the verifier's "
            f"{facts.max_positions}: acceptance beyond it is untested (draft.max_positions)"
        )


def refuse_foreign(folder: Path) -> None:
    """An export replaces an export or an empty folder, never anything else."""
    if folder.is_file():
        raise ConfigError(f"{folder}: is a file; give a folder to write to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    config = folder / CONFIG
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    if ARCHITECTURE not in text and QK_ARCHITECTURE not in text:
        raise ConfigError(f"{folder}: holds something else than an export; give another folder")


def replace_folder(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; at every moment one of the two is whole on disk."""
    for path in new.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(new)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
