"""The cache gives what an uncached forward gives, whatever was rolled back before."""

import logging

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_utils import PreTrainedModel

from models.branches import Branches
from models.kv import KVCache

VOCAB = 128
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "initializer_range": 0.25,  # attention far from uniform, so that a wrong row shows
}


def llama(dtype: torch.dtype, attention: str = "sdpa", kv_heads: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=kv_heads, **SIZES)
    config._attn_implementation = attention
    model = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def cache_for(model: PreTrainedModel, batch: int, capacity: int = 40) -> KVCache:
    return KVCache(model.config, batch, capacity, CPU, model.dtype)


def cached(
    model: PreTrainedModel, ids: Tensor, cache: KVCache, branches: Branches | None = None
) -> Tensor:
    """Logits [B, T, V] of ``ids`` after what the cache holds."""
    steps = ids.shape[1]
    return model(
        input_ids=ids,
        attention_mask=cache.mask(steps, branches),
        position_ids=cache.positions(steps, branches),
        cache=cache,
        use_cache=True,
    ).logits


def full(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def text(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-10 if wanted.dtype == torch.float64 else 1e-5
    scale = float(wanted.abs().max())
    assert float((actual - wanted).abs().max()) <= tolerance * max(scale, 1.0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ragged_batch_equals_uncached(dtype: torch.dtype, kv_heads: int):
    model = llama(dtype, kv_heads=kv_heads)
    lengths = [5, 9, 1]
    ids = text(3, 24)
    want = full(model, ids)
    cache = cache_for(model, 3)
    prefill = cached(model, ids[:, :9], cache)
    cache.advance(torch.tensor(lengths))
    for b, n in enumerate(lengths):
        assert_same(prefill[b, :n], want[b, :n])
    for steps in (1, 4, 1, 6):
        at = cache.lengths.tolist()
        got = cached(model, torch.stack([ids[b, n : n + steps] for b, n in enumerate(at)]), cache)
        for b, n in enumerate(at):
            assert_same(got[b], want[b, n : n + steps])
        cache.advance(steps)
    assert cache.lengths.tolist() == [17, 21, 13]


def test_eager_attention_gets_an_additive_mask():
    model = llama(torch.float32, attention="eager")
    ids = text(2, 12)
    want = full(model, ids)
    cache = cache_for(model, 2)
    cached(model, ids[:, :6], cache)
    cache.advance(torch.tensor([6, 3]))
    mask = cache.mask(2)
    assert mask is not None and mask.dtype == torch.float32
    got = cached(model, torch.stack([ids[0, 6:8], ids[1, 3:5]]), cache)
    assert_same(got[0], want[0, 6:8])
    assert_same(got[1], want[1, 3:5])


def test_qwen3_with_unequal_widths():
    torch.manual_seed(0)
    config = Qwen3Config(num_key_value_heads=2, **{**SIZES, "head_dim": 24})
    model = Qwen3ForCausalLM(config).double().eval().requires_grad_(False)
    ids = text(2, 10)
    want = full(model, ids)
    cache = cache_for(model, 2)
    cached(model, ids[:, :5], cache)
    cache.advance(torch.tensor([5, 2]))
    got = cached(model, torch.stack([ids[0, 5:8], ids[1, 2:5]]), cache)
    assert_same(got[0], want[0, 5:8])
    assert_same(got[1], want[1, 2:5])


@pytest.mark.parametrize("accepted", range(6))
def test_rejection_at_each_position(accepted: int):
    """Feed a root and 5 guesses, keep the root and ``accepted`` of them, go on with other text."""
    model = llama(torch.float64)
    cache = cache_for(model, 1)
    cached(model, text(1, 7), cache)
    cache.advance(7)
    guesses = text(1, 6, seed=2)
    cached(model, guesses, cache)
    cache.advance(accepted + 1)
    more = text(1, 8, seed=3)
    got = cached(model, more, cache)
    whole = torch.cat([text(1, 7), guesses[:, : accepted + 1], more], 1)
    assert_same(got, full(model, whole)[:, -8:])


def test_rejection_differs_by_sequence():
    model = llama(torch.float64)
    cache = cache_for(model, 6)
    prompt, guesses, more = text(6, 7), text(6, 6, seed=2), text(6, 3, seed=3)
    cached(model, prompt, cache)
    cache.advance(7)
    cached(model, guesses, cache)
    cache.advance(torch.arange(1, 7))
    got = cached(model, more, cache)
    for b in range(6):
        whole = torch.cat([prompt[b], guesses[b, : b + 1], more[b]])[None]
        assert_same(got[b], full(model, whole)[0, -3:])


@pytest.mark.parametrize("rows", [[1, 3], [3, 1], [3], [0, 3, 2], [2, 0, 1, 3], []])
def test_keep_goes_on_with_the_chosen_rows(rows: list[int]):
    model = llama(torch.float64)
    cache = cache_for(model, 4)
    lengths, ids = torch.tensor([4, 8, 6, 2]), text(4, 8)
    cached(model, ids, cache)
    cache.advance(lengths)
    cache.keep(torch.tensor(rows, dtype=torch.long))
    assert cache.batch == len(rows) and cache.lengths.tolist() == lengths[rows].tolist()
    if not rows:
        return
    more = text(len(rows), 3, seed=3)
    got = cached(model, more, cache)
    for i, row in enumerate(rows):
        whole = torch.cat([ids[row, : lengths[row]], more[i]])[None]
        assert_same(got[i], full(model, whole)[0, -3:])


def test_masks_by_hand():
    model = llama(torch.float32)
    cache = cache_for(model, 2)
    assert cache.mask(5) is None
    cached(model, text(2, 5), cache)
    cache.advance(5)
    mask = cache.mask(2)
    assert mask is not None
    assert mask.tolist() == [[[[True] * 6 + [False], [True] * 7]]] * 2
    cache.advance(torch.tensor([0, 1]))
    ragged = cache.mask(1)
    assert ragged is not None
    assert ragged.tolist() == [[[[True] * 6 + [False]]], [[[True] * 7]]]


def test_one_token_at_equal_lengths_needs_no_mask_on_an_accelerator():
    config = llama(torch.float32).config
    elsewhere = KVCache(config, 2, 9, torch.device("meta"), torch.float32)
    elsewhere.advance(3)
    assert elsewhere.mask(1) is None and elsewhere.mask(2) is not None
    elsewhere.advance(torch.tensor([1, 0]))
    assert elsewhere.mask(1) is not None
    here = cache_for(llama(torch.float32), 2)
    here.advance(3)
    mask = here.mask(1)
    assert mask is not None and mask.tolist() == [[[[True] * 4]]] * 2


def test_views_share_the_storage():
    cache = cache_for(llama(torch.float32), 1)
    row = torch.ones(1, 2, 3, 16)
    keys, _ = cache.update(row, row, 0)
    cache.advance(3)
    later, _ = cache.update(row, row, 0)
    assert keys.shape[2] == 3 and later.shape[2] == 6
    assert keys.data_ptr() == later.data_ptr()


def test_no_deprecation_warning(caplog: pytest.LogCaptureFixture):
    model = llama(torch.float32)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        cached(model, text(1, 4), cache_for(model, 1))
    assert "deprecated" not in caplog.text


def test_limits_are_named():
    model = llama(torch.float32)
    cache = cache_for(model, 2, capacity=6)
    cached(model, text(2, 5), cache)
    cache.advance(5)
    with pytest.raises(ValueError, match=r"5 cached \+ 2 new tokens exceed capacity=6"):
        cached(model, text(2, 2), cache)
    with pytest.raises(ValueError, match=r"leave 0\.\.capacity=6"):
        cache.advance(2)
    with pytest.raises(ValueError, match=r"leave 0\.\.capacity=6"):
        cache.advance(torch.tensor([0, -6]))
    with pytest.raises(ValueError, match="3 counts for a batch of 2"):
        cache.advance(torch.tensor([1, 1, 1]))
    with pytest.raises(ValueError, match="rows are unique"):
        cache.keep(torch.tensor([0, 0]))
    assert cache.lengths.tolist() == [5, 5]


# ---- padding and long prompts ----------------------------------------------------------------


def hidden(model: PreTrainedModel, ids: Tensor, cache: KVCache | None = None) -> list[Tensor]:
    """The states after every layer and the logits, each [B, T, *]."""
    steps = ids.shape[1]
    placed = (
        {"attention_mask": cache.mask(steps), "position_ids": cache.positions(steps)}
        if cache is not None
        else {}
    )
    out = model(
        input_ids=ids, cache=cache, use_cache=cache is not None, output_hidden_states=True, **placed
    )
    return [*out.hidden_states, out.logits]


def largest_gap(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("padding", [0, 1, 7, 64])
def test_padding_on_the_right_changes_nothing(padding: int):
    """User report B81: states and logits of a prompt and the step after it, cached or not."""
    model = llama(torch.float32)
    prompt, more = text(1, 11), text(1, 3, seed=2)
    wanted, after = hidden(model, prompt), hidden(model, torch.cat([prompt, more], 1))
    padded = torch.cat([prompt, text(1, padding, seed=3)], 1)
    bare = [rows[:, :11] for rows in hidden(model, padded)]
    assert largest_gap(bare, wanted) < 1e-4
    cache = cache_for(model, 1, capacity=90)
    prefill = [rows[:, :11] for rows in hidden(model, padded, cache)]
    assert largest_gap(prefill, wanted) < 1e-4
    cache.advance(11)
    assert largest_gap(hidden(model, more, cache), [rows[:, 11:] for rows in after]) < 1e-4


def test_a_ragged_batch_is_never_padded_on_the_left():
    """User report B81: sequences start at row and position 0; the left would move them."""
    model = llama(torch.float32)
    lengths, ids, more = [11, 4], text(2, 11), text(2, 1, seed=2)
    cache = cache_for(model, 2)
    hidden(model, ids, cache)
    cache.advance(lengths)
    assert cache.positions(1).tolist() == [[11], [4]]
    found = hidden(model, more, cache)
    for row, length in enumerate(lengths):
        alone = hidden(model, torch.cat([ids[row, :length], more[row]])[None])
        assert largest_gap([x[row, -1] for x in found], [x[0, -1] for x in alone]) < 1e-4
    left = hidden(model, torch.cat([text(1, 7, seed=3), ids[1:, :4]], 1))
    alone = hidden(model, ids[1:, :4])
    assert largest_gap([x[:, -1] for x in left], [x[:, -1] for x in alone]) > 1e-2


def test_prompts_of_700_and_2500_tokens():
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().requires_grad_(False)
    lengths, ids = [700, 2500], text(2, 2508)
    wanted = full(model, ids)
    cache = cache_for(model, 2, capacity=2508)
    prefill = cached(model, ids[:, :2500], cache)
    cache.advance(lengths)
    for steps in (1, 7):
        at = cache.lengths.tolist()
        got = cached(model, torch.stack([ids[b, n : n + steps] for b, n in enumerate(at)]), cache)
        for b, n in enumerate(at):
            assert_same(prefill[b, : lengths[b]], wanted[b, : lengths[b]])
            assert_same(got[b], wanted[b, n : n + steps])
        cache.advance(steps)
