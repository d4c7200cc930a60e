"""The fused loss: its chunks, its teacher, its memory, and labels outside the draft vocabulary."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig

from conf.schema import LossKind, Supervise
from data.chains import Chains
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from train import loss as loss_module
from train.loss import Distillation

DEPTH = 4
MASKS = [[0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]


def test_a_moved_mask_is_caught(lab):
    """Negative control: supervising rows one too late changes the loss."""
    documents = lab.documents(MASKS)
    late = [replace(d, mask=d.mask.roll(1)) for d in documents]
    module = lab.module(lab.draft(), DEPTH)
    right, wrong = (lab.step(module, lab.pack(one, DEPTH)).loss for one in (documents, late))
    assert abs(right - wrong) > 1e-3


def test_out_of_vocabulary_argmax_is_a_miss(lab):
    draft = lab.draft()
    batch = lab.pack(lab.documents(MASKS), DEPTH)
    outside = int((~draft.t2d).nonzero()[0])
    all_out = replace(batch, argmax=torch.full_like(batch.argmax, outside))
    found = lab.step(lab.module(draft, DEPTH, kind=LossKind.ce), all_out)
    assert found.output.hits.sum() == 0
    assert found.output.counts[0] == 14
    assert found.loss == 0.0
    assert not any(grad.any() for grad in found.grads.values())
    kl = lab.step(lab.module(draft, DEPTH), all_out)
    assert kl.loss == lab.step(lab.module(draft, DEPTH), batch).loss  # and lose no row elsewhere


@pytest.mark.parametrize("kind", list(LossKind))
@pytest.mark.parametrize("most", [1, 40, 16 * 9])
def test_chunks_change_nothing(most, kind, lab, monkeypatch: pytest.MonkeyPatch):
    """Chunks of one target each, of a few, and one chunk for all."""
    module = lab.module(lab.draft(), DEPTH, kind=kind)
    batch = lab.pack(lab.documents(MASKS), DEPTH)
    whole = lab.step(module, batch)
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", most)
    asked: list[int] = []
    teacher = Distillation.teacher

    def noted(self, batch, targets, draft):
        asked.extend(targets.tolist())
        return teacher(self, batch, targets, draft)

    monkeypatch.setattr(Distillation, "teacher", noted)
    cut = lab.step(module, batch)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-13)
    assert lab.apart(cut.grads, whole.grads) <= 1e-13
    assert torch.equal(cut.output.hits, whole.output.hits)
    passes = 2 if kind is LossKind.mix else 1
    assert sorted(asked) == sorted([*set(asked)] * passes)  # a target's teacher once, for all of it
    assert len(asked) < passes * sum(batch.chains.counts)


def test_without_gradients_the_values_are_the_same(lab):
    module = lab.module(lab.draft(), DEPTH)
    batch, weights = lab.pack(lab.documents(MASKS), DEPTH), torch.ones(2, dtype=torch.float64)
    trained = module(batch, weights)
    with torch.no_grad():
        found = module(batch, weights)
    assert not found.loss.requires_grad and found.loss.item() == trained.loss.item()
    assert torch.equal(found.sums, trained.sums) and torch.equal(found.hits, trained.hits)


def test_a_frozen_head_leaves_the_other_gradients_as_they_are(lab):
    draft = lab.draft()
    module, batch = lab.module(draft, DEPTH), lab.pack(lab.documents(MASKS), DEPTH)
    trained = lab.step(module, batch).grads
    draft.lm_head.requires_grad_(False)
    frozen = lab.step(module, batch).grads
    assert trained.keys() - frozen.keys() == {"draft.lm_head.weight"}
    assert all(torch.equal(grad, trained[name]) for name, grad in frozen.items())


# ---- memory --------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made under it that are alive, and their peak."""

    def __init__(self, guesses: int):
        super().__init__()
        self.guesses = guesses  # supervised rows of all steps
        self.known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.alive = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and storage not in self.known:
                    self.count(storage)
        return result

    def count(self, storage) -> None:
        size = storage.nbytes()
        self.known[storage] = size
        self.alive += size
        self.peak = max(self.peak, self.alive)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self.forget, size)

    def forget(self, size: int) -> None:
        self.alive -= size


