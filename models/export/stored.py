"""The tensors of a published head under our own names: the exact set, shapes and values judged.

Engines load a head that lacks a tensor, or has one too many, without a word; here each is named.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import ConfigError
from models.eagle3 import DraftConfig
from models.export.check_tensors import is_absolute
from models.export.layout import EMBEDDING, MIDLAYER, NUMBERED, WEIGHTS
from models.export.refused import LLAMA_LAYERS
from models.verifier import VerifierEnds
from models.vocab import DraftVocab

PICKLED = "pytorch_model.bin"  # of older files; read as tensors alone
HEAD = "lm_head.weight"
MAPS = ("d2t", "t2d")
RENAMED = {f"aux_norm_{name}.": f"fc_norm.{i}." for i, name in enumerate(("low", "mid", "high"))}
TABLE = "rotary_emb.inv_freq"  # older files store it; it follows from config.json
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Stored:
    """What the files of a head hold, under our names."""

    place: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Whole:
    """Every tensor of a draft, and a sentence on each that had to be found elsewhere."""

    tensors: dict[str, Tensor]
    assumed: list[str]


def read_tensors(folder: Path) -> Stored:
    """From model.safetensors, else from pytorch_model.bin. Raises ConfigError."""
    path = folder / WEIGHTS
    if path.is_file():
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); fetch the head again") from error
    elif (folder / PICKLED).is_file():
        path = folder / PICKLED
        found = unpickled(path)
    else:
        raise ConfigError(
            f"{folder}: holds neither {WEIGHTS} nor {PICKLED}; give the folder of a published head"
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(found):
        ours = our_name(name)
        if ours in tensors:
            raise ConfigError(f"{path}: {name}: there twice, also under its other name; remove one")
        if not name.endswith(TABLE):
            tensors[ours] = found[name]
    return Stored(str(path), tensors)


def unpickled(path: Path) -> dict[str, Tensor]:
    """Tensors by name; whatever else a pickle could run is refused. Mapped, not copied."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        wrong = f"asks to run {asked[1]}, which was refused" if asked else "cannot be read"
        raise ConfigError(
            f"{path}: {wrong}; give the head as {WEIGHTS}, or as torch.save writes tensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ConfigError(f"{path}: holds more than tensors by name; give the head's state dict")
    return found


def our_name(name: str) -> str:
    for theirs, ours in {NUMBERED: MIDLAYER, **RENAMED}.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def completed(stored: Stored, config: DraftConfig, ends: VerifierEnds, shapes: dict) -> Whole:
    """All tensors that ``shapes`` (name -> shape) names, or a ConfigError that names one.

    The embedding is the verifier's. A head of the whole vocabulary may be the verifier's, too.
    """
    tensors, assumed = dict(stored.tensors), []
    for refusal in other_layouts(tensors, config):
        raise ConfigError(f"{stored.place}: {refusal}")
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None and not same_values(embedding, ends.embedding):
        assumed.append(
            f"{EMBEDDING} is not the verifier's: the verifier's is taken, as SGLang does; vLLM "
            "would keep the file's"
        )
    vocab = vocabulary(stored, config)
    if HEAD not in tensors and config.draft_vocab_size == config.vocab_size:
        vocab, tensors[HEAD] = torch.arange(config.vocab_size), ends.head
        assumed.append(f"{HEAD} is not in the file: the verifier's head is taken")
    elif HEAD in tensors and not ascends(vocab):
        order = vocab.argsort()
        vocab, tensors[HEAD] = vocab[order], in_order(tensors[HEAD], order)
        assumed.append("d2t is not ascending: its entries and the head's rows are sorted")
    ours = DraftVocab.of_ids(vocab, config.vocab_size)
    tensors |= {EMBEDDING: ends.embedding, "d2t": ours.d2t, "t2d": ours.t2d}
    for finding in findings(tensors, shapes):
        raise ConfigError(f"{stored.place}: {finding}")
    return Whole(tensors, assumed)


def other_layouts(tensors: dict[str, Tensor], config: DraftConfig) -> Iterator[str]:
    """Heads of other kinds, before their tensors are held against ours one by one."""
    fused, normed = tensors.get("fc.weight"), f"{MIDLAYER}hidden_norm.weight" in tensors
    for name, tensor in tensors.items():
        if "medusa" in name or name.startswith("blocks."):
            yield f"{name}: a Medusa head; {LLAMA_LAYERS}"
        if name.endswith(".bias"):
            yield f"{name}: a bias, and a draft here has none; give a head without"
        if name == "mask_hidden":
            yield f"{name}: a head for parallel drafting; give one that drafts token by token"
        if name not in MAPS and tensor.dtype not in FLOATS:
            yield (
                f"{name}: of dtype {tensor.dtype}, the head is quantised or damaged; give one in "
                "float16, bfloat16 or float32"
            )
    if fused is not None and not normed and fused.shape[-1] == 2 * config.hidden_size:
        yield f"fc.weight: of shape {tuple(fused.shape)}, an EAGLE-1 head; {LLAMA_LAYERS}"


def vocabulary(stored: Stored, config: DraftConfig) -> Tensor:
    """[Vd] verifier ids in the order of the head's rows. Raises ConfigError for an impossible map.

    ``d2t`` holds offsets: the id of row j is d2t[j] + j.
    """
    size, total = config.draft_vocab_size, config.vocab_size
    d2t, t2d = (stored.tensors.get(name) for name in MAPS)

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{stored.place}: {what}")

    if d2t is None:
        if size < total:
            raise wrong("d2t missing; without it the head's tokens are unknown")
        return torch.arange(total)
    if d2t.dtype not in (torch.int32, torch.int64) or tuple(d2t.shape) != (size,):
        raise wrong(f"d2t: {d2t.dtype} of shape {tuple(d2t.shape)}, must be integers ({size},)")
    ids = d2t.long() + torch.arange(size)
    if t2d is not None and tuple(t2d.shape) != (total,):
        raise wrong(f"t2d: of shape {tuple(t2d.shape)}, must be ({total},)")
    marked = None if t2d is None else t2d.bool().nonzero().flatten()
    absolute = is_absolute(d2t.long(), None if t2d is None else t2d.bool())
    absolute = absolute and not torch.equal(d2t.long(), ids)
    if absolute or ids.min() < 0 or ids.max() >= total or ids.unique().numel() < size:
        hint = "; these are absolute ids" if absolute else ""
        raise wrong(
            f"d2t: must hold offsets, target id - draft id, to distinct ids below {total}{hint}"
        )
    if marked is not None and not torch.equal(marked, ids.sort().values):
        raise wrong("t2d: marks other tokens than d2t reaches; mend the one that is wrong")
    return ids


def ascends(ids: Tensor) -> bool:
    return bool((ids.diff() > 0).all())


def in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Left alone where there are not as many rows: the shape is a finding then."""
    return rows[order] if len(rows) == len(order) else rows


def same_values(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in the coarser of the two precisions."""
    theirs = theirs.to(ours.device)
    return ours.shape == theirs.shape and (
        torch.equal(ours, theirs.to(ours.dtype)) or torch.equal(ours.to(theirs.dtype), theirs)
    )


def findings(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """What is missing, unknown, of another shape or not finite."""
    for name in sorted(tensors.keys() - shapes.keys()):
        yield f"{name}: unknown, {reason(name)}"
    for name in sorted(shapes.keys() - tensors.keys()):
        yield f"{name} missing, which config.json asks for; engines would run without a word"
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            yield f"{name}: of shape {found}, and config.json makes it {shape}; mend one of them"
    for name in sorted(shapes.keys() - {EMBEDDING, *MAPS}):
        if not bool(torch.isfinite(tensors[name]).all()):
            yield f"{name}: holds values that are not finite; fetch the head again"


def reason(name: str) -> str:
    """What a tensor that has no place would have been."""
    if name.startswith("input_norm."):
        return "config.json does not set norm_before_fc=true"
    if name.startswith("fc_norm."):
        return "config.json does not set fc_norm=true, or there are fewer aux layers"
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return "config.json names a layer without norms of query and key"
    if re.match(r"(additional_)?layers\.", name):
        return "config.json names fewer layers, or SGLang spells it so; give a head as vLLM has it"
    return f"no tensor of an EAGLE-3 head as config.json describes it; {LLAMA_LAYERS}"
