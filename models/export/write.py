"""Writes a head as a folder that an engine serves: whole, checked, or not at all."""

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
from models.draft_file import load_draft, read_config
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts, card_of_run, write_card
from models.export.check import check
from models.export.engines import LAYOUTS, layout_for
from models.export.layout import (
    CARD,
    CONFIG,
    MIDLAYER,
    ORIGIN,
    STORED,
    WEIGHTS,
    Layout,
    Setting,
    expected_tensors,
    respell,
)
from models.export.phrases import export_phrases
from models.export.vllm import VLLM
from models.phrases import PhraseConfig, PhraseTable
from models.token_strings import FILE as TOKENS
from models.token_strings import refuse_other_tokens
from models.verifier import VerifierFacts, load_ends, load_facts, load_tokenizer

KINDS = {  # safetensors' names
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}


def export_run(cfg: RunConfig, run: Path, data: DataFacts | None = None) -> None:
    """Write a run's best head in every format that ``cfg.export`` names; say how to serve it."""
    for kind in cfg.export.formats:
        export_head(cfg, run / "best", run / "export" / kind.value, data, layout=LAYOUTS[kind])


def export_head(
    cfg: RunConfig,
    head: Path,
    folder: Path,
    data: DataFacts | None = None,
    dtype: Precision = Precision.bfloat16,
    layout: Layout = VLLM,
) -> None:
    """Write the head in ``head`` to ``folder``, with the card of the run that ``cfg`` describes."""
    found = read_config(head)
    if isinstance(found, PhraseConfig):
        export_phrases(found, folder, layout.format, cfg.eval.n_draft)
        return
    cache = Path(cfg.run.cache)
    table = load_ends(cfg.verifier, cache, torch.float32).embedding if layout.embedding else None
    draft = load_draft(head, torch.device("cpu"), torch.float32, table)
    assert not isinstance(draft, PhraseTable)  # as its config says
    layout = layout_for(draft.config, layout)
    refuse_other_tokens(head, load_tokenizer(cfg.verifier, cache))
    card = card_of_run(head, cfg, data, resolve(cfg.verifier.path, cache))
    export(draft, load_facts(cfg.verifier, cache), folder, card, dtype, layout)
    say(f"{folder}: written and checked for {layout.engine} ({dtype.value}); serve it with")
    for line in layout.serve(card, draft.config, folder):
        say(line)


def export(
    draft: Eagle3Draft,
    facts: VerifierFacts,
    folder: Path,
    card: CardFacts,
    dtype: Precision = Precision.bfloat16,
    layout: Layout = VLLM,
) -> Path:
    """Write config.json, model.safetensors and README.md; an older export there is replaced.

    The embedding stays out where engines share the verifier's; the head's own rows always go in.
    Raises ConfigError when head and verifier do not fit, when the engine would run another head,
    when the folder holds something else, or when the written files do not pass ``check``.
    """
    judge(draft.config, facts, layout)
    refuse_foreign(folder)
    place = folder.resolve()
    temporary = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of an export that was killed
    try:
        temporary.mkdir(parents=True)
        setting = Setting.of(facts, card, dtype)
        write_files(draft, setting, temporary, layout)
        (temporary / ORIGIN).write_text(origin_of(card), encoding="utf-8")
        if card.tokens is not None:
            shutil.copyfile(card.tokens, temporary / TOKENS)
        text = write_card(card, draft.config, layout.serve(card, draft.config, folder))
        (temporary / CARD).write_text(text, encoding="utf-8")
        findings = check(temporary, layout=layout)
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


def origin_of(card: CardFacts) -> str:
    """The verifier that the head learnt from, for ``check`` to compare with another."""
    origin = {
        "verifier": card.verifier,
        "revision": card.revision,
        "fingerprint": card.verifier_fingerprint,
        "states": card.verifier_dtype,
    }
    return json.dumps(origin, indent=2) + "\n"


def write_files(draft: Eagle3Draft, setting: Setting, folder: Path, layout: Layout) -> None:
    tensors = tensors_of(draft, layout, Precision(setting.dtype))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600; a server is another user
    config = layout.config_for(draft.config, setting)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tensors_of(draft: Eagle3Draft, layout: Layout, dtype: Precision) -> dict[str, Tensor]:
    """The tensors of the layout, floating ones cast to ``dtype``, in memory of their own."""
    state = draft.state_dict()
    chosen = {}
    for name, spec in expected_tensors(draft.config, layout, dtype).items():
        own = name if name in state else respell(name, MIDLAYER)
        tensor = state[own].detach().cpu()
        kind = KINDS[spec.dtype or exact(tensor, dtype)]
        chosen[name] = tensor.to(kind, copy=True).contiguous()
    return chosen


def exact(table: Tensor, dtype: Precision) -> str:
    """``dtype`` where it holds every entry of the verifier's table, else float32."""
    same = torch.equal(table.to(KINDS[STORED[dtype]]).to(table.dtype), table)
    return STORED[dtype if same else Precision.float32]


def judge(config: DraftConfig, facts: VerifierFacts, layout: Layout) -> None:
    """Refuse a head of another verifier, or one that the engine would run as another; warn where
    serving would be worse than training."""
    for words in layout.refusals(config):
        raise ConfigError(
            f"--to {layout.format.value}: {words}; train without it, or export for another engine"
        )
    if not layout.last_stream and config.aux_layers[-1] == facts.num_layers:
        raise ConfigError(
            f"--to {layout.format.value}: aux_layers={config.aux_layers}: {layout.engine} takes "
            f"ids below {facts.num_layers} alone; train with others, or export for another engine"
        )
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
    if folder.exists() and not folder.is_dir():  # a device, too: /dev/null would be replaced
        raise ConfigError(f"{folder}: is no folder; give a folder to write to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / ORIGIN).is_file() or not (folder / CONFIG).is_file():
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