WIDTH, WORDS, CHUNK = 8, 49152, 1 << 20  # width and chunk scaled down, rows and vocabulary not


@pytest.fixture(scope="module")
def wide() -> tuple[Eagle3Draft, Distillation]:
    """A narrow head over a vocabulary of 49,152."""
    config = DraftConfig(
        hidden_size=WIDTH,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=WORDS,
        draft_vocab_size=WORDS,
        aux_layers=[1],
        rms_norm_eps=1e-5,
        max_positions=4096,
        rope={"rope_type": "default", "rope_theta": 1e4},
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    torch.manual_seed(0)
    draft = Eagle3Draft(config)
    draft.t2d.fill_(True)
    return draft, Distillation(LossKind.kl, torch.randn(WORDS, WIDTH), LlamaConfig())


def meter(wide, rows: int, answer: int, depth: int, kind: LossKind = LossKind.kl) -> LiveBytes:
    """The loss alone, forward and backward, on ``rows`` rows with one answer."""
    draft, distillation = wide
    distillation = Distillation(kind, distillation.head, distillation.config)
    mask = torch.zeros(rows, dtype=torch.bool)
    mask[10 : 10 + answer] = True
    chains = Chains.of(mask, torch.tensor([0, rows]), depth, Supervise.span)
    batch = TTTBatch(
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(rows),
        aux=torch.zeros(rows, WIDTH),
        last=torch.randn(rows, WIDTH),
        argmax=torch.zeros(rows, dtype=torch.int64),
        lse=torch.zeros(rows),
        samples=1,
        chains=chains,
    )
    steps: list[Tensor] = [
        torch.randn(len(step.rows), WIDTH, requires_grad=True) for step in chains.steps
    ]
    with LiveBytes(sum(chains.counts)) as live:
        guesses = distillation(draft, batch, steps, torch.ones(live.guesses))
        guesses.loss.backward()
    draft.lm_head.weight.grad = None
    return live


def test_memory_grows_with_supervised_rows_alone(wide, monkeypatch: pytest.MonkeyPatch):
    """2,048 x 49,152: neither the row's length, nor depth or rows times vocabulary, is kept."""
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", CHUNK)
    few = meter(wide, rows=256, answer=64, depth=3)
    long = meter(wide, rows=2048, answer=64, depth=3)
    assert long.peak == few.peak
    deep = meter(wide, rows=2048, answer=64, depth=6)
    many = meter(wide, rows=2048, answer=192, depth=3)
    for found in (deep, many):
        more = found.guesses - long.guesses
        # A guess costs its state, its gradient, its loss and some indices. How many of a chunk's
        # guesses share a target decides how large the teacher of that chunk is.
        slack = 2 * 4 * CHUNK
        assert 4 * more * WORDS > 3 * slack  # one tensor of the added guesses would not fit in
        assert found.peak - long.peak <= more * 4 * (4 * WIDTH + 16) + slack
    assert many.largest <= 4 * max(CHUNK, WORDS * WIDTH)
    assert many.peak < 4 * many.guesses * WORDS / 3


def test_a_look_ahead_keeps_no_more(wide, monkeypatch: pytest.MonkeyPatch):
    """mix grades all guesses twice, and a chunk at a time both times."""
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", CHUNK)
    many = meter(wide, rows=256, answer=160, depth=3, kind=LossKind.mix)
    assert many.largest <= 4 * max(CHUNK, WORDS * WIDTH)
    assert many.peak < 4 * many.guesses * WORDS / 3


def test_the_meter_sees_a_loss_without_chunks(wide, monkeypatch: pytest.MonkeyPatch):
    """Negative control: one chunk for all keeps guesses x vocabulary."""
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", 1 << 40)
    many = meter(wide, rows=2048, answer=192, depth=3)
    whole = 4 * many.guesses * WORDS
    assert many.largest >= whole and many.peak > 2 * whole
