"""The draft's layer and its memories, against the same written out in full."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels import CPU_FLASH, PLAIN
from models.layers import DraftAttention, DraftLayer, GatedMLP
from models.memory import DraftCache, TTTMemory
from models.rope import Rope
from models.runs import Runs

WIDTH, HEADS, KV_HEADS, HEAD = 12, 4, 2, 8
ROPE = Rope(HEAD, 256, {"rope_type": "default", "rope_theta": 1e4})


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attention() -> DraftAttention:
    torch.manual_seed(0)
    return DraftAttention(WIDTH, HEADS, KV_HEADS, ROPE).double()


def mid_layer(normed: bool, norm_eps: float | None = None) -> DraftLayer:
    torch.manual_seed(0)
    norms = [nn.RMSNorm(WIDTH) for _ in range(3)]
    attention = DraftAttention(WIDTH, HEADS, KV_HEADS, ROPE, norm_eps)
    layer = DraftLayer(attention, GatedMLP(WIDTH, 20), norms, normed).double()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.5)
    return layer


# ---- the MLP ---------------------------------------------------------------------------------


def test_gated_mlp_equals_its_definition():
    torch.manual_seed(0)
    mlp, states = GatedMLP(6, 10).double(), numbers(2, 5, 6).requires_grad_()
    plain = mlp.down_proj(F.silu(mlp.gate_proj(states)) * mlp.up_proj(states))
    leaves, grad = [states, *mlp.parameters()], numbers(2, 5, 6, seed=1)
    output = mlp(states)
    assert torch.allclose(output, plain, rtol=0, atol=1e-14)
    found, wanted = (torch.autograd.grad(o, leaves, grad) for o in (output, plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [(3, 4), (2, 3, 4)], ids=str)
def test_gradcheck_of_the_gated_mlp(size):
    torch.manual_seed(0)
    mlp = GatedMLP(4, 5).double()
    leaves = [numbers(*size).requires_grad_(), *mlp.parameters()]
    assert torch.autograd.gradcheck(lambda states, *_: mlp(states), leaves)


def test_a_backward_of_the_gated_mlp_can_be_repeated():
    torch.manual_seed(0)
    mlp, states = GatedMLP(4, 5).double(), numbers(3, 4).requires_grad_()
    leaves, output = [states, *mlp.parameters()], mlp(states)
    first = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(output.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- the attention's projections -------------------------------------------------------------


def test_shares_of_token_and_state_add_up_to_the_projection_of_the_pair():
    layer, token, state = attention(), numbers(5, WIDTH), numbers(5, WIDTH, seed=1)
    shares = layer.share_of(token, asks=True).split(layer.sizes, dim=-1)
    assert torch.equal(layer.share_of(token, asks=False), torch.cat(shares[1:], -1))
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    for share, projection, heads in zip(
        shares, projections, (HEADS, KV_HEADS, KV_HEADS), strict=True
    ):
        pair = projection(torch.cat((token, state), -1)).view(5, heads, HEAD)
        assert torch.allclose(layer.add_state(share, state, projection), pair, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("normed", "norm_eps"), [(False, None), (True, None), (False, 0.01)])
def test_a_layer_equals_its_words(normed, norm_eps):
    """A prefix of one document, decoded at once: norms, pair, causal attention, MLP, residuals."""
    layer, rows = mid_layer(normed, norm_eps), 6
    embedded, hidden = numbers(1, rows, WIDTH), numbers(1, rows, WIDTH, seed=1)
    positions = torch.arange(rows)[None]
    found = layer(
        layer.share_of(embedded, asks=True), hidden, positions, DraftCache(rows), known=False
    )
    states = layer.hidden_norm(hidden)
    pair = torch.cat((layer.input_layernorm(embedded), states), -1)
    of = layer.self_attn
    rotation = of.rotary.at(positions, torch.float64)
    query, key, value = (
        p(pair).unflatten(-1, (-1, HEAD)) for p in (of.q_proj, of.k_proj, of.v_proj)
    )
    if norm_eps is not None:
        query, key = (
            torch.stack([F.rms_norm(h, [HEAD], norm.weight, norm_eps) for h in x.unbind(-2)], -2)
            for x, norm in ((query, of.q_norm), (key, of.k_norm))
        )
    query, key = rotation.rotate(query), rotation.rotate(key)
    mixed = seen_by_all(query, key, value, torch.ones(rows, rows).tril())
    residual = (states if normed else hidden) + of.o_proj(mixed.flatten(-2))
    inner = layer.post_attention_layernorm(residual)
    mlp = layer.mlp
    wanted = residual + mlp.down_proj(F.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
    assert torch.allclose(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm_eps", [None, 1e-5])
def test_known_rows_remember_nothing_and_answer_the_same(norm_eps):
    layer, rows = mid_layer(False, norm_eps), 6
    tokens, hidden = numbers(1, rows, WIDTH), numbers(1, rows, WIDTH, seed=1)
    share = layer.share_of(tokens, asks=True)
    positions = torch.arange(rows)[None]
    told, taught = DraftCache(rows), DraftCache(rows)
    layer.remember(layer.share_of(tokens, asks=False), hidden, positions, told)
    assert told.length == rows
    known = layer(share, hidden, positions, told, known=True)
    assert told.length == rows
    assert torch.equal(known, layer(share, hidden, positions, taught, known=False))


# ---- the memory of decoding ------------------------------------------------------------------


def seen_by_all(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """query [B, R, H, Dh], key and value [B, T, Hkv, Dh], seen [R, T] -> [B, R, H, Dh]."""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("brhd,bthd->bhrt", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen.bool(), float("-inf")).softmax(-1)
    return torch.einsum("bhrt,bthd->brhd", weights, value)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
@pytest.mark.parametrize("pieces", [[9], [1], [1] * 9, [4, 1, 3, 1], [2, 2, 5], [1, 8]], ids=str)
def test_a_cache_filled_in_pieces_sees_as_one_that_is_filled_at_once(pieces, kv_heads):
    rows, batch = sum(pieces), 2
    query = numbers(batch, rows, HEADS, HEAD)
    key, value = (numbers(batch, rows, kv_heads, HEAD, seed=s) for s in (1, 2))
    cache, found, begin = DraftCache(rows + 3), [], 0  # capacity beyond what is filled
    for piece in pieces:
        part = slice(begin, begin + piece)
        cache.remember(key[:, part], value[:, part])
        found.append(cache.attend(query[:, part]))
        begin += piece
        assert cache.length == begin
    wanted = seen_by_all(query, key, value, torch.ones(rows, rows).tril())
    assert torch.allclose(torch.cat(found, 1), wanted, rtol=0, atol=1e-14)


def test_the_last_rows_alone_may_ask():
    key, value = numbers(1, 7, KV_HEADS, HEAD), numbers(1, 7, KV_HEADS, HEAD, seed=1)
    query, cache = numbers(1, 7, HEADS, HEAD, seed=2), DraftCache(7)
    cache.remember(key, value)
    wanted = seen_by_all(query, key, value, torch.ones(7, 7).tril())
    for rows in (1, 3, 7):
        found = cache.attend(query[:, -rows:])
        assert torch.allclose(found, wanted[:, -rows:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kept", [0, 1, 4, 6])
@pytest.mark.parametrize("again", [1, 3])
def test_truncated_rows_are_forgotten_and_overwritten(kept, again):
    key, value = numbers(1, 6, KV_HEADS, HEAD), numbers(1, 6, KV_HEADS, HEAD, seed=1)
    fresh = [numbers(1, again, KV_HEADS, HEAD, seed=s) for s in (2, 3)]
    query, cache = numbers(1, again, HEADS, HEAD, seed=4), DraftCache(9)
    cache.remember(key, value)
    cache.truncate(kept)
    assert cache.length == kept
    cache.remember(*fresh)
    whole = [
        torch.cat((old[:, :kept], new), 1) for old, new in zip((key, value), fresh, strict=True)
    ]
    seen = torch.ones(again, kept + again).tril(kept)
    wanted = seen_by_all(query, *whole, seen)
    assert torch.allclose(cache.attend(query), wanted, rtol=0, atol=1e-14)


def test_a_full_cache_says_so_and_stays_as_it_was():
    cache, states = DraftCache(4), numbers(1, 3, KV_HEADS, HEAD)
    cache.remember(states, states)
    with pytest.raises(ValueError, match="draft cache of 4 rows cannot take row 6"):
        cache.remember(states, states)
    assert cache.length == 3
    cache.remember(states[:, :1], states[:, :1])  # exactly full
    assert cache.length == 4


# ---- the memory of the training-time test ----------------------------------------------------


def test_the_first_memory_takes_the_base_and_the_next_ones_share_it():
    key, value = numbers(9, KV_HEADS, HEAD), numbers(9, KV_HEADS, HEAD, seed=1)
    opening = TTTMemory(PLAIN)
    opening.remember(key, value)
    runs = Runs.of(torch.tensor([2, 3, 7]), torch.tensor([0, 9]))
    first = opening.following(runs, None)
    second = first.following(runs, None)
    for memory in (first, second):
        assert memory.base is opening.base
        assert memory.base[0] is key
        assert memory.runs is runs
        assert not memory.earlier
        assert not memory.own


def test_a_step_keeps_the_keys_of_the_rows_that_go_on():
    rows = torch.tensor([2, 3, 5, 7])
    starts = torch.tensor([0, 9])
    states = {name: numbers(n, KV_HEADS, HEAD, seed=n) for name, n in (("base", 9), ("one", 4))}
    opening = TTTMemory(PLAIN)
    opening.remember(states["base"], -states["base"])
    runs = Runs.of(rows, starts)
    first = opening.following(runs, None).following(runs, None)
    first.remember(states["one"], -states["one"])
    same = first.following(runs, None)
    assert [id(t) for t in same.earlier] == [id(t) for t in first.own]  # no copy where all go on
    kept = torch.tensor([0, 2])
    fewer = first.following(Runs.of(rows[kept], starts), kept)
    (one,) = fewer.earlier
    assert one.key is states["one"]  # nor where some stop: the attention gathers
    assert torch.equal(one.at(one.value), -states["one"][kept])
    two = numbers(2, KV_HEADS, HEAD, seed=5)
    fewer.remember(two, 2 * two)
    last = torch.tensor([1])
    one, other = fewer.following(Runs.of(rows[kept][last], starts), last).earlier
    assert torch.equal(one.at(one.key), states["one"][[2]])
    assert torch.equal(other.at(other.value), 2 * two[[1]])
    assert torch.equal(
        one.back(torch.ones(1, 2)), torch.tensor([[0.0] * 2, [0] * 2, [1] * 2, [0] * 2])
    )
    assert len(first.own) == 1
    assert not first.earlier  # the memories of earlier steps are as they were


def test_a_step_that_is_computed_twice_remembers_once():
    """Activation checkpointing runs a step again in the backward."""
    opening, states = TTTMemory(PLAIN), numbers(5, KV_HEADS, HEAD)
    runs = Runs.of(torch.arange(5), torch.tensor([0, 5]))
    opening.remember(states, states)
    step = opening.following(runs, None)
    step.remember(states, states)
    query = numbers(5, HEADS, HEAD, seed=3)
    first = step.attend(query)
    step.remember(states.clone(), states.clone())
    assert torch.equal(step.attend(query), first)
    assert len(step.following(runs, None).earlier) == 1


@pytest.mark.parametrize("kernel", [PLAIN, CPU_FLASH], ids=lambda kernel: kernel.name)
def test_rows_see_the_base_and_their_own_keys_of_every_step(kernel):
    """Two documents and three steps, fewer rows at each."""
    starts, rows = torch.tensor([0, 6, 11]), torch.tensor([1, 2, 4, 7, 8, 10])
    base = [numbers(11, KV_HEADS, HEAD, seed=s) for s in (1, 2)]
    memory = TTTMemory(kernel)
    memory.remember(*base)
    memory = memory.following(Runs.of(rows, starts), None)
    later: list[list[Tensor]] = []  # [11, Hkv, Dh], by packed row
    for step, kept in enumerate([[0, 1, 2, 3, 4, 5], [0, 2, 3, 5], [1, 3]]):
        kept = torch.tensor(kept)
        rows = rows[kept]
        memory = memory.following(Runs.of(rows, starts), kept)
        later.append([numbers(11, KV_HEADS, HEAD, seed=10 * step + s) for s in (3, 4)])
        memory.remember(*(states[rows] for states in later[-1]))
        query = numbers(len(rows), HEADS, HEAD, seed=step)
        found = memory.attend(query)
        for place, row in enumerate(rows.tolist()):
            begin = 0 if row < 6 else 6
            key, value = (
                torch.cat([base[i][begin : row + 1], *(states[i][row][None] for states in later)])
                for i in range(2)
            )
            wanted = seen_by_all(
                query[None, place : place + 1], key[None], value[None], torch.ones(1, len(key))
            )
            assert torch.allclose(found[place], wanted[0, 0], rtol=0, atol=1e-13)
