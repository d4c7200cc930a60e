"""Medusa heads as vLLM reads them (read in vLLM 0.32.0): their config.json and their tensors.

vLLM's code has a smaller vocabulary (truncated_vocab_size, token_map), and stops when it loads one:
its own check misses token_map among what was loaded. So a head has a row for every token of the
verifier; where ours cannot propose a token, that row is the mean of those it can: its logit is then
the mean of theirs, which is below the largest, so no token comes out that the draft would not
propose. The file names the draft vocabulary all the same, as token_map, which vLLM leaves unread.
"""

import json
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import ConfigError, Precision
from models.export.card import CardFacts
from models.export.layout import CONFIG, WEIGHTS
from models.facts import VerifierFacts
from models.medusa import MedusaConfig, MedusaDraft
from models.verifier import VerifierEnds
from models.vocab import DraftVocab

MAP = "token_map"
ROWS = ("lm_head.", "lm_heads.")  # of the tensors with a row a token
DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


def medusa_config(draft: MedusaConfig, dtype: Precision) -> dict[str, Any]:
    """config.json. vLLM takes any key with "num" and "heads" in it for num_heads, and the like of
    layers, so that there must be no other."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "torch_dtype": dtype.value,
        "hidden_size": draft.hidden_size,
        "vocab_size": draft.vocab_size,
        "num_heads": draft.heads,
        "num_hidden_layers": draft.layers,
        "original_lm_head": draft.shared_rows,
        "medusa_fc_bias": True,
    }


def medusa_tensors(draft: MedusaDraft, dtype: Precision) -> dict[str, Tensor]:
    """The tensors of model.safetensors, floating ones in ``dtype``."""
    config, ids = draft.config, target_ids(draft)
    pruned = config.draft_vocab_size < config.vocab_size
    chosen: dict[str, Tensor] = {MAP: ids} if pruned else {}
    for name, tensor in draft.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        rows = tensor.detach().cpu()
        if pruned and name.startswith(ROWS):
            whole = filler(rows.to(DTYPES[dtype])).repeat(config.vocab_size, 1)
            rows = whole.index_copy_(0, ids, rows.to(DTYPES[dtype]))
        chosen[name] = rows.to(DTYPES[dtype], copy=True).contiguous()
    return chosen


def filler(rows: Tensor) -> Tensor:
    """rows [Vd, D] as stored -> the row [1, D] of every token that a head cannot propose."""
    return rows.double().mean(0, keepdim=True).to(rows.dtype)


def target_ids(draft: MedusaDraft) -> Tensor:
    """[Vd] the verifier's token of each row."""
    return draft.to_target_ids(torch.arange(draft.config.draft_vocab_size)).cpu()


def serve_medusa(card: CardFacts, draft: MedusaConfig, folder: Path) -> list[str]:
    """vLLM guesses a chain with its heads' likeliest tokens, one a head."""
    tokens = min(card.serve_n, draft.heads)
    speculative = {"method": "medusa", "model": str(folder), "num_speculative_tokens": tokens}
    return [
        f"vllm serve {quote(card.served_verifier)} "
        f"--speculative-config {quote(json.dumps(speculative))}"
    ]


def is_medusa(folder: Path) -> bool:
    """Whether config.json in ``folder`` is a Medusa head's."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # for the caller's own reader to name
    if not isinstance(config, dict):
        return False
    names = f"{config.get('architectures')}{config.get('model_type')}"
    return "medusa" in names.lower() or "medusa_num_heads" in config


def medusa_config_of(folder: Path) -> MedusaConfig:
    """The draft that config.json and the length of its token_map describe.

    Raises ConfigError naming the key that is missing or impossible.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    keys = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    missing = [key for key in keys if key not in config]
    if missing:
        raise ConfigError(
            f"{folder / CONFIG}: {', '.join(missing)} missing; give a Medusa folder that "
            "launch.export wrote"
        )
    known = read_medusa_tensors(folder)
    found = MedusaConfig(
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=len(known[MAP]) if MAP in known else config["vocab_size"],
        heads=config["num_heads"],
        layers=config["num_hidden_layers"],
        shared_rows=config.get("original_lm_head", False),
    )
    for fault in found.faults():
        raise ConfigError(f"{folder / CONFIG}: {fault}; give a folder that launch.export wrote")
    return found


def read_medusa_tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{folder / WEIGHTS}: cannot be read ({error}); fetch the head again"
        ) from error


def read_medusa(folder: Path, facts: VerifierFacts, ends: VerifierEnds) -> MedusaDraft:
    """The heads in ``folder`` for inference, in the precision and on the device of ``ends``.

    Raises ConfigError for heads of another verifier, and for tensors that are not those of their
    config.json.
    """
    config, tensors = medusa_config_of(folder), read_medusa_tensors(folder)
    if (config.vocab_size, config.hidden_size) != (facts.vocab_size, facts.hidden_size):
        raise ConfigError(
            f"{folder}: the heads are for {config.vocab_size} tokens of width "
            f"{config.hidden_size}, and the verifier has {facts.vocab_size} of width "
            f"{facts.hidden_size}; give the verifier they were trained on"
        )
    draft = MedusaDraft(config)
    ids = tensors.pop(MAP, torch.arange(config.vocab_size)).long()
    vocab = DraftVocab.of_ids(ids, config.vocab_size)
    state = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    for name, tensor in tensors.items():
        own = name.startswith(ROWS) and len(tensor) == config.vocab_size
        state[name] = tensor[ids] if own else tensor
    try:
        draft.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(
            f"{folder / WEIGHTS}: not the tensors of its {CONFIG} ({reason}); give a Medusa folder "
            "that launch.export wrote"
        ) from error
    draft = draft.to(device=ends.head.device, dtype=ends.head.dtype)
    return draft.eval().requires_grad_(False)
