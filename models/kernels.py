"""The kernels of causal attention over runs: plain, PyTorch's flash on CPU and CUDA, flash-attn.

Each has the signature of ``models.attention.Kernel``, and each backward trusts the output and
log-sum-exp it is handed, which is what merging with further keys needs. The product takes them
through one door, ``choose_kernel``.
"""

import math

import torch
from torch import Tensor
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_greater_or_equal,
)

from conf.schema import ConfigError, DraftAttentionKind
from models.attention import Attended, Gradients, Kernel, Question, by_group
from models.runs import Run

FLASH_WIDTHS = 256  # flash kernels on CUDA take heads up to this wide, in multiples of 8
FLASH_CAPABILITY = (8, 0)
FLASH_ATTN_VERSION = "2.7.0"
HALF = (torch.float16, torch.bfloat16)


def choose_kernel(
    kind: DraftAttentionKind, device: torch.device, dtype: torch.dtype, width: int
) -> Kernel:
    """The kernel that ``kind`` names, or for ``auto`` the fastest that runs here.

    Raises ConfigError when the one that was asked for does not.
    """
    if kind is DraftAttentionKind.plain:
        return PLAIN
    if device.type != "cuda":
        if kind is DraftAttentionKind.flash_attn:
            raise ConfigError(
                f"engine.attention={kind.value}: needs CUDA, this run computes on {device}; take "
                "engine.attention=auto"
            )
        return CPU_FLASH
    obstacle = flash_obstacle(kind, device, dtype, width)
    if obstacle is None:
        torch_own = kind is DraftAttentionKind.torch_flash or not flash_attn_is_here()
        return CUDA_FLASH if torch_own else FLASH_ATTN
    if kind is DraftAttentionKind.auto:
        return PLAIN
    raise ConfigError(f"engine.attention={kind.value}: {obstacle}")


def flash_obstacle(
    kind: DraftAttentionKind, device: torch.device, dtype: torch.dtype, width: int
) -> str | None:
    """Why flash kernels cannot run on this CUDA device, and the way out; None: they can."""
    if dtype not in HALF:
        return f"needs 16 bits, this run computes in {dtype}; take engine.precision=bfloat16"
    if width > FLASH_WIDTHS or width % 8:
        return (
            f"takes heads up to {FLASH_WIDTHS} wide in multiples of 8, these are {width} wide; "
            "take engine.attention=plain"
        )
    if torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return f"needs an Ampere GPU or newer, {device} is older; take engine.attention=plain"
    if kind is DraftAttentionKind.flash_attn and not flash_attn_is_here():
        return (
            f"needs flash-attn {FLASH_ATTN_VERSION} or newer, which is not installed; take "
            "engine.attention=torch_flash"
        )
    return None


def flash_attn_is_here() -> bool:
    """Older ones return other values in another order."""
    return is_flash_attn_2_available() and is_flash_attn_greater_or_equal(FLASH_ATTN_VERSION)


# ---- plain: explicit scores, the reference ---------------------------------------------------


def plain_forward(asked: Question) -> Attended:
    wide = torch.promote_types(asked.query.dtype, torch.float32)
    output = torch.empty_like(asked.query)
    lse = asked.query.new_empty(asked.query.shape[:2], dtype=wide)
    for run in asked.runs.runs:
        scores, values = plain_scores(asked, run, wide)
        rows = slice(run.start, run.end)
        lse[rows] = scores.logsumexp(-1).flatten(1)
        output[rows] = torch.einsum("rhgt,thd->rhgd", scores.softmax(-1), values).flatten(1, 2)
    return Attended(output, lse)


