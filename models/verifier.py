"""The verifier: a frozen causal language model that yields the states a draft head learns from."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from conf.schema import ConfigError, VerifierSection
from models.architecture import (
    auto_class,
    refuse_structure,
    stored_name,
)
from models.branches import Branches
from models.bundled import resolve
from models.facts import (
    VerifierFacts,
    library_errors_named,
    load_config_of,
    load_facts,
    load_tokenizer,
)
from models.final_norm import FinalNorm, final_norm_of, norm_after_layers
from models.fixed import FixedCache
from models.kv import KVCache
from models.placement import Placement, place
from models.rope import settle_longrope

SAMPLED_BLOCKS = 64  # of a weights file that go into its fingerprint
BLOCK = 1 << 16


@dataclass(frozen=True)
class VerifierStates:
    aux: Tensor  # [B, T, A*D] residual streams after the aux layers, concatenated, ids ascending
    last: Tensor  # [B, T, D] the state after the final norm

    def __getitem__(self, rows: Any) -> "VerifierStates":
        """Both indexed by ``rows``, as a tensor is."""
        return VerifierStates(self.aux[rows], self.last[rows])


class Verifier:
    """A frozen model with its tokenizer. ``states`` runs the backbone, ``logits_from`` the head."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, facts: VerifierFacts
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.facts = facts
        self.backbone: Any = model.get_decoder()  # each family's own class
        self.head: Any = model.get_output_embeddings()
        self._aux: dict[int, Tensor] = {}
        settle_longrope(model, facts.max_positions)
        self._watch_streams()

    @classmethod
    def load(
        cls,
        section: VerifierSection,
        cache: Path,
        device: torch.device,
        dtype: torch.dtype,
        placement: Placement = Placement.whole,
    ) -> "Verifier":
        """Load weights (safetensors only) for ``device``. Raises ConfigError when not found."""
        tensor_files(resolve(section.path, cache))  # refuses before anything heavy is done
        facts, tokenizer = load_facts(section, cache), load_tokenizer(section, cache)
        with library_errors_named(section, "model"):
            model = place(section, cache, dtype, device, placement)
        refuse_structure(section, model, facts.num_layers)
        return cls(model, tokenizer, facts)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        table: Any = self.model.get_input_embeddings()
        return table.weight

    @property
    def ends(self) -> "VerifierEnds":
        norm = final_norm_of(norm_after_layers(self.backbone))
        config = self.model.config.get_text_config()
        return VerifierEnds(self.embedding, self.head.weight, config, norm)

    def _watch_streams(self) -> None:
        """Keep the residual stream after n layers: what layer n receives, or layer L-1 returns."""
        layers = self.backbone.layers
        for n in self.facts.aux_layers:
            if n < len(layers):
                layers[n].register_forward_pre_hook(self._keeper_of_input(n), with_kwargs=True)
            else:
                layers[n - 1].register_forward_hook(self._keeper_of_output(n))

    def _keeper_of_input(self, n: int):
        def keep(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            self._aux[n] = args[0] if args else kwargs["hidden_states"]

        return keep

    def _keeper_of_output(self, n: int):
        def keep(_module: nn.Module, _args: tuple, output: Any) -> None:
            self._aux[n] = output[0] if isinstance(output, tuple) else output

        return keep

    def forget(self) -> None:
        """Drop the streams of a forward whose states nobody asked for."""
        self._aux.clear()

    @torch.no_grad()
    def states(
        self,
        input_ids: Tensor,
        cache: KVCache | FixedCache | None = None,
        branches: Branches | None = None,
    ) -> VerifierStates:
        """Run the backbone over ``input_ids`` [B, T].

        Without a cache the batch is right-padded: causality alone keeps padding out of the rows
        before it, and rows of padding are junk. With a cache the tokens continue each sequence at
        its logical length, one behind the other or as ``branches`` says; the caller advances the
        cache by what it accepts, or commits a path.
        """
        if cache is None:
            output = self.backbone(input_ids=input_ids, use_cache=False)
        else:
            steps = input_ids.shape[1]
            output = self.backbone(
                input_ids=input_ids,
                attention_mask=cache.mask(steps, branches),
                position_ids=cache.positions(steps, branches),
                cache=cache,
                use_cache=True,
            )
        aux = torch.cat([self._aux[n] for n in self.facts.aux_layers], dim=-1)
        self.forget()
        if aux.shape[:-1] != input_ids.shape:
            raise ConfigError(
                f"verifier.path={self.facts.path}: the layers of {type(self.model).__name__} hand "
                f"on {tuple(aux.shape[:-1])} rows for {tuple(input_ids.shape)} tokens, and a draft "
                "head follows one stream; choose another verifier, such as Llama or Qwen3"
            )
        return VerifierStates(aux, output.last_hidden_state)

    @torch.no_grad()
    def logits_from(self, last: Tensor) -> Tensor:
        """[..., D] after the final norm -> [..., V], with the model's own scale or soft-cap."""
        return scaled_logits(self.head(last), self.model.config.get_text_config())


def scaled_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """What the model does to its head's output: Granite divides, Cohere multiplies, Gemma caps."""
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


@dataclass(frozen=True)
class VerifierEnds:
    """What training needs of a verifier's weights, and how its logits are scaled."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]
    config: PreTrainedConfig
    norm: FinalNorm | None = None  # None: another kind than RMSNorm


def load_ends(section: VerifierSection, cache: Path, dtype: torch.dtype) -> VerifierEnds:
    """Read embedding, head and final norm from the safetensors files, and no layer between.

    Which tensors they are is what the model's own accessors say: names differ by family.
    """
    folder = resolve(section.path, cache)
    config = load_config_of(section, cache)
    skeleton: Any = skeleton_of(section, config)
    names = {id(p): n for n, p in skeleton.named_parameters()}  # a tied head has the first name
    where = tensor_files(folder)
    outside = [key for key in where if ".layers." not in key]

    def read(weight: Tensor) -> Tensor:
        name = stored_name(skeleton, outside, names[id(weight)])
        return read_tensor(folder, where, name, weight.shape).to(dtype)

    ends: list[Any] = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    table, rows = (module.weight for module in ends)
    embedding = read(table)
    head = embedding if rows is table else read(rows)
    norm: Any = norm_after_layers(skeleton.get_decoder())
    if getattr(norm, "weight", None) is not None:
        norm.weight = nn.Parameter(read(norm.weight))
    return VerifierEnds(embedding, head, config.get_text_config(), final_norm_of(norm))


def skeleton_of(section: VerifierSection, config: PreTrainedConfig) -> PreTrainedModel:
    """The model without its weights, on the meta device."""
    with torch.device("meta"), library_errors_named(section, "model"):
        return auto_class(config).from_config(config, trust_remote_code=section.trust_remote_code)


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"verifier.path={folder}: holds no model.safetensors; save the verifier with "
            "save_pretrained"
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except SafetensorError as error:
        raise ConfigError(f"{single}: is damaged ({error}); fetch or save it again") from error


def read_tensor(
    folder: Path, where: dict[str, str], name: str, shape: Sequence[int] | None = None
) -> Tensor:
    """Fetch one tensor, of ``shape`` if that is given. Raises ConfigError.

    Wrapped models may store it under another prefix: without ``name`` itself, the one tensor
    counts that ends in its last two words.
    """
    ending = "." + ".".join(name.split(".")[-2:])  # .embed_tokens.weight
    matches = [name] if name in where else [k for k in where if f".{k}".endswith(ending)]
    if len(matches) != 1:
        candidates = matches or [k for k in where if "embed" in k or "head" in k]
        raise ConfigError(
            f"verifier.path={folder}: no tensor {name}; the file has {candidates or 'none like it'}"
        )
    with safe_open(folder / where[matches[0]], framework="pt") as file:
        tensor = file.get_tensor(matches[0])
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ConfigError(
            f"verifier.path={folder}: {matches[0]} is {tuple(tensor.shape)}, its config says "
            f"{tuple(shape)}; fetch or save it again"
        )
    return tensor


def weights_fingerprint(folder: Path) -> str:
    """Digest of config and weights: sizes, headers and evenly spaced blocks of every file.

    Reading 64 blocks a file keeps a 140 GB verifier under a second; any retrained or requantised
    checkpoint differs in practically every block. Raises ConfigError when there are no weights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"verifier.path={folder}: holds no .safetensors file, and other weights are not read; "
            "save the verifier with save_pretrained"
        )
    return digest_of((folder / "config.json").read_bytes(), files)


def digest_of(config: bytes, files: Sequence[Path]) -> str:
    """Sixteen hex digits of a configuration and of sampled blocks of the weights beside it."""
    digest = hashlib.sha256(config)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for i in range(SAMPLED_BLOCKS):
                file.seek(max(0, size - BLOCK) * i // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]
