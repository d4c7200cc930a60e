"""Attention of the training-time test against dense scores: outputs, gradients, and the traps."""

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.import_utils import is_flash_attn_2_available

from conf.schema import ConfigError, DraftAttentionKind
from models.attention import Attended, Diagonal, Kernel, Question, attend, by_group, dot
from models.kernels import CPU_FLASH, CUDA_FLASH, FLASH_ATTN, PLAIN, choose_kernel
from models.runs import Runs, Sequences

# Documents as (rows, rows that ask). The mixed pack has runs that begin at a document's first row
# or end at its last, single rows, a document that nobody asks, and one of a single row.
MIXED = [
    (13, [0, 1, 2, 5, 8, 9, 10, 11, 12]),
    (20, [4, 5, 6, 7, 11, 18]),
    (4, []),
    (1, [0]),
    (9, list(range(9))),
    (6, [5]),
]
PACKS = {"mixed": MIXED, "one document": [(17, list(range(17)))], "one row": [(5, []), (7, [3])]}
TINY = [(3, [0, 2]), (4, [1, 2, 3])]  # gradcheck differentiates by every number
# Longer than the 512 keys and 32 rows that the CPU kernel takes at a time, and than CUDA's tiles.
LONG = [(700, [*range(90), *range(300, 333), *range(560, 700)]), (550, list(range(500, 549)))]
STEPS = range(7)
HALF, FULL = torch.bfloat16, torch.float32

# Of the largest entry of each result. The oracle is fed the same rounded numbers, so what remains
# is the kernel's own arithmetic: sums of at most 8 * T products in fp64 and fp32. In bf16 a
# rounding is 2**-9 = 0.2 %; the weights, the output and the scores' gradients are each rounded
# before their product, and grad * output cancels against grad * value: ten roundings. (1e-15,
# 7e-7 and 1.1e-2 were seen; an LSE gradient that is dropped makes 0.5.)
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
WRONG = 1e-3  # a negative control is off by more; all of them run in fp64


ON_GPU = pytest.mark.gpu("kernels", seconds=20)
PACKAGE_THERE = pytest.mark.skipif(
    torch.cuda.is_available() and not is_flash_attn_2_available(),
    reason="flash-attn is not installed",
)


BACKENDS = [
    *(
        pytest.param(kernel, dtype, id=f"{kernel.name}, {str(dtype)[6:]}")
        for kernel in (PLAIN, CPU_FLASH)
        for dtype in BOUNDS
    ),
    pytest.param(CUDA_FLASH, HALF, marks=ON_GPU, id=f"{CUDA_FLASH.name}, bfloat16"),
    pytest.param(FLASH_ATTN, HALF, marks=[ON_GPU, PACKAGE_THERE], id="flash_attn, bfloat16"),
]
KERNELS = [pytest.param(kernel, id=kernel.name) for kernel in (PLAIN, CPU_FLASH)]


def packed(documents: list[tuple[int, list[int]]]) -> tuple[Tensor, Tensor]:
    """Documents end to end -> packed rows that ask [R], starts [B+1]."""
    starts = torch.tensor([0, *(length for length, _ in documents)]).cumsum(0)
    asks = zip(documents, starts.tolist(), strict=False)
    return torch.tensor([start + row for (_, rows), start in asks for row in rows]), starts


def numbers(
    pack: tuple[Tensor, Tensor], heads: tuple[int, int], width: int, steps: int, seed: int = 0
) -> list[Tensor]:
    """query [R, H, Dh], key and value [T, Hkv, Dh], then key and value [R, Hkv, Dh] by step."""
    (rows, starts), (many, few) = pack, heads
    generator = torch.Generator().manual_seed(seed)
    sizes = [(len(rows), many), *[(int(starts[-1]), few)] * 2, *[(len(rows), few)] * (2 * steps)]
    return [
        torch.randn(*size, width, dtype=torch.float64, generator=generator).requires_grad_()
        for size in sizes
    ]


def ours(leaves: list[Tensor], runs: Runs, kernel: Kernel) -> Tensor:
    query, key, value, *own = leaves
    diagonals = [Diagonal(*pair) for pair in zip(own[::2], own[1::2], strict=True)]
    return attend(query, (key, value), runs, diagonals, kernel)