def plain_scores(asked: Question, run: Run, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Masked scores [r, Hkv, G, t] and values [t, Hkv, Dh] of a run over its document's prefix."""
    keys = slice(run.document, run.own.stop)
    query = by_group(asked.query[run.start : run.end], asked.key).to(wide)
    scores = torch.einsum("rhgd,thd->rhgt", query, asked.key[keys].to(wide)) * asked.scale
    place = torch.arange(keys.stop - keys.start, device=query.device)
    own = torch.arange(run.end - run.start, device=query.device) + (run.first - run.document)
    future = place > own[:, None]  # [r, t]
    return scores.masked_fill(future[:, None, None], -math.inf), asked.value[keys].to(wide)


def plain_backward(asked: Question, whole: Attended, grad: Tensor) -> Gradients:
    wide = torch.promote_types(asked.query.dtype, torch.float32)
    grads = empty_gradients(asked, wide)
    for run in asked.runs.runs:
        rows, keys = slice(run.start, run.end), slice(run.document, run.own.stop)
        scores, values = plain_scores(asked, run, wide)
        query, key = by_group(asked.query[rows], asked.key).to(wide), asked.key[keys].to(wide)
        inner = by_group(grad[rows], asked.key).to(wide)
        lse = whole.lse[rows].view(*scores.shape[:3], 1)
        weights = (scores - lse).exp()
        share = (inner * by_group(whole.output[rows], asked.key)).sum(-1, keepdim=True)
        of_scores = weights * (torch.einsum("rhgd,thd->rhgt", inner, values) - share) * asked.scale
        grads.query[rows] = torch.einsum("rhgt,thd->rhgd", of_scores, key).flatten(1, 2)
        grads.key[keys] += torch.einsum("rhgt,rhgd->thd", of_scores, query)
        grads.value[keys] += torch.einsum("rhgt,rhgd->thd", weights, inner)
    return rounded(grads, asked)


def empty_gradients(asked: Question, wide: torch.dtype) -> Gradients:
    """Keys and values gather theirs from several runs: in ``wide``, from zero."""
    return Gradients(
        query=torch.empty_like(asked.query),
        key=torch.zeros_like(asked.key, dtype=wide),
        value=torch.zeros_like(asked.value, dtype=wide),
    )


def rounded(grads: Gradients, asked: Question) -> Gradients:
    return Gradients(grads.query, grads.key.to(asked.key.dtype), grads.value.to(asked.value.dtype))


# ---- PyTorch's flash kernel on the CPU -------------------------------------------------------
# It aligns causality at the top left, so a run is two calls: the keys before it, all visible, and
# its own keys, causal; merged by log-sum-exp. Key heads become the batch and are never repeated:
# their group is a stride of zero.


def cpu_forward(asked: Question) -> Attended:
    wide = torch.promote_types(asked.query.dtype, torch.float32)
    output = torch.empty_like(asked.query)
    lse = asked.query.new_empty(asked.query.shape[:2], dtype=wide)
    for run in asked.runs.runs:
        rows = slice(run.start, run.end)
        query = by_heads(by_group(asked.query[rows], asked.key))
        parts = []
        for keys, causal in parts_of(run):
            key, value = spread(asked.key[keys], query), spread(asked.value[keys], query)
            parts.append(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, 0.0, causal, scale=asked.scale
                )
            )
        out, total = parts[0]
        if len(parts) > 1:
            total = torch.logaddexp(parts[0][1], parts[1][1])
            shares = [(part[1] - total).exp()[..., None] for part in parts]
            out = parts[0][0] * shares[0] + parts[1][0] * shares[1]
        by_group(output[rows], asked.key).copy_(out.permute(2, 0, 1, 3))
        by_group(lse[rows], asked.key).copy_(total.permute(2, 0, 1))
    return Attended(output, lse)


def cpu_backward(asked: Question, whole: Attended, grad: Tensor) -> Gradients:
    wide = torch.promote_types(asked.query.dtype, torch.float32)
    grads = empty_gradients(asked, wide)
    for run in asked.runs.runs:
        rows = slice(run.start, run.end)
        query, output, inner = (
            by_heads(by_group(states[rows], asked.key))
            for states in (asked.query, whole.output, grad)
        )
        lse = by_group(whole.lse[rows], asked.key).permute(1, 2, 0).contiguous()
        total = None
        for keys, causal in parts_of(run):
            key, value = spread(asked.key[keys], query), spread(asked.value[keys], query)
            of_query, of_key, of_value = (
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    inner, query, key, value, output, lse, 0.0, causal, scale=asked.scale
                )
            )
            total = of_query if total is None else total.add_(of_query)
            grads.key[keys] += of_key.sum(1, dtype=wide).transpose(0, 1)
            grads.value[keys] += of_value.sum(1, dtype=wide).transpose(0, 1)
        assert total is not None
        by_group(grads.query[rows], asked.key).copy_(total.permute(2, 0, 1, 3))
    return rounded(grads, asked)


