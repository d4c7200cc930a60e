"""The verifier's final norm, for drafts that read the stream after its last layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEAR = 1e-4  # of outputs around 1: a wrong kind of norm is tenths away
PROBES = 4  # rows


@dataclass(frozen=True)
class FinalNorm:
    """RMSNorm: x over its root mean square, times ``weight``."""

    weight: Tensor  # [D] as it multiplies: one more than the stored one where a family adds it
    eps: float


def final_norm_of(module: Any) -> FinalNorm | None:
    """What ``module``, a norm of the library with its weights, computes; None: no RMSNorm.

    Families name the epsilon differently, and Gemma stores the weight less one, so the module is
    asked: its outputs on random rows must be those of the weight that is taken.
    """
    stored = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if stored is None or not isinstance(eps, float) or getattr(module, "bias", None) is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBES, len(stored), generator=generator) + 1  # a mean: LayerNorm drops it
    rows = rows.to(stored.device, torch.promote_types(stored.dtype, torch.float32))
    with torch.no_grad():
        found = type(module).forward(module, rows).to(rows.dtype)
    for weight in (stored.detach(), 1 + stored.detach()):
        ours = F.rms_norm(rows, weight.shape, weight.to(rows.dtype), eps)
        if bool((ours - found).abs().max() <= NEAR * found.abs().max().clamp_min(1e-30)):
            return FinalNorm(weight, eps)
    return None


def norm_after_layers(backbone: nn.Module) -> nn.Module | None:
    """The module that the library's decoders call on the stream after their last layer."""
    return getattr(backbone, "norm", None)
