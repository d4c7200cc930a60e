"""Runs against a plain loop, and the index arithmetic of the CUDA kernels, emulated on the CPU."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from models.attention import Diagonal, attend
from models.kernels import CUDA_FLASH, FLASH_ATTN, PLAIN
from models.runs import Run, Runs

BOUND = 1e-5  # relative, in fp32: of the sums that kernel and emulation order differently


def naive(rows: list[int], starts: list[int]) -> list[Run]:
    """Row by row: a run ends where the next row is not the next one of the same document."""
    runs: list[Run] = []
    for place, row in enumerate(rows):
        document = max(start for start in starts[:-1] if start <= row)
        follows = bool(runs) and row == rows[place - 1] + 1 and document == runs[-1].document
        if follows:
            runs[-1] = Run(runs[-1].start, place + 1, runs[-1].first, document)
        else:
            runs.append(Run(place, place + 1, row, document))
    return runs


def random_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Up to 8 documents, some empty, and any share of their rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (1 + seed % 8,), generator=generator)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    share = torch.rand(1, generator=generator)
    asks = torch.rand(int(starts[-1]), generator=generator) < share
    return asks.nonzero().flatten(), starts


@pytest.mark.parametrize("seed", range(30))
def test_runs_equal_the_plain_loop(seed):
    rows, starts = random_rows(seed)
    assert Runs.of(rows, starts).runs == naive(rows.tolist(), starts.tolist())


def test_runs_say_where_their_keys_lie():
    runs = Runs.of(torch.tensor([0, 1, 4, 7, 8, 9]), torch.tensor([0, 3, 9, 12])).runs
    assert runs == [Run(0, 2, 0, 0), Run(2, 3, 4, 3), Run(3, 5, 7, 3), Run(5, 6, 9, 9)]
    assert [(run.before, run.own) for run in runs] == [
        (slice(0, 0), slice(0, 2)),
        (slice(3, 4), slice(4, 5)),
        (slice(3, 7), slice(7, 9)),  # row 9 is the next document's
        (slice(9, 9), slice(9, 10)),
    ]


def test_no_rows_are_no_runs():
    assert Runs.of(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 3])).runs == []


@pytest.mark.parametrize("seed", range(30))
def test_sequences_hold_the_prefix_of_every_run(seed):
    rows, starts = random_rows(seed)
    if not len(rows):
        rows, starts = torch.tensor([1]), torch.tensor([0, 4])
    runs = Runs.of(rows, starts)
    found = runs.sequences
    prefixes = [list(range(run.document, run.first + run.end - run.start)) for run in runs.runs]
    keys = [key for prefix in prefixes for key in prefix]
    assert found.query_ends.dtype == found.key_ends.dtype == torch.int32
    assert found.query_ends.tolist() == [0, *(run.end for run in runs.runs)]
    assert found.key_ends.diff().tolist() == [len(prefix) for prefix in prefixes]
    assert int(found.key_ends[0]) == 0
    assert found.longest_query == max(run.end - run.start for run in runs.runs)
    assert found.longest_key == max(len(prefix) for prefix in prefixes)
    assert found.keys.tolist() == keys


def test_moving_runs_moves_their_tensors_alone():
    runs = Runs.of(torch.tensor([1, 2, 6]), torch.tensor([0, 5, 8]))
    moved = runs.moved(lambda tensor: tensor + 1)
    assert moved.runs == runs.runs
    for name in ("query_ends", "key_ends", "keys"):
        assert torch.equal(getattr(moved.sequences, name), getattr(runs.sequences, name) + 1)
    assert moved.sequences.longest_key == runs.sequences.longest_key


# ---- the CUDA kernels, with what they call emulated ------------------------------------------
# Written from the documentation of flash-attn: sequence i has queries query_ends[i:i+2] and keys
# key_ends[i:i+2]; "if causal, the mask is aligned to the bottom right corner of the matrix". The
# backward trusts the output and log-sum-exp [H, R] it is given.


class Emulated:
    """Attention of sequences of varying length, in the arguments that both libraries share."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor]):
        assert all(end.dtype == torch.int32 and end.is_contiguous() for end in ends)
        assert all(states.stride(-1) == 1 for states in (query, key, value))
        assert [int(end[-1]) for end in ends] == [len(query), len(key)]
        self.states = (query, key, value)
        self.scale = query.shape[-1] ** -0.5
        self.group = query.shape[1] // key.shape[1]
        edges = [end.tolist() for end in ends]
        self.spans = [
            tuple(slice(of[i], of[i + 1]) for of in edges) for i in range(len(edges[0]) - 1)
        ]

    def check(self, longest: tuple[int, int], dropout: float, causal: bool, scale: float) -> None:
        assert longest == tuple(
            max(span[i].stop - span[i].start for span in self.spans) for i in range(2)
        )
        assert dropout == 0
        assert causal
        assert scale == pytest.approx(self.scale, rel=1e-12)

    def sequences(self):
        """Rows, keys, query, key and value by query head, masked scores [H, r, t]."""
        for rows, keys in self.spans:
            query, (key, value) = self.states[0][rows], (s[keys] for s in self.states[1:])
            key, value = (s.repeat_interleave(self.group, 1) for s in (key, value))
            scores = torch.einsum("rhd,thd->hrt", query, key) * self.scale
            shape = scores.shape[1:]
            hidden = torch.ones(shape, dtype=torch.bool).triu(shape[1] - shape[0] + 1)
            yield rows, keys, (query, key, value), scores.masked_fill(hidden, float("-inf"))

    def forward(self) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(self.states[0])
        lse = output.new_empty(output.shape[1], output.shape[0])
        for rows, _, (_, _, value), scores in self.sequences():
            output[rows] = torch.einsum("hrt,thd->rhd", scores.softmax(-1), value)
            lse[:, rows] = scores.logsumexp(-1)
        return output, lse

    def backward(self, grad: Tensor, output: Tensor, lse: Tensor) -> list[Tensor]:
        assert grad.stride(-1) == output.stride(-1) == 1
        assert lse.shape == (output.shape[1], output.shape[0])
        assert lse.is_contiguous()
        grads = [torch.zeros_like(states) for states in self.states]
        for rows, keys, (query, key, value), scores in self.sequences():
            weights = (scores - lse[:, rows, None]).exp()
            share = (grad[rows] * output[rows]).sum(-1).T[..., None]
            inner = torch.einsum("rhd,thd->hrt", grad[rows], value) - share
            of_scores = weights * inner * self.scale
            grads[0][rows] = torch.einsum("hrt,thd->rhd", of_scores, key)
            of_key = torch.einsum("hrt,rhd->thd", of_scores, query)
            of_value = torch.einsum("hrt,rhd->thd", weights, grad[rows])
            grads[1][keys] = of_key.unflatten(1, (-1, self.group)).sum(2)
            grads[2][keys] = of_value.unflatten(1, (-1, self.group)).sum(2)
        return grads