def parts_of(run: Run) -> list[tuple[slice, bool]]:
    """The key ranges of a run and whether they are causal."""
    before = [(run.before, False)] if run.first > run.document else []
    return [(run.own, True), *before]


def spread(states: Tensor, query: Tensor) -> Tensor:
    """[t, Hkv, Dh] -> [Hkv, G, t, Dh] for ``query`` [Hkv, G, r, Dh], a view."""
    return states.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1)


def by_heads(states: Tensor) -> Tensor:
    """[r, Hkv, G, Dh] -> [Hkv, G, r, Dh], a view."""
    return states.permute(1, 2, 0, 3)


# ---- flash kernels on CUDA: sequences of varying length, causal from the bottom right ---------


def cuda_forward(asked: Question) -> Attended:
    sequences = asked.runs.sequences
    key, value = asked.key[sequences.keys], asked.value[sequences.keys]
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        asked.query, key, value, sequences.query_ends, sequences.key_ends,
        sequences.longest_query, sequences.longest_key, 0.0, True, False, scale=asked.scale,
    )  # fmt: skip
    return Attended(output, lse.transpose(0, 1).contiguous())  # [H, R] there


def cuda_backward(asked: Question, whole: Attended, grad: Tensor) -> Gradients:
    sequences = asked.runs.sequences
    key, value = asked.key[sequences.keys], asked.value[sequences.keys]
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device)
    unused = torch.empty(0, device=grad.device)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        grad, asked.query, key, value, whole.output, whole.lse.transpose(0, 1).contiguous(),
        sequences.query_ends, sequences.key_ends, sequences.longest_query, sequences.longest_key,
        0.0, True, no_dropout, unused, scale=asked.scale,
    )  # fmt: skip
    return from_sequences(asked, of_query, of_key, of_value)


def flash_attn_forward(asked: Question) -> Attended:
    # Only where CUDA is: no dependency of Eyrie.
    from flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        _flash_attn_varlen_forward,
    )

    sequences = asked.runs.sequences
    key, value = asked.key[sequences.keys], asked.value[sequences.keys]
    output, lse, *_ = _flash_attn_varlen_forward(
        asked.query, key, value, sequences.query_ends, sequences.key_ends,
        sequences.longest_query, sequences.longest_key, 0.0, asked.scale, causal=True,
    )  # fmt: skip
    return Attended(output, lse.transpose(0, 1).contiguous())  # [H, R] there


def flash_attn_backward(asked: Question, whole: Attended, grad: Tensor) -> Gradients:
    from flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        _flash_attn_varlen_backward,
    )

    sequences = asked.runs.sequences
    key, value = asked.key[sequences.keys], asked.value[sequences.keys]
    grads = [torch.empty_like(states) for states in (asked.query, key, value)]
    _flash_attn_varlen_backward(
        grad, asked.query, key, value, whole.output, whole.lse.transpose(0, 1).contiguous(),
        *grads, sequences.query_ends, sequences.key_ends, sequences.longest_query,
        sequences.longest_key, 0.0, asked.scale, True, -1, -1, 0.0, None, False,
    )  # fmt: skip
    return from_sequences(asked, *grads)


def from_sequences(asked: Question, query: Tensor, key: Tensor, value: Tensor) -> Gradients:
    """Gradients of gathered keys and values back to the packed rows they came from."""
    grads = empty_gradients(asked, torch.float32)
    places = asked.runs.sequences.keys
    grads.key.index_add_(0, places, key.float())
    grads.value.index_add_(0, places, value.float())
    return rounded(Gradients(query, grads.key, grads.value), asked)


PLAIN = Kernel("plain", plain_forward, plain_backward)
CPU_FLASH = Kernel("torch_flash on the CPU", cpu_forward, cpu_backward)
CUDA_FLASH = Kernel("torch_flash on CUDA", cuda_forward, cuda_backward)
FLASH_ATTN = Kernel("flash_attn", flash_attn_forward, flash_attn_backward)
