"""What a draft's decoder layers take over from the verifier's last one (draft.layer_init).

A layer after the first is a layer of Llama's kind, and takes all of it. The first one's attention
reads [embedding ; state]: the half for the state starts as the verifier's, the other at random.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from conf.runtime import note_once
from conf.schema import ConfigError, VerifierSection
from models.architecture import stored_name
from models.bundled import resolve
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.layout import layer_shapes
from models.facts import load_config_of
from models.layers import DraftLayer
from models.verifier import read_tensor, skeleton_of, tensor_files

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class LastLayer:
    """The verifier's last decoder layer, without its weights."""

    section: VerifierSection
    folder: Path
    model: PreTrainedModel  # on the meta device
    layer: nn.Module

    @classmethod
    def of(cls, section: VerifierSection, cache: Path) -> "LastLayer":
        model = skeleton_of(section, load_config_of(section, cache))
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise refusal(section, f"{type(model).__name__} has no list of decoder layers")
        return cls(section, resolve(section.path, cache), model, layers[-1])

    def read(self, name: str) -> Tensor:
        """The weight that the layer itself calls ``name``, from the files, in float32."""
        wanted, where = self.layer.get_parameter(name), tensor_files(self.folder)
        whole = next(n for n, p in self.model.named_parameters() if p is wanted)
        within = whole.removesuffix(name).split(".")[-3:]  # layers.29. and no other layer's
        alike = [key for key in where if ".".join(within) in key]
        stored = stored_name(self.model, alike, whole)
        if stored not in where:
            raise refusal(self.section, f"its files have no {stored}, fused or quantised perhaps")
        tensor = read_tensor(self.folder, where, stored, wanted.shape)
        if tensor.dtype not in FLOATS:
            raise refusal(self.section, f"{stored} is quantised, of {tensor.dtype}")
        return tensor.float()


def refusal(section: VerifierSection, reason: str) -> ConfigError:
    return ConfigError(
        f"draft.layer_init=verifier: {section.path}: {reason}; take draft.layer_init=random"
    )


def refuse_other_layer(section: VerifierSection, cache: Path, draft: DraftConfig) -> None:
    """Raise ConfigError, naming what differs, unless the draft's layers can take the verifier's."""
    for difference in differences(LastLayer.of(section, cache), draft):
        raise refusal(section, difference)


def differences(last: LastLayer, draft: DraftConfig) -> Iterator[str]:
    """Of the verifier's last layer from a layer of the draft, biases apart."""
    shapes = {name: tuple(p.shape) for name, p in last.layer.named_parameters()}
    wanted = layer_shapes(draft, "", draft.hidden_size)
    for name in sorted(wanted.keys() - shapes.keys()):
        yield f"its last layer has no {name}, and the draft's has"
    for name in sorted(shapes.keys() - wanted.keys()):
        if not name.endswith("_proj.bias"):
            yield f"its last layer has {name}, and the draft's has not"
    for name, shape in wanted.items():
        if shapes.get(name, shape) != shape:
            yield f"its {name} is {shapes[name]}, the draft's takes {shape}"
    act = getattr(last.model.config.get_text_config(decoder=True), "hidden_act", "silu")
    if act != "silu":
        yield f"its MLP computes hidden_act={act}, the draft's silu"
    for name in NORMS:
        if not is_rms_norm(getattr(last.layer, name, None)):
            yield f"its {name} is no plain RMSNorm, as the draft's is"


def is_rms_norm(norm: nn.Module | None) -> bool:
    """Whether it scales by its weight and no more, told by what it computes: Gemma adds 1 to its
    weight, LayerNorm takes the mean away."""
    if norm is None or not isinstance(getattr(norm, "weight", None), Tensor):
        return False
    probe = deepcopy(norm).to_empty(device="cpu").float()
    for parameter in probe.parameters():
        nn.init.constant_(parameter, 2.0)
    states = torch.linspace(-1.0, 3.0, len(probe.get_parameter("weight")))
    scaled = 2 * states / states.square().mean().sqrt()
    return torch.allclose(probe(states[None])[0], scaled, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def take_last_layer(draft: Eagle3Draft, section: VerifierSection, cache: Path) -> None:
    """Start every decoder layer of ``draft`` as the verifier's last one, as far as it reads states.

    Raises ConfigError as ``refuse_other_layer`` does, and for files that lack a weight.
    """
    refuse_other_layer(section, cache, draft.config)
    last = LastLayer.of(section, cache)
    if biases := [n for n, _ in last.layer.named_parameters() if n.endswith(".bias")]:
        note_once(f"draft.layer_init: a draft has no biases, {', '.join(biases)} stay out")
    for name in layer_shapes(draft.config, "", draft.config.hidden_size):
        weight = last.read(name)
        for layer in draft.stack:
            place_of(layer, name)[..., -weight.shape[-1] :].copy_(weight)


def place_of(layer: DraftLayer, name: str) -> Tensor:
    """Where the verifier's weight ``name`` goes; a pair's attention reads the state last."""
    of_state = layer.self_attn.pair and name == "input_layernorm.weight"
    return layer.get_parameter("hidden_norm.weight" if of_state else name)
