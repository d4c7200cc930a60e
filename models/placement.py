"""Where a verifier's weights lie: whole on one device, layer by layer on disk, or over all ranks.

On disk: the library loads the model with its layers mapped to "disk", which leaves every weight
that it takes as it stands in the verifier's own safetensors files; only weights that it converts
while loading (the experts of some mixtures, stored one by one and computed as one tensor) are
written again, into a scratch folder that goes with the model. accelerate's hooks bring weights
in when a module is called; they are moved here from the innermost modules to whole layers, so that
a layer can be held for many batches (models/layerwise.py). Embedding, final norm and head stay
in memory.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import PrefixedDataset
from torch import nn
from transformers import AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import PreTrainedModel

from conf.runtime import RankInfo
from conf.schema import ConfigError, VerifierSection
from conf.scratch import Scratch
from models.architecture import auto_class, missing_package, refuse_missing_weights
from models.bundled import resolve
from models.facts import load_config_of

DISK = "disk"


class Placement(Enum):
    whole = "whole"  # all of it on this rank's device
    layers = "layers"  # decoder layers on disk, one at a time on the device
    ranks = "ranks"  # every matrix split over all ranks by the library's plan


def place(
    section: VerifierSection,
    cache: Path,
    dtype: torch.dtype,
    device: torch.device,
    placement: Placement,
) -> PreTrainedModel:
    """Load the verifier as ``placement`` says; its inputs belong on ``device``."""
    if placement is Placement.ranks:
        return over_ranks(section, cache, dtype)
    if placement is Placement.layers:
        return on_disk(section, cache, dtype, device)
    model = from_files(section, resolve(section.path, cache), dtype)
    nn.Module.to(model, device)
    return model


def from_files(
    section: VerifierSection,
    folder: Path,
    dtype: torch.dtype,
    device_map: dict[str, str] | None = None,
    offload_folder: str | None = None,
    plan: DistributedConfig | None = None,
) -> PreTrainedModel:
    """The last three as the library's loader takes them; without them everything to the CPU."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    try:
        model, found = auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=section.attention.value,
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,
            device_map=device_map,
            offload_folder=offload_folder,
            distributed_config=plan,
            output_loading_info=True,
        )
    except ImportError as error:
        raise missing_package(section, config, error) from error
    refuse_missing_weights(section, found["missing_keys"])
    return model


def over_ranks(section: VerifierSection, cache: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Split over the ranks of the process group, which must be there. Raises ConfigError.

    States and logits come out whole and the same on every rank; all ranks must run the same
    batches. The key-value heads must deal evenly to the ranks.
    """
    config, ranks = load_config_of(section, cache), RankInfo.from_env().world_size
    text = config.get_text_config()
    plans = [getattr(part, "base_model_tp_plan", None) for part in (text, config)]
    if not any(plans):
        raise ConfigError(
            f"capture.tensor_parallel=true: the library has no plan for a {text.model_type} model; "
            "take capture.backend=layers"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks:
        raise ConfigError(
            f"capture.tensor_parallel=true: {heads} key-value heads of {section.path} do not deal "
            f"evenly to {ranks} ranks; start a number of ranks that divides {heads}"
        )
    plan = DistributedConfig(tp_plan="auto")
    return from_files(section, resolve(section.path, cache), dtype, plan=plan)


def on_disk(
    section: VerifierSection, cache: Path, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Leave the layers in their files; the scratch folder in ``cache`` goes with the model."""
    scratch = Scratch(cache, "layers")
    try:
        model = from_files(
            section,
            resolve(section.path, cache),
            dtype,
            device_map=device_map(section, cache, device),
            offload_folder=str(scratch.folder),
        )
        page_whole_layers(model, device)
    except BaseException:
        scratch.close()
        raise
    weakref.finalize(model, scratch.close)
    return model


def device_map(section: VerifierSection, cache: Path, device: torch.device) -> dict[str, str]:
    """The decoder layers to disk, every module beside the way to them to ``device``."""
    config = load_config_of(section, cache)
    with torch.device("meta"):
        skeleton = auto_class(config).from_config(
            config, trust_remote_code=section.trust_remote_code
        )
    name = layers_name(skeleton)
    placed = {name: DISK}
    module: nn.Module = skeleton
    way = name.split(".")
    for depth, part in enumerate(way):
        for other, _ in module.named_children():
            if other != part:
                placed[".".join([*way[:depth], other])] = str(device)
        module = module.get_submodule(part)
    return placed


def layers_name(model: PreTrainedModel) -> str:
    decoder: Any = model.get_decoder()
    return next(name for name, module in model.named_modules() if module is decoder.layers)


def page_whole_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Let each layer, in place of each matrix, bring in its weights when it is called."""
    decoder: Any = model.get_decoder()
    prefix = layers_name(model)
    for n, layer in enumerate(decoder.layers):
        hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in layer.modules()]
        weights = next(hook.weights_map for hook in hooks if getattr(hook, "weights_map", None))
        remove_hook_from_submodules(layer)
        pager = AlignDevicesHook(
            execution_device=device,
            offload=True,
            weights_map=PrefixedDataset(weights.dataset, f"{prefix}.{n}."),
            place_submodules=True,
        )
        add_hook_to_module(layer, pager)


@contextmanager
def in_memory(layer: nn.Module) -> Iterator[None]:
    """Hold the weights of a layer that lies on disk; a layer in memory stays as it is."""
    pager: Any = getattr(layer, "_hf_hook", None)
    if pager is None:
        yield
        return
    pager.pre_forward(layer)
    try:
        yield
    finally:
        pager.post_forward(layer, None)
