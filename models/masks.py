"""Who sees whom in a cached forward: how far each kind of layer looks back, and its mask."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from conf.schema import ConfigError
from models.branches import Branches

UNCACHED = "dummy"  # the library's word for layers that store no keys: experts alone, shared keys
Mask = Tensor | dict[str, Tensor]  # as the library's models take it: for all layers, or by kind


@dataclass(frozen=True)
class Reach:
    """How far back the layers of one kind see; 0 is no limit."""

    kind: str  # as in the config's layer_types
    window: int = 0  # the last so many positions, the own one included
    chunk: int = 0  # the positions of the own chunk of this size

    def limits(self, size: int) -> bool:
        """Whether it hides anything from a text of ``size`` tokens."""
        return 0 < (self.window or self.chunk) < size


@dataclass(frozen=True)
class Sight:
    """New tokens [B, T] and the cache's slots [B, S] before any limit on how far they see."""

    seen: Tensor  # [B, T, S] bool: committed text, own branch or line, the token itself
    query: Tensor  # [B, T] positions of the new tokens
    key: Tensor  # [B or 1, S] positions of what the slots hold; anything where nobody sees

    def within(self, reach: Reach) -> Tensor:
        """[B, 1, T, S]: what the layers of one kind see. Positions count, and slots do not."""
        seen = self.seen
        if reach.window:
            seen = seen & (self.key[:, None] > self.query[:, :, None] - reach.window)
        elif reach.chunk:
            seen = seen & (
                self.key[:, None] // reach.chunk == self.query[:, :, None] // reach.chunk
            )
        return seen[:, None]


def sight_of(lengths: Tensor, steps: int, size: int, branches: Branches | None) -> Sight:
    """``steps`` new tokens behind ``lengths`` [B] committed ones, among ``size`` slots.

    New token i of sequence b lies in slot lengths[b] + i. It sees all that is committed, and of the
    new tokens those up to itself, or its own branch. Costs O(B * T * S), without a device wait.
    """
    slots = torch.arange(size, device=lengths.device)  # [S]
    if branches is None:
        query = lengths[:, None] + torch.arange(steps, device=lengths.device)
        return Sight(slots <= query[:, :, None], query, slots[None])
    query = lengths[:, None] + branches.depth
    node = slots - lengths[:, None]  # [B, S] which new token, below 0: committed
    inside = node.clamp(0, steps - 1)
    branch = branches.seen.gather(2, inside[:, None].expand(-1, steps, -1))  # [B, T, S]
    seen = (node < 0)[:, None] | (branch & (node < steps)[:, None])
    key = torch.where(node < 0, slots, query.gather(1, inside))
    return Sight(seen, query, key)


def masks_of(sight: Sight, reaches: list[Reach]) -> Mask:
    """One bool mask [B, 1, T, S] for all layers, or one for each kind where they differ."""
    by_limit: dict[tuple[int, int], Tensor] = {}
    for reach in reaches:
        limit = (reach.window, reach.chunk)
        if limit not in by_limit:
            by_limit[limit] = sight.within(reach)
    if len(by_limit) == 1:
        return next(iter(by_limit.values()))
    return {reach.kind: by_limit[reach.window, reach.chunk] for reach in reaches}


def additive(seen: Mask, dtype: torch.dtype) -> Mask:
    """What eager attention adds to the scores: 0 where seen, else the lowest number."""
    if isinstance(seen, dict):
        return {kind: _scores(mask, dtype) for kind, mask in seen.items()}
    return _scores(seen, dtype)


def _scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    hidden = torch.finfo(dtype).min
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, hidden)


def reaches_of(config: PreTrainedConfig, capacity: int) -> list[Reach]:
    """One Reach for each kind of attention layer; limits that ``capacity`` never meets are 0.

    Raises ConfigError for what a cache with a length per sequence cannot serve.
    """
    text = config.get_text_config(decoder=True)
    name = config._name_or_path or "/".join(config.architectures or [config.model_type])
    _refuse_positions(text, name, capacity)
    attention = str(getattr(config, "_attn_implementation", None))
    if attention.startswith("flash"):
        raise ConfigError(
            f"verifier.attention={attention}: takes no mask, and decoding with a length per "
            "sequence needs one; take verifier.attention=sdpa"
        )
    found: dict[str, Reach] = {}
    for kind, setting in zip(*get_layer_types_and_kwargs(text), strict=True):
        limit = setting.get("sliding_window") or 0
        if limit >= capacity:
            limit = 0
        if kind in ("full_attention", "sliding_attention"):
            found[kind] = Reach(kind, window=limit)
        elif kind == "chunked_attention":
            found[kind] = Reach(kind, chunk=limit)
        elif kind != UNCACHED:
            raise ConfigError(
                f"verifier.path={name}: has {kind} layers; decoding needs attention to all "
                "earlier tokens, to a window or to a chunk of them: take another verifier"
            )
    reaches = list(found.values())
    _refuse_unread_kinds(text, name, reaches)
    return reaches


def _refuse_positions(text: PreTrainedConfig, name: str, capacity: int) -> None:
    """Positions must enter by rotation alone, by those that the cache hands over."""
    if getattr(text, "rope_parameters", None) is None or getattr(text, "alibi", False):
        raise ConfigError(
            f"verifier.path={name}: its positions are not rotary; decoding with a length per "
            "sequence needs a rotary verifier such as Llama or Qwen3"
        )
    # Llama 4 scales queries by steps of this size, and counts by one length a batch.
    step = getattr(text, "floor_scale", None) if _tunes_temperature(text) else None
    if step and capacity > step:
        raise ConfigError(
            f"verifier.path={name}: scales attention by the position from {step} tokens on, as if "
            f"all sequences had one length, and {capacity} are to be cached; take shorter prompts "
            "and answers"
        )


def _tunes_temperature(text: PreTrainedConfig) -> bool:
    return bool(getattr(text, "attn_temperature_tuning", False))


def _refuse_unread_kinds(text: PreTrainedConfig, name: str, reaches: list[Reach]) -> None:
    """Kinds of layers matter if the model reads them: the library's do where the config has them.

    Mistral's config keeps a layer_types that somebody wrote into it, and its model ignores it;
    code that comes with the weights may take no masks by kind.
    """
    ours = type(text).__module__.startswith("transformers.")
    stray = ours and getattr(text, "layer_types", None) and not hasattr(type(text), "layer_types")
    mixed = len({(reach.window, reach.chunk) for reach in reaches}) > 1
    windowed = any(reach.window or reach.chunk for reach in reaches)
    window = getattr(text, "sliding_window", None)
    if stray and (windowed or window):
        raise ConfigError(
            f"verifier.path={name}: its config.json has layer_types, which {type(text).__name__} "
            "does not read; remove them there or give the model_type that does"
        )
    if mixed and not ours:
        raise ConfigError(
            f"verifier.path={name}: its own code is not known to take a mask for each kind of "
            "layer; take another verifier, or prompts and answers within the window"
        )
