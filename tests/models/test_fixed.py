"""Forwards of fixed shape over the cache give what growing ones give."""

import random

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.modeling_utils import PreTrainedModel

from models.branches import Branches
from models.fixed import FixedCache
from models.kv import KVCache

VOCAB = 128
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "initializer_range": 0.25,  # attention far from uniform, so that a wrong row shows
}
LENGTHS = [3, 9, 5]
CAPACITY = 64
KINDS = ["sliding_attention", "full_attention"] * 4
EXPERTS = {"num_local_experts": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "eager attention": lambda: LlamaForCausalLM._from_config(
        LlamaConfig(**SIZES), attn_implementation="eager"
    ),
    "windows": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(sliding_window=6, layer_types=KINDS, **SIZES)
    ),
    "chunks": lambda: Llama4ForCausalLM(
        Llama4TextConfig(attention_chunk_size=4, **{**SIZES, **EXPERTS})
    ),
}


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[kind]()
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.data.normal_(std=0.15)  # the library leaves experts' as they lie in memory
    return model.float().eval().requires_grad_(False)


class Pair:
    """The same text in two caches: one grows, the other is seen at full capacity."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.growing, self.whole = (
            KVCache(model.config, len(LENGTHS), CAPACITY, CPU, model.dtype) for _ in range(2)
        )
        prompts = torch.randint(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
        for cache in (self.growing, self.whole):
            self.feed(cache, prompts)
            cache.advance(LENGTHS)
        self.fixed = FixedCache(self.whole)
        self.furthest = 0.0

    def feed(
        self, cache: KVCache | FixedCache, ids: Tensor, branches: Branches | None = None
    ) -> Tensor:
        steps = ids.shape[1]
        return self.model(
            input_ids=ids,
            attention_mask=cache.mask(steps, branches),
            position_ids=cache.positions(steps, branches),
            cache=cache,
            use_cache=True,
        ).logits

    def step(self, ids: Tensor, branches: Branches | None = None) -> None:
        """Feed [B, T] to both, where the full one has junk in the slots of those that left."""
        wanted = self.feed(self.growing, ids, branches)
        self.fixed.follow(self.whole)
        missing = self.whole.slots - self.whole.batch
        junk = torch.full((missing, ids.shape[1]), 7)
        if branches is not None:
            line = Branches.line(missing, ids.shape[1], CPU)
            branches = Branches(
                torch.cat([branches.depth, line.depth]), torch.cat([branches.seen, line.seen])
            )
        got = self.feed(self.fixed, torch.cat([ids, junk]), branches)[: len(ids)]
        apart = (got - wanted).abs().max() / wanted.abs().max()
        self.furthest = max(self.furthest, float(apart))

    @property
    def both(self) -> tuple[KVCache, KVCache]:
        return self.growing, self.whole


def play(pair: Pair) -> None:
    """Single tokens, chains partly kept, trees, and sequences that leave."""
    draw = random.Random(3)
    for turn in range(9):
        batch, width = pair.whole.batch, (1, 4, 6)[turn % 3]
        ids = torch.randint(0, VOCAB, (batch, width))
        if width == 6:
            parents = torch.tensor([[draw.randint(0, n) for n in range(5)] for _ in range(batch)])
            branches = Branches.of_parents(parents, 5)
            pair.step(ids, branches)
            ends = [draw.randint(1, 5) for _ in range(batch)]
            paths = [
                [n for n in range(1, 6) if branches.seen[b, end, n]] for b, end in enumerate(ends)
            ]
            padded = torch.tensor([path + [0] * (5 - len(path)) for path in paths])
            for cache in pair.both:
                cache.commit(padded, [len(path) for path in paths])
        else:
            pair.step(ids)
            for cache in pair.both:
                cache.advance([1 + (turn + b) % width for b in range(batch)])
        if turn in (3, 6):
            rows = torch.tensor([pair.whole.batch - 1, *range(1, pair.whole.batch - 1)])
            for cache in pair.both:
                cache.keep(rows)


@pytest.mark.parametrize("kind", MODELS)
def test_fixed_steps_are_growing_steps(kind: str):
    pair = Pair(model_of(kind))
    play(pair)
    assert pair.whole.batch == 1 and int(pair.whole.lengths) > 12  # beyond window and chunk
    assert 0 < pair.furthest <= 1e-5


def write_one_too_far(self, steps: int) -> Tensor:
    return self.lengths[:, None] + 1 + torch.arange(steps)


def see_as_if_empty(self, steps: int, branches: Branches | None = None):
    self.lengths, lengths = torch.zeros_like(self.lengths), self.lengths
    try:
        return right_mask(self, steps, branches)
    finally:
        self.lengths = lengths


right_mask = FixedCache.mask


@pytest.mark.parametrize(
    ("method", "wrong"), [("_places", write_one_too_far), ("mask", see_as_if_empty)]
)
def test_wrong_places_and_masks_show(monkeypatch: pytest.MonkeyPatch, method: str, wrong):
    monkeypatch.setattr(FixedCache, method, wrong)
    pair = Pair(model_of("llama"))
    play(pair)
    assert pair.furthest > 1e-2


def test_a_cache_begins_anew_in_its_memory():
    """What an earlier text left behind shows nowhere, and no memory is taken again."""
    pair = Pair(model_of("llama"))
    play(pair)
    kept = {layer: keys.data_ptr() for layer, keys in pair.whole.keys.items()}
    fresh = KVCache(pair.model.config, 2, CAPACITY, CPU, torch.float32)
    pair.whole.begin(2)
    prompts = torch.randint(0, VOCAB, (2, 6))
    for cache in (fresh, pair.whole):
        pair.feed(cache, prompts)
        cache.advance([6, 2])
    pair.growing, pair.fixed, pair.furthest = fresh, FixedCache(pair.whole), 0.0
    pair.step(torch.randint(0, VOCAB, (2, 3)))
    assert pair.furthest <= 1e-5
    assert {layer: keys.data_ptr() for layer, keys in pair.whole.keys.items()} == kept
