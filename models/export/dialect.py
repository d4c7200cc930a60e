"""What a published head's config.json means: names, defaults and layer ids by who wrote it.

Official EAGLE-3 files, SpecForge's, vLLM's, SGLang's and ModelOpt's are one flat object;
speculators nests the layer in ``transformer_layer_config``. What a file leaves out has the value
that vLLM 0.32 takes, except where another reader's is named below.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import ConfigError
from models.draft_limits import faults
from models.eagle3 import DraftConfig
from models.export.dialect_rope import rope_of
from models.export.layout import CONFIG, NORM_FLAGS
from models.export.refused import refusals
from models.facts import MIN_LAYERS, VerifierFacts

AUX = "eagle_aux_hidden_state_layer_ids"
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads")
LLAMA_EPS, LLAMA_LIMIT = 1e-6, 2048  # what the library's LlamaConfig has where a file has nothing
BIASES = ("attention_bias", "mlp_bias", "bias")  # a tensor that is one is refused
OTHER_NAMES = {"fc_norm": "use_aux_norm"}  # SGLang's
NESTED = {  # a flag -> its name in eagle_config, which vLLM and TensorRT-LLM read first
    "norm_before_fc": "norm_before_fc",
    "norm_output": "return_hidden_post_norm",
}


@dataclass(frozen=True)
class Described:
    """A head as its config.json has it."""

    draft: DraftConfig
    assumed: list[str]  # what the file does not say, a sentence each


@dataclass(frozen=True)
class Source:
    """One config.json, and a list of what had to be assumed, which grows while it is read."""

    place: str
    top: dict[str, Any]  # the whole object: vocabulary, flags, layer ids
    layer: dict[str, Any]  # of the decoder layer; but in speculators' files the same object
    assumed: list[str] = field(default_factory=list)

    @property
    def nested(self) -> bool:
        return self.layer is not self.top

    @property
    def eagle(self) -> dict[str, Any]:
        return self.layer.get("eagle_config") or {}

    def wrong(self, key: str, value: object, rule: str) -> ConfigError:
        return ConfigError(f"{self.place}: {key}={json.dumps(value)}: {rule}")

    def size(self, key: str, default: int | None = None) -> int:
        """A size of the layer; ``default`` where the file has none."""
        value = self.layer.get(key)
        if value is None and default is not None:
            self.assumed.append(f"{key} is not in {CONFIG}: {default} is assumed")
            return default
        if type(value) is not int or value < 1:
            raise self.wrong(key, value, "must be an integer of at least 1")
        return value


def described(folder: Path, facts: VerifierFacts) -> Described:
    """The head in ``folder``, for the verifier with ``facts``.

    Raises ConfigError for a file that cannot be read, and for a head that cannot be run here.
    """
    source = read_config(folder)
    refuse_unusable(source)
    layer = source.layer
    width, heads = source.size("hidden_size"), source.size("num_attention_heads")
    head_dim = source.size("head_dim", width // heads)
    limit = source.size("max_position_embeddings", LLAMA_LIMIT)
    vocab_size = source.size("vocab_size", facts.vocab_size)
    flags = {name: flag(source, name) for name in NORM_FLAGS}
    say_flags(source)
    draft = DraftConfig(
        hidden_size=width,
        intermediate_size=source.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=source.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size(source, vocab_size),
        aux_layers=aux_layers(source, facts.num_layers),
        rms_norm_eps=eps(source),
        max_positions=limit,
        rope=rope_of(source.place, layer, head_dim, limit, source.assumed),
        **flags,
        qk_norm=norms_query_and_key(source),
        layers=source.size("num_hidden_layers", 1),
    )
    for fault in faults(draft):
        raise ConfigError(f"{source.place}: {fault}; give a folder as it was published")
    return Described(draft, source.assumed)


def read_config(folder: Path) -> Source:
    """Raises ConfigError when there is none, or no object."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give a published head, or a best/ folder")
    try:
        top = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); fetch the head again") from error
    if not isinstance(top, dict):
        raise ConfigError(f"{path}: must hold an object; fetch the head again")
    layer = top.get("transformer_layer_config", top)
    for key in ("architectures", "layer_types"):
        for part in (top, layer if isinstance(layer, dict) else {}):
            if not isinstance(part.get(key) or [], list):
                raise ConfigError(
                    f"{path}: {key}={part[key]!r}: must be a list; fetch the head again"
                )
    if not isinstance(layer, dict) or not isinstance(layer.get("eagle_config") or {}, dict):
        raise ConfigError(
            f"{path}: transformer_layer_config and eagle_config must be objects; fetch the head "
            "again"
        )
    return Source(str(path), top, layer)


def refuse_unusable(source: Source) -> None:
    """Raise ConfigError for a head of another kind, and for one without its sizes."""
    for refusal in refusals(source.top, source.layer):
        raise ConfigError(f"{source.place}: {refusal}")
    missing = [key for key in NEEDED if source.layer.get(key) is None]
    if missing:
        raise ConfigError(
            f"{source.place}: {', '.join(missing)} missing; give a folder as it was published"
        )
    for key in BIASES:
        if source.layer.get(key):
            source.assumed.append(f"{key} is true and no tensor is a bias: none is assumed")


