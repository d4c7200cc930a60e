"""The folder of a small model: the library's layout, which every engine opens, beside a draft.json.

Weights are safetensors alone, and code that comes with them never runs.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from conf.runtime import sync_folder
from conf.schema import ConfigError, DraftFamily, DraftSection
from models.facts import VerifierFacts
from models.small_model import ATTENTION, ModelConfig, SmallModel, errors_named
from models.token_strings import first_other, token_strings
from models.verifier import tensor_files

LAYER = re.compile(r"\w\.(layers|h|blocks)\.\d+\.")  # inside a model; a head's names begin with it
PREFIX = "lm."  # of the library's names among a SmallModel's
ONE_FILE = "1000GB"  # a shard's size: one file, which checks and digests look for
SCALES = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # of a model's own logits


def is_model_folder(folder: Path) -> bool:
    """Whether a whole causal language model of the library lies there, and no head.

    Heads may borrow a model's name; their tensors have no model around the layers.
    """
    try:
        layout = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = set(layout.get("architectures") or [])
        tensors = tensor_files(folder)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # ConfigError, too
        return False  # what is wrong is for those to say who want a head or a model
    whole = any(LAYER.search(name) for name in tensors)
    return whole and bool(named & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def published_config(folder: Path, facts: VerifierFacts) -> ModelConfig:
    """Of a model as the library's save_pretrained leaves it. Raises ConfigError."""
    section = DraftSection(family=DraftFamily.model, init=str(folder))
    return ModelConfig.of(section, facts)


def read_model(folder: Path, config: ModelConfig, dtype: torch.dtype) -> SmallModel:
    """Raises ConfigError for weights that are missing or not the model's."""
    model: Any = AutoModelForCausalLM
    with errors_named(folder):
        lm, found = model.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            output_loading_info=True,
        )
    if found["missing_keys"]:
        raise ConfigError(
            f"draft.init={folder}: {len(found['missing_keys'])} weights of the model are not in "
            f"its files, {min(found['missing_keys'])} for one; fetch or save it again"
        )
    return SmallModel(config, lm)


def write_model(folder: Path, config: ModelConfig, state: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors, each whole or not at all.

    ``state``: of a SmallModel. A head that is tied to the embedding is stored once, under its name.
    """
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model: Any = AutoModelForCausalLM
    with torch.device("meta"):
        skeleton = model.from_config(config.library, dtype=dtype)
    tied = skeleton.all_tied_weights_keys
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in ((name.removeprefix(PREFIX), one) for name, one in state.items())
        if name not in tied
    }
    temporary = folder / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    bars = is_progress_bar_enabled()
    disable_progress_bar()  # of one file
    skeleton.save_pretrained(temporary, state_dict=tensors, max_shard_size=ONE_FILE)
    if bars:
        enable_progress_bar()
    for path in sorted(temporary.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600; a server is another user
        sync_folder(path)  # takes files alike
        path.replace(folder / path.name)
    temporary.rmdir()
    sync_folder(folder)


def refuse_untrainable(model: SmallModel) -> None:
    """The fused loss multiplies by the head's rows and knows nothing else of a head."""
    text, head = model.library.get_text_config(), model.lm.get_output_embeddings()
    odd = [name for name in SCALES if getattr(text, name, None)]
    if getattr(head, "bias", None) is not None:
        odd.append("a bias on its head")
    if odd:
        raise ConfigError(
            f"draft.init: the model has {odd[0]}, which training does not know; measure it as "
            "it is with eval.head, or give a model such as Llama or Qwen3"
        )


def refuse_other_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError unless the model in ``folder`` has ``tokenizer``, the verifier's.

    Rows to spare do not matter: as many as the tokenizer has tokens must be there.
    """
    with errors_named(folder):
        theirs = token_strings(AutoTokenizer.from_pretrained(folder))
        rows = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
    ours = token_strings(tokenizer)
    index = first_other(theirs, ours)
    reason = ""
    if index is not None:
        reason = f"token {index} is {theirs[index]!r} and the verifier's {ours[index]!r}"
    elif rows < len(ours):
        reason = f"its embedding has {rows} rows, and the verifier's tokenizer {len(ours)} tokens"
    if reason:
        raise ConfigError(
            f"draft.init={folder}: {reason}; draft.family=model needs the verifier's own "
            "tokenizer, give a smaller model of its family"
        )