def torch_forward(q, k, v, q_ends, k_ends, *rest, scale=None):
    longest_q, longest_k, dropout, causal, _ = rest
    asked = Emulated(q, k, v, (q_ends, k_ends))
    asked.check((longest_q, longest_k), dropout, causal, scale)
    output, lse = asked.forward()
    return output, lse, *(torch.empty(0) for _ in range(3))


def torch_backward(grad, q, k, v, output, *rest, scale=None):
    lse, q_ends, k_ends, longest_q, longest_k, dropout, causal, _, _ = rest
    asked = Emulated(q, k, v, (q_ends, k_ends))
    asked.check((longest_q, longest_k), dropout, causal, scale)
    return tuple(asked.backward(grad, output, lse))


def package_forward(  # noqa: PLR0913 - flash-attn 2.8's own signature
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    asked = Emulated(q, k, v, (cu_seqlens_q, cu_seqlens_k))
    asked.check((max_seqlen_q, max_seqlen_k), dropout_p, causal, softmax_scale)
    return *asked.forward(), None, torch.zeros(2)


def package_backward(  # noqa: PLR0913 - flash-attn 2.8's own signature
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
    asked = Emulated(q, k, v, (cu_seqlens_q, cu_seqlens_k))
    asked.check((max_seqlen_q, max_seqlen_k), dropout_p, causal, softmax_scale)
    for ours, theirs in zip((dq, dk, dv), asked.backward(dout, out, softmax_lse), strict=True):
        ours.copy_(theirs)
    return softmax_lse


@pytest.fixture(params=[CUDA_FLASH, FLASH_ATTN], ids=lambda kernel: kernel.name)
def kernel(request, monkeypatch):
    """The kernel, with a CPU that answers PyTorch's operators, and a package of that name."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = package_forward
    interface._flash_attn_varlen_backward = package_backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", torch_forward, "CPU")
    library.impl("_flash_attention_backward", torch_backward, "CPU")
    yield request.param
    library._destroy()


PACKS = {
    "whole documents": ([5, 9], [*range(14)]),
    "last rows": ([5, 9], [3, 4, 9, 10, 11, 12, 13]),
    "overlapping prefixes": ([16, 3, 20], [2, 3, 7, 8, 9, 15, 19, 24, 25, 26, 30]),
    "one row": ([7], [0]),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_a_cuda_kernel_asks_what_the_plain_one_computes(kernel, pack, steps):
    lengths, rows = pack
    starts, rows = torch.tensor([0, *lengths]).cumsum(0), torch.tensor(rows)
    generator = torch.Generator().manual_seed(0)
    sizes = [(len(rows), 6), *[(sum(lengths), 2)] * 2, *[(len(rows), 2)] * (2 * steps)]
    leaves = [torch.randn(*size, 16, generator=generator).requires_grad_() for size in sizes]
    grad = torch.randn(len(rows), 6, 16, generator=generator)
    found = []
    for one in (kernel, PLAIN):
        query, key, value, *own = leaves
        later = [Diagonal(*pair) for pair in zip(own[::2], own[1::2], strict=True)]
        output = attend(query, (key, value), Runs.of(rows, starts), later, one)
        found.append([output.detach(), *torch.autograd.grad(output, leaves, grad)])
    for ours, plain in zip(*found, strict=True):
        assert float((ours - plain).abs().max() / plain.abs().max()) <= BOUND


def test_a_row_that_nobody_sees_gets_no_gradient(kernel):
    """Keys after a document's last run are in no sequence: their gradients are zero, not junk."""
    rows, starts = torch.tensor([1, 2, 6]), torch.tensor([0, 5, 8])
    query = torch.randn(3, 2, 8, requires_grad=True)
    key, value = (torch.randn(8, 2, 8, requires_grad=True) for _ in range(2))
    attend(query, (key, value), Runs.of(rows, starts), [], kernel).square().sum().backward()
    for grad in (key.grad, value.grad):
        assert grad.flatten(1).abs().sum(1).gt(0).tolist() == [1, 1, 1, 0, 0, 1, 1, 0]
