"""EAGLE-1's step against its plain twin: one document, dense masks, everything by autograd."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from data.records import TTTBatch
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.kernels import CPU_FLASH, PLAIN
from train.families.eagle1 import FeatureRegression, noise_of
from train.loss import CHUNK_LOGITS

WIDTH, VOCAB, EPS = 24, 40, 1e-5  # of the documents in conftest.py
MASKS = {
    "two answers": [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]],
    "short answers": [[0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]],
    "packed": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0] * 4, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
}


def make_draft(head: Tensor) -> Eagle1Draft:
    torch.manual_seed(1)
    config = Eagle1Config(
        hidden_size=WIDTH,  # heads * head_dim is not the width
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        aux_layers=[9],
        rms_norm_eps=EPS,
        max_positions=256,
        rope={"rope_type": "default", "rope_theta": 1e4},
    )
    draft = Eagle1Draft(config).double()
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.4)
    draft.lm_head.weight.data.copy_(head)
    return draft


@pytest.fixture
def documents(make_document) -> Callable[..., list]:
    """Documents whose one aux stream is the last; their final states stay what they are."""

    def make(masks: list[list[int]]) -> list:
        made = [make_document(mask, seed) for seed, mask in enumerate(masks)]
        return [replace(one, aux=one.aux[:, :WIDTH]) for one in made]

    return make


def over_rms(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(states: Tensor) -> Tensor:
    """Rotary by complex numbers: states [T, H, Dh] at places 0..T-1, theta 10,000."""
    half = states.shape[-1] // 2
    angles = torch.arange(len(states))[:, None].float() * (1e4 ** -(torch.arange(half) / half))
    angle = torch.complex(angles.cos().double(), angles.sin().double())[:, None]
    spun = torch.complex(states[..., :half], states[..., half:]) * angle
    return torch.cat((spun.real, spun.imag), -1)


def twin_guesses(draft: Eagle1Draft, ids: Tensor, states: Tensor) -> Tensor:
    """ids [T], final states [T, D] -> [T-1, D]: entry t is the guess of state t+1, from x[t+1]."""
    weights, rows = dict(draft.named_parameters()), len(ids) - 1
    layer = {
        name.split(".", 2)[2]: weight for name, weight in weights.items() if "layers.0" in name
    }
    embedded = weights["embed_tokens.weight"][ids[1:]]
    entered = torch.cat((embedded, states[:-1]), -1) @ weights["fc.weight"].T  # no norm
    query, key, value = (
        (entered @ layer[f"self_attn.{n}_proj.weight"].T).view(rows, -1, 8) for n in "qkv"
    )
    query, key = turned(query), turned(key).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / 8**0.5
    future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(future, float("-inf")).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, value.repeat_interleave(2, 1)).flatten(1)
    residual = entered + mixed @ layer["self_attn.o_proj.weight"].T
    inner = over_rms(residual, layer["post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
    gated = gated * (inner @ layer["mlp.up_proj.weight"].T)
    return residual + gated @ layer["mlp.down_proj.weight"].T  # no final norm


def answers_of(mask: Tensor) -> list[tuple[int, int]]:
    edges = [0, *mask.int().tolist(), 0]
    begins = [t for t in range(len(mask)) if edges[t + 1] > edges[t]]
    return [(a, next(t for t in range(a, len(mask) + 1) if not edges[t + 1])) for a in begins]


def twin_loss(draft: Eagle1Draft, documents: list, shift: int = 1, token: int = 1) -> Tensor:
    """Sum over supervised rows. ``shift``: 0 would regress the state that was read; ``token``: 0
    would read the token that the state has seen."""
    total = torch.zeros((), dtype=torch.float64)
    for one in documents:
        ids = one.ids if token else torch.cat([one.ids[:1], one.ids[:-1]])
        states = over_rms(one.aux, draft.final_norm.weight)
        guesses = twin_guesses(draft, ids, states)
        for begin, end in answers_of(one.mask):
            for t in range(max(begin - 1, 0), end - 2):  # x[t+1] and x[t+2] in the answer
                apart = (guesses[t] - one.last[t + shift]).abs()
                near = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                target = (draft.lm_head.weight @ one.last[t + shift]).softmax(-1)
                guess = (draft.lm_head.weight @ guesses[t]).log_softmax(-1)
                total = total + near - 0.1 * (target * guess).sum()
    return total


def step(module: FeatureRegression, batch: TTTBatch, weights: list[float] | None = None):
    each = torch.tensor(weights or [1.0] * batch.samples, dtype=torch.float64)
    return module(batch, each)


def grads_of(loss: Tensor, draft: Eagle1Draft) -> dict[str, Tensor]:
    trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_loss_and_gradients_equal_the_plain_twin(masks, kernel, lab, documents, monkeypatch):
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 3 * VOCAB)  # several chunks, the last one shorter
    draft, texts = make_draft(lab.head), documents(masks)
    module = FeatureRegression(draft, kernel).eval()
    found, twin = step(module, lab.pack(texts, 1)), twin_loss(draft, texts)
    assert found.loss.item() == pytest.approx(twin.item(), rel=1e-12)
    assert found.sums.item() == pytest.approx(twin.item(), rel=1e-12)
    assert lab.apart(grads_of(found.loss, draft), grads_of(twin, draft)) <= 1e-12


def test_the_twin_tells_a_shift_by_one(lab, documents):
    """What would train, and draft nothing: the state that was read, or the token it has seen."""
    draft, texts = make_draft(lab.head), documents(MASKS["packed"])
    right = step(FeatureRegression(draft, CPU_FLASH).eval(), lab.pack(texts, 1)).loss.item()
    for wrong in (twin_loss(draft, texts, shift=0), twin_loss(draft, texts, token=0)):
        assert abs(wrong.item() / right - 1) > 1e-3


def test_counts_and_hits_are_those_of_the_verifiers_argmax(lab, documents):
    draft, texts = make_draft(lab.head), documents(MASKS["packed"])
    found = step(FeatureRegression(draft, CPU_FLASH).eval(), lab.pack(texts, 1))
    rows = [
        (one, t)
        for one in texts
        for begin, end in answers_of(one.mask)
        for t in range(max(begin - 1, 0), end - 2)
    ]
    hits = 0
    for one, t in rows:
        guesses = twin_guesses(draft, one.ids, over_rms(one.aux, draft.final_norm.weight))
        guess = (draft.lm_head.weight @ guesses[t]).argmax()
        hits += int(guess == one.logits[t + 1].argmax())
    assert (found.counts.item(), found.hits.item()) == (len(rows), hits)


def test_documents_are_weighted_and_do_not_see_each_other(lab, documents):
    draft, texts = make_draft(lab.head), documents(MASKS["packed"])
    module, weights = FeatureRegression(draft, CPU_FLASH).eval(), [0.5, 2.0, 1.0, 0.25]
    found = step(module, lab.pack(texts, 1), weights)
    alone = sum(
        weight * twin_loss(draft, [one]) for weight, one in zip(weights, texts, strict=True)
    )
    assert found.loss.item() == pytest.approx(alone.item(), rel=1e-12)
    assert lab.apart(grads_of(found.loss, draft), grads_of(alone, draft)) <= 1e-12


def test_a_batch_without_answers_gives_nothing_and_reaches_every_weight(lab, documents):
    draft, texts = make_draft(lab.head), documents([[0, 0, 0], [0, 1]])
    found = step(FeatureRegression(draft, CPU_FLASH).eval(), lab.pack(texts, 1))
    assert (found.loss.item(), found.counts.item()) == (0, 0)
    grads = grads_of(found.loss, draft)
    assert all(not grad.any() for grad in grads.values())
    assert {name.split(".")[0] for name in grads} == {"fc", "layers"}  # the rest is frozen


def test_rows_without_loss_give_keys_and_nothing_else(lab, documents):
    """A row behind the answers changes nothing; one before them does, through its key."""
    draft, (text,) = make_draft(lab.head), documents([[0, 0, 1, 1, 1, 1, 0, 0]])
    module = FeatureRegression(draft, CPU_FLASH).eval()

    def loss(changed: int) -> float:
        aux = text.aux.clone()
        aux[changed] += 1
        return step(module, lab.pack([replace(text, aux=aux)], 1)).loss.item()

    right = step(module, lab.pack([text], 1)).loss.item()
    assert loss(0) != right
    assert loss(4) == loss(7) == right  # the last row that guesses is 3, of x[5]
    assert loss(3) != right


def test_noise_is_in_training_alone_and_follows_from_the_draw(lab, documents):
    draft, texts = make_draft(lab.head), documents(MASKS["packed"])
    module, batch = FeatureRegression(draft, CPU_FLASH), lab.pack(texts, 1)
    first, again = (step(module, replace(batch, draw=7)).loss.item() for _ in range(2))
    other = step(module, replace(batch, draw=8)).loss.item()
    still = step(module.eval(), replace(batch, draw=7)).loss.item()
    assert first == again
    assert len({first, other, still}) == 3


def test_noise_fills_a_range_that_narrows_with_the_length(lab, documents):
    texts = documents([[0] * 512, [0] * 2048, [0] * 128])
    batch = lab.pack(texts, 1)
    drawn = noise_of(batch, batch.aux).split([512, 2048, 128])
    for part, bound in zip(drawn, (0.1, 0.025, 0.4), strict=True):
        assert part.abs().max() <= bound
        assert part.max() > 0.98 * bound and part.min() < -0.98 * bound
        assert part.mean().abs() < 0.03 * bound