def norms_query_and_key(source: Source) -> bool:
    """vLLM picks the draft class by architecture, in speculators' files by the layer's type."""
    if source.nested:
        return source.layer.get("model_type") == "qwen3"
    return "Eagle3Qwen3ForCausalLM" in (source.top.get("architectures") or [])


def draft_vocab_size(source: Source, total: int) -> int:
    value = source.top.get("draft_vocab_size")
    if value is None:
        source.assumed.append(
            f"draft_vocab_size is not in {CONFIG}: all {total} tokens are assumed"
        )
        return total
    if type(value) is not int or not 1 <= value <= total:
        raise source.wrong("draft_vocab_size", value, f"must be in 1..vocab_size={total}")
    return value


def eps(source: Source) -> float:
    value = source.layer.get("rms_norm_eps")
    if value is None:
        source.assumed.append(f"rms_norm_eps is not in {CONFIG}: {LLAMA_EPS:g} is assumed")
        return LLAMA_EPS
    if type(value) not in (int, float) or not 0 < value < 1:
        raise source.wrong("rms_norm_eps", value, "must be a number between 0 and 1")
    return float(value)


def flag(source: Source, name: str) -> bool:
    """A switch of the norms, at the top or in ``eagle_config``: engines differ in that."""
    named = (
        (f"eagle_config.{NESTED.get(name)}", source.eagle.get(NESTED.get(name, ""))),
        (name, source.top.get(name)),
        (OTHER_NAMES.get(name, ""), source.top.get(OTHER_NAMES.get(name, ""))),
    )
    told = {key: value for key, value in named if value is not None}
    for key, value in told.items():
        if type(value) is not bool:
            raise source.wrong(key, value, "must be true or false")
    if len(set(told.values())) > 1:
        raise source.wrong(name, told[name], f"contradicts {json.dumps(told)}; mend one of them")
    if told:
        return next(iter(told.values()))
    return source.nested and name == "norm_before_residual"


def say_flags(source: Source) -> None:
    """Absent flags: speculators' norm_before_residual is true to vLLM, and false to its makers."""
    absent = [
        name
        for name in NORM_FLAGS
        if source.top.get(name) is None
        and source.eagle.get(NESTED.get(name, "")) is None
        and source.top.get(OTHER_NAMES.get(name, "")) is None
    ]
    if source.nested and "norm_before_residual" in absent:
        absent.remove("norm_before_residual")
        source.assumed.append(
            f"norm_before_residual is not in {CONFIG}: true is assumed, as vLLM reads a file of "
            "speculators; that library itself takes false"
        )
    if absent:
        source.assumed.append(f"{', '.join(absent)} not in {CONFIG}: false is assumed")


def aux_layers(source: Source, layers: int) -> list[int]:
    """n = the verifier's stream after n layers, from whichever of the two lists is there.

    The list at the top counts so; that in ``eagle_config`` alone (SGLang, SpecForge, ModelOpt)
    counts layer outputs, one less. Where both are there they must say the same.
    """
    streams = ids_at(source, AUX, source.top.get(AUX) or source.layer.get(AUX))
    outputs = ids_at(source, f"eagle_config.{AUX}", source.eagle.get(AUX))
    after = [m + 1 for m in outputs]
    if streams and outputs and streams != after:
        raise source.wrong(
            AUX,
            streams,
            f"contradicts eagle_config.{AUX}={outputs}, which counts layer outputs and must be "
            f"{[n - 1 for n in streams]}; mend the one that is wrong",
        )
    found = streams or after
    if outputs and not streams:
        source.assumed.append(
            f"eagle_config.{AUX}={outputs} alone: layer outputs are assumed, the streams after "
            f"{after} layers"
        )
    if not found:
        if layers < MIN_LAYERS:
            raise ConfigError(
                f"{source.place}: {AUX} missing, and its default needs a verifier of {MIN_LAYERS} "
                f"layers, not {layers}; add the list"
            )
        found = [2, layers // 2, layers - 3]
        source.assumed.append(
            f"{AUX} is not in {CONFIG}: {found} is assumed, the default for {layers} layers"
        )
    if found[0] < 1 or found[-1] > layers:
        raise source.wrong(AUX, found, f"must be in 1..{layers}, the layers of the verifier")
    count = source.layer.get("num_aux_hidden_states")
    if count not in (None, len(found)):
        raise source.wrong("num_aux_hidden_states", count, f"must be {len(found)}, as {AUX} has")
    return found


def ids_at(source: Source, key: str, value: object) -> list[int]:
    """Ascending, unique layer ids; empty where the file has none."""
    if value is None or value == []:
        return []
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise source.wrong(key, value, "must be a list of layer ids")
    if sorted(set(value)) != value:
        raise source.wrong(key, value, "must be ascending without repetition; engines sort them")
    return value
