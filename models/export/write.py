"""Writes a head as a folder that an engine serves: whole, checked, or not at all."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.runtime import say
from conf.schema import ConfigError, Precision, RunConfig
from models.bundled import resolve
from models.draft_file import load_draft, read_config
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts, card_of_run, write_card
from models.export.check import check
from models.export.engines import LAYOUTS, layout_for
from models.export.folder import origin_of, put
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
from models.export.medusa import serve_medusa
from models.export.medusa_write import export_medusa
from models.export.phrases import export_phrases
from models.export.small_model import export_model, serve
from models.export.vllm import VLLM
from models.medusa import MedusaDraft
from models.phrases import PhraseConfig, PhraseTable
from models.small_model import SmallModel
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
    tokenizer = load_tokenizer(cfg.verifier, cache)
    refuse_other_tokens(head, tokenizer)
    card = card_of_run(head, cfg, data, resolve(cfg.verifier.path, cache))
    facts = load_facts(cfg.verifier, cache)
    if isinstance(draft, MedusaDraft):
        export_medusa(draft, facts, folder, card, dtype, layout.format)
        lines = serve_medusa(card, draft.config, folder)
    elif isinstance(draft, SmallModel):
        card = replace(card, draft_tokens=cfg.eval.n_draft)  # one step trains any depth
        export_model(draft, folder, card, dtype, layout.format, tokenizer)
        lines = serve(card, folder)
    else:
        layout = layout_for(draft.config, layout)
        export(draft, facts, folder, card, dtype, layout)
        lines = layout.serve(card, draft.config, folder)
    say(f"{folder}: written and checked for {layout.engine} ({dtype.value}); serve it with")
    for line in lines:
        say(line)


def export(
    draft: Eagle3Draft | Eagle1Draft,
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

    def fill(place: Path) -> list[str]:
        write_files(draft, Setting.of(facts, card, dtype), place, layout)
        (place / ORIGIN).write_text(origin_of(card), encoding="utf-8")
        if card.tokens is not None:
            shutil.copyfile(card.tokens, place / TOKENS)
        text = write_card(card, draft.config, layout.serve(card, draft.config, folder))
        (place / CARD).write_text(text, encoding="utf-8")
        return check(place, layout=layout)

    return put(folder, fill)


def write_files(
    draft: Eagle3Draft | Eagle1Draft, setting: Setting, folder: Path, layout: Layout
) -> None:
    tensors = tensors_of(draft, layout, Precision(setting.dtype))
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600; a server is another user
    config = layout.config_for(draft.config, setting)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tensors_of(
    draft: Eagle3Draft | Eagle1Draft, layout: Layout, dtype: Precision
) -> dict[str, Tensor]:
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


def judge(config: DraftConfig | Eagle1Config, facts: VerifierFacts, layout: Layout) -> None:
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