def dense(leaves: list[Tensor], pack: tuple[Tensor, Tensor]) -> Tensor:
    """The oracle: softmax over all packed step-0 keys and all later keys, under one mask."""
    (query, key, value, *own), (rows, starts) = leaves, pack
    places = torch.arange(len(key))
    document = torch.searchsorted(starts, places, right=True)
    causal = (places <= rows[:, None]) & (document == document[rows][:, None])
    diagonal = torch.eye(len(rows), dtype=torch.bool)
    seen = torch.cat([causal, *[diagonal] * (len(own) // 2)], 1)  # [R, T + k R]
    group = query.shape[1] // key.shape[1]
    keys = torch.cat([key, *own[::2]]).repeat_interleave(group, 1)
    values = torch.cat([value, *own[1::2]]).repeat_interleave(group, 1)
    scores = torch.einsum("rhd,thd->hrt", query, keys) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hrt,thd->rhd", weights, values)


def results(output: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    """The output and every gradient, on the CPU, under one fixed gradient of the output."""
    generator = torch.Generator().manual_seed(99)
    grad = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    grads = torch.autograd.grad(output, leaves, grad.to(output))
    later = [f"{of} of step {1 + i // 2}" for i in range(0, len(leaves) - 3, 2) for of in "kv"]
    names = ["query", "base key", "base value", *later]
    return {
        name: states.detach().cpu().double()
        for name, states in zip(["output", *names], [output, *grads], strict=True)
    }


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each result, relative to its largest entry."""
    return {n: float((found[n] - w).abs().max() / w.abs().max()) for n, w in wanted.items()}


def worst(kernel: Kernel, dtype: torch.dtype, pack, leaves: list[Tensor]) -> tuple[float, str]:
    """The result farthest from the oracle, which is fed the same numbers, rounded to ``dtype``."""
    on = "cuda" if kernel in (CUDA_FLASH, FLASH_ATTN) else "cpu"
    rounded = [leaf.detach().to(on, dtype).requires_grad_() for leaf in leaves]
    grad_of = [leaf.detach().cpu().double().requires_grad_() for leaf in rounded]
    found = results(ours(rounded, Runs.of(*pack), kernel), rounded)
    assert all(states.isfinite().all() for states in found.values())
    errors = apart(found, results(dense(grad_of, pack), grad_of))
    return max((error, name) for name, error in errors.items())


# ---- parity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 3)], ids="{0[0]} on {0[1]}".format)
@pytest.mark.parametrize(("kernel", "dtype"), BACKENDS)
def test_every_kernel_equals_dense_attention_at_every_step(kernel, dtype, heads, width):
    pack = packed(MIXED)
    leaves = numbers(pack, heads, width, steps=max(STEPS))
    found = {k: worst(kernel, dtype, pack, leaves[: 3 + 2 * k]) for k in STEPS}
    assert not {k: error for k, error in found.items() if not error[0] <= BOUNDS[dtype]}


@pytest.mark.parametrize("documents", [*PACKS.values(), LONG], ids=[*PACKS, "long"])
@pytest.mark.parametrize(("kernel", "dtype"), BACKENDS)
def test_every_kernel_equals_dense_attention_on_every_pack(kernel, dtype, documents):
    pack = packed(documents)
    error, name = worst(kernel, dtype, pack, numbers(pack, (2, 1), 64, steps=2))
    assert error <= BOUNDS[dtype], name


@pytest.mark.parametrize(("kernel", "dtype"), BACKENDS)
def test_scores_far_from_zero_neither_overflow_nor_lose_the_merge(kernel, dtype):
    """Scores of up to 200: one key takes all the weight, a later step's or the block's."""
    pack = packed(MIXED)
    leaves = numbers(pack, (4, 2), 64, steps=3)
    with torch.no_grad():
        leaves[0].mul_(60)
    error, name = worst(kernel, dtype, pack, leaves)
    assert error <= 5 * BOUNDS[dtype], name  # a weight is off by the error of its score, in full


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_gradcheck(kernel, steps):
    pack = packed(TINY)
    leaves, runs = numbers(pack, (2, 1), 4, steps), Runs.of(*pack)
    assert torch.autograd.gradcheck(lambda *given: ours(list(given), runs, kernel), leaves)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_backward_can_be_repeated(kernel):
    """A graph that is kept gives the same gradients again: nothing it saved is overwritten."""
    pack = packed(MIXED)
    leaves = numbers(pack, (4, 2), 64, steps=3)
    output = ours(leaves, Runs.of(*pack), kernel)
    first = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(output.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- negative controls -----------------------------------------------------------------------


class _BlockAlone(torch.autograd.Function):
    """A flash kernel as libraries wrap it: it returns the LSE, and ignores the LSE's gradient."""

    @staticmethod
    def forward(ctx, query, key, value, runs, kernel):
        block = kernel.forward(Question(query, key, value, runs))
        ctx.save_for_backward(query, key, value, block.output, block.lse)
        ctx.runs, ctx.kernel = runs, kernel
        return block.output, block.lse

    @staticmethod
    def backward(ctx, grad, _):
        query, key, value, output, lse = ctx.saved_tensors
        asked = Question(query, key, value, ctx.runs)
        grads = ctx.kernel.backward(asked, Attended(output, lse), grad)
        return grads.query, grads.key, grads.value, None, None


def merged_by_autograd(leaves: list[Tensor], runs: Runs, kernel: Kernel) -> Tensor:
    query, key, value, *own = leaves
    output, lse = _BlockAlone.apply(query, key, value, runs, kernel)
    grouped = by_group(query, key)
    scores = [dot(grouped, k).flatten(1) / math.sqrt(query.shape[-1]) for k in own[::2]]
    total = torch.stack([lse, *scores]).logsumexp(0)
    merged = by_group(output * (lse - total).exp()[..., None], key)
    for score, own_value in zip(scores, own[1::2], strict=True):
        merged = merged + by_group((score - total).exp()[..., None], key) * own_value[:, :, None]
    return merged.flatten(1, 2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("steps", STEPS)
def test_a_dropped_lse_gradient_is_caught(kernel, steps):
    """The merge left to autograd: right in all but the query and the step-0 keys."""
    pack = packed(MIXED)
    leaves = numbers(pack, (4, 2), 64, steps)
    found = results(merged_by_autograd(leaves, Runs.of(*pack), kernel), leaves)
    errors = apart(found, results(dense(leaves, pack), leaves))
    suffer = {name: errors.pop(name) for name in ("query", "base key")}
    assert max(errors.values()) <= BOUNDS[torch.float64]
    if steps:
        assert min(suffer.values()) > WRONG
    else:
        assert max(suffer.values()) <= BOUNDS[torch.float64]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_run_that_is_off_by_one_row_is_caught(kernel, by):
    pack = packed([(12, [2, 3, 4, 8])])
    leaves = numbers(pack, (4, 2), 64, steps=1)
    runs = Runs.of(*pack).runs
    wanted = results(dense(leaves, pack), leaves)
    for i, run in enumerate(runs):
        changed = [*runs[:i], replace(run, first=run.first + by), *runs[i + 1 :]]
        moved = Runs(changed, Sequences.of(changed))
        errors = apart(results(ours(leaves, moved, kernel), leaves), wanted)
        assert min(errors[name] for name in ("output", "query", "base key", "base value")) > WRONG


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_border_between_documents_that_is_ignored_is_caught(kernel):
    pack = packed(MIXED)
    leaves = numbers(pack, (4, 2), 64, steps=1)
    rows, starts = pack
    found = results(ours(leaves, Runs.of(rows, starts[[0, -1]]), kernel), leaves)
    errors = apart(found, results(dense(leaves, pack), leaves))
    assert min(errors[name] for name in ("output", "query", "base key", "base value")) > WRONG


# ---- memory ----------------------------------------------------------------------------------


def peak(rows: int, steps: int, kernel: Kernel) -> int:
    """Bytes taken from the allocator at once, both ways, by what a kernel works with too."""
    pack = packed([(rows, list(range(rows)))])
    leaves = [leaf.detach().float().requires_grad_() for leaf in numbers(pack, (1, 1), 64, steps)]
    runs = Runs.of(*pack)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        output = ours(leaves, runs, kernel)
        if kernel is not PLAIN:  # its forward is enough
            torch.autograd.grad(output, leaves, torch.ones_like(output))
    events = profiler.profiler.kineto_results.events()
    blocks = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in blocks))


def test_memory_grows_with_the_rows_and_not_with_their_square():
    rows, scores = 4096, 4 * 4096 * 4096
    assert peak(rows, 2, PLAIN) >= scores  # the measure sees them
    assert peak(rows, 2, CPU_FLASH) <= scores / 4
    assert peak(rows, 2, CPU_FLASH) <= 2.1 * peak(rows // 2, 2, CPU_FLASH)


class Made(TorchDispatchMode):
    """Notes how many numbers each operation has made room for, and each concatenation."""

    def __init__(self):
        super().__init__()
        self.largest, self.joined = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for states in tree_leaves(made):
            if not isinstance(states, Tensor):
                continue
            size = states.untyped_storage().nbytes() // states.element_size()  # of a view: 's base
            self.largest = max(self.largest, size)
            if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.stack):
                self.joined = max(self.joined, size)
        return made


def test_no_step_joins_or_repeats_keys():
    pack, steps, heads = packed([(200, list(range(100, 160)))]), 5, (4, 2)
    leaves, runs = numbers(pack, heads, 64, steps), Runs.of(*pack)
    with Made() as made:
        output = ours(leaves, runs, CPU_FLASH)
        assert made.largest == max(leaf.numel() for leaf in leaves)
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        assert made.joined <= (steps + 1) * 60 * heads[0]  # the steps' scores, and no states
        torch.cat(leaves[1:3])
    assert made.joined == leaves[1].numel() * 2  # the measure sees keys


# ---- the choice ------------------------------------------------------------------------------

AUTO, PLAINLY = DraftAttentionKind.auto, DraftAttentionKind.plain
TORCH, PACKAGE = DraftAttentionKind.torch_flash, DraftAttentionKind.flash_attn


TAKEN = [
    ((AUTO, "cpu", FULL, 64), False, CPU_FLASH),
    ((AUTO, "cpu", HALF, 20), True, CPU_FLASH),
    ((TORCH, "cpu", FULL, 512), True, CPU_FLASH),
    ((PLAINLY, "cpu", FULL, 64), True, PLAIN),
    ((AUTO, "cuda", HALF, 128), True, FLASH_ATTN),
    ((AUTO, "cuda", HALF, 128), False, CUDA_FLASH),
    ((AUTO, "cuda", FULL, 128), True, PLAIN),
    ((AUTO, "cuda", HALF, 264), True, PLAIN),
    ((AUTO, "cuda", HALF, 100), True, PLAIN),
    ((TORCH, "cuda", HALF, 256), True, CUDA_FLASH),
    ((PACKAGE, "cuda", HALF, 256), True, FLASH_ATTN),
    ((PLAINLY, "cuda", FULL, 512), True, PLAIN),
]
REFUSED = [
    ((PACKAGE, "cpu", HALF, 64), "needs CUDA"),
    ((PACKAGE, "cuda", HALF, 64), "not installed"),
    ((PACKAGE, "cuda", FULL, 64), "float32"),
    ((TORCH, "cuda", FULL, 64), "float32"),
    ((TORCH, "cuda", HALF, 264), "264 wide"),
    ((TORCH, "cuda", HALF, 100), "100 wide"),
]


def chosen(kind: DraftAttentionKind, device: str, dtype: torch.dtype, width: int) -> Kernel:
    return choose_kernel(kind, torch.device(device), dtype, width)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's generation, new enough unless a test says otherwise."""

    def of(capability: tuple[int, int], installed: bool) -> None:
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
        monkeypatch.setattr("models.kernels.flash_attn_is_here", lambda: installed)

    return of


@pytest.mark.parametrize(("asked", "installed", "kernel"), TAKEN)
def test_the_kernel_that_is_taken(asked, installed, kernel, gpu):
    gpu((9, 0), installed)
    assert chosen(*asked) is kernel


@pytest.mark.parametrize(("asked", "says"), REFUSED)
def test_a_refusal_names_the_knob_and_the_way_out(asked, says, gpu):
    gpu((9, 0), installed=False)
    with pytest.raises(ConfigError) as refused:
        chosen(*asked)
    message = str(refused.value)
    assert message.startswith(f"engine.attention={asked[0].value}: ")
    assert says in message
    assert "; take " in message
    assert "\n" not in message


def test_an_old_gpu_gets_no_flash_kernel(gpu):
    gpu((7, 5), installed=True)
    assert chosen(AUTO, "cuda", HALF, 64) is PLAIN
    with pytest.raises(ConfigError, match=r"Ampere.*; take engine\.attention=plain"):
        chosen(TORCH, "cuda", HALF, 64)
