"""Medusa's training step against its plain twin: one document, one row at a time, by autograd."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conf.schema import HeadInit, LossKind, TTTSection
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from models.medusa import MedusaConfig, MedusaDraft
from models.verifier import VerifierEnds
from models.vocab import DraftVocab
from train import loss as loss_module
from train.families.medusa import MedusaTraining
from train.loss import Distillation

HEADS, LAYERS, DRAFT_VOCAB = 3, 2, 16
MASKS = [
    [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1],  # ends with an answer
    [1, 1, 1, 1, 1, 0, 0, 1, 1],  # begins with one; the last is too short for any label
    [0, 0, 0, 0],
]


def make_draft(head: Tensor, shared: bool = False) -> MedusaDraft:
    torch.manual_seed(3)
    total, width = head.shape
    draft = MedusaDraft(MedusaConfig(width, total, DRAFT_VOCAB, HEADS, LAYERS, shared)).double()
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.4)
    ids = torch.randperm(total)[:DRAFT_VOCAB].sort().values
    vocab = DraftVocab.of_ids(ids, total)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft


def module_of(lab, draft: MedusaDraft, kind: LossKind) -> MedusaTraining:
    ids = draft.d2t + torch.arange(DRAFT_VOCAB)
    teacher = Distillation(kind, lab.head[ids], LlamaConfig())
    return MedusaTraining(draft, teacher, TTTSection(depth=HEADS, decay=0.8))


def plain_logits(draft: MedusaDraft, last: Tensor, k: int) -> Tensor:
    """One row of one head, from the words of the paper."""
    state = dict(draft.named_parameters())
    x = last
    for j in range(LAYERS):
        name = f"blocks.{k}.layers.{j}"
        inner = state[f"{name}.weight"] @ x + state[f"{name}.bias"]
        x = x + inner * torch.sigmoid(inner)
    rows = state.get("lm_head.weight")
    return (state[f"lm_heads.{k}.weight"] if rows is None else rows) @ x


def spans_of(mask: Tensor) -> list[tuple[int, int]]:
    edges = [0, *mask.long().tolist(), 0]
    begins = [i for i in range(len(mask)) if edges[i + 1] and not edges[i]]
    ends = [i for i in range(1, len(mask) + 1) if edges[i] and not edges[i + 1]]
    return list(zip(begins, ends, strict=True))


def plain_value(kind: LossKind, draft: Tensor, full: Tensor, ids: Tensor) -> Tensor:
    target = full[ids] / full[ids].sum()
    overlap = torch.minimum(full[ids], draft).sum()
    if kind is LossKind.kl:
        return (target * (target / draft).log()).sum()
    if kind is LossKind.ce:
        return -draft[(ids == full.argmax()).nonzero().flatten()].log().sum()
    return 1 - overlap if kind is LossKind.tv else -overlap.log()


def plain_sums(draft, document, kind, reads: int = 0, predicts: int = 0) -> list[Tensor]:
    """By head, over supervised rows. ``reads``, ``predicts``: rows too far, for controls."""
    ids = draft.d2t + torch.arange(DRAFT_VOCAB)
    sums = []
    for k in range(HEADS):
        value = torch.zeros((), dtype=torch.float64)
        for first, end in spans_of(document.mask):
            for t in range(max(first - 1, 0), end - 2 - k):  # x[t+1] and x[t+2+k] lie inside
                chances = plain_logits(draft, document.last[t + reads], k).softmax(-1)
                # x[t+2+k] is drawn from what the verifier says at row t+1+k
                at = min(t + 1 + k + predicts, len(document.ids) - 1)
                value = value + plain_value(kind, chances, document.logits[at].softmax(-1), ids)
        sums.append(value)
    return sums


def weighted(sums: list[Tensor]) -> Tensor:
    return sum((0.8**k * value for k, value in enumerate(sums)), torch.zeros(()))


@pytest.mark.parametrize("shared", [False, True], ids=["own rows", "the verifier's"])
@pytest.mark.parametrize("kind", [LossKind.ce, LossKind.kl, LossKind.tv, LossKind.lk])
def test_loss_and_gradients_are_the_plain_ones(lab, kind: LossKind, shared: bool):
    draft, documents = make_draft(lab.head, shared), lab.documents(MASKS)
    stepped = lab.step(module_of(lab, draft, kind), lab.pack(documents, HEADS), [1.0, 0.5, 2.0])
    by_document = [plain_sums(draft, document, kind) for document in documents]
    pairs = zip([1.0, 0.5, 2.0], by_document, strict=True)
    wanted = sum((weight * weighted(sums) for weight, sums in pairs), torch.zeros(()))
    trained = {f"draft.{n}": p for n, p in draft.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(wanted, list(trained.values()))
    assert stepped.loss == pytest.approx(wanted.item(), rel=1e-10)
    assert ("draft.lm_head.weight" in trained) is False
    assert lab.apart(stepped.grads, dict(zip(trained, grads, strict=True))) <= 1e-9
    for k in range(HEADS):
        total = sum(sums[k].item() for sums in by_document)
        assert stepped.output.sums[k].item() == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("wrong", [{"reads": 1}, {"predicts": 1}, {"predicts": -1}], ids=str)
def test_one_row_off_is_another_loss(lab, wrong: dict[str, int]):
    draft, document = make_draft(lab.head), lab.document(MASKS[0])
    found = lab.step(module_of(lab, draft, LossKind.kl), lab.pack([document], HEADS)).loss
    assert found == pytest.approx(weighted(plain_sums(draft, document, LossKind.kl)).item())
    off = weighted(plain_sums(draft, document, LossKind.kl, **wrong)).item()
    assert abs(off - found) > 0.01 * found


def test_hits_and_counts_by_head(lab):
    draft, documents = make_draft(lab.head), lab.documents(MASKS)
    output = lab.step(module_of(lab, draft, LossKind.ce), lab.pack(documents, HEADS)).output
    ids = draft.d2t + torch.arange(DRAFT_VOCAB)
    for k in range(HEADS):
        rows = [
            (document, t)
            for document in documents
            for first, end in spans_of(document.mask)
            for t in range(max(first - 1, 0), end - 2 - k)
        ]
        hits = sum(
            int(ids[plain_logits(draft, one.last[t], k).argmax()] == one.logits[t + 1 + k].argmax())
            for one, t in rows
        )
        assert (int(output.counts[k]), int(output.hits[k])) == (len(rows), hits)
    assert int(output.counts[0]) > int(output.counts[2]) > 0


def test_a_packs_sums_are_those_of_its_documents(lab):
    module, documents = module_of(lab, make_draft(lab.head), LossKind.kl), lab.documents(MASKS)
    weights = [0.5, 1.5, 2.5]
    whole = lab.step(module, lab.pack(documents, HEADS), weights)
    parts = [
        lab.step(module, lab.pack([one], HEADS), [weight])
        for one, weight in zip(documents, weights, strict=True)
    ]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-12)
    added = {name: sum(part.grads[name] for part in parts) for name in whole.grads}
    assert lab.apart(whole.grads, added) <= 1e-12


def test_states_of_asking_rows_alone_are_enough(lab):
    """The cache keeps ``last`` where the next token is supervised, and nowhere else."""
    module, documents = module_of(lab, make_draft(lab.head), LossKind.kl), lab.documents(MASKS[:2])
    whole = lab.pack(documents, HEADS)
    cached = []
    for one in documents:
        asks = torch.cat([one.mask[1:], torch.zeros(1, dtype=torch.bool)])
        sample = TokenizedSample("", one.ids, one.mask, greedy=True, held_out=False)
        logits = one.logits[asks]
        cached.append(
            CachedSample(
                sample=sample,
                aux=one.aux,
                last=one.last[asks],
                argmax=logits.argmax(-1),
                lse=logits.logsumexp(-1),
            )
        )
    pack = CachedPack.of(cached)
    mask = torch.cat([one.mask for one in documents])
    kept = batch_of(pack, Chains.of(mask, pack.starts, HEADS, TTTSection().supervise))
    assert len(kept.last) < len(whole.last)
    ours, theirs = lab.step(module, kept), lab.step(module, whole)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-13)
    assert lab.apart(ours.grads, theirs.grads) <= 1e-13


def test_nothing_supervised_is_no_loss_and_touches_every_weight(lab):
    module = module_of(lab, make_draft(lab.head), LossKind.ce)
    stepped = lab.step(module, lab.pack([lab.document([0, 0, 0])], HEADS))
    assert stepped.loss == 0
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert stepped.grads.keys() == trained
    assert all(not bool(grad.any()) for grad in stepped.grads.values())


def test_no_more_logits_than_a_chunk_are_kept(lab, monkeypatch: pytest.MonkeyPatch):
    module, pack = module_of(lab, make_draft(lab.head), LossKind.kl), lab.documents(MASKS)
    whole = lab.step(module, lab.pack(pack, HEADS))
    shapes: list[tuple[int, ...]] = []
    room = loss_module.Room.of

    def spied(*args):
        made = room(*args)
        shapes.append(tuple(made.logits.shape))
        return made

    monkeypatch.setattr(loss_module.Room, "of", spied)
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", 2 * DRAFT_VOCAB)
    small = lab.step(module, lab.pack(pack, HEADS))
    assert shapes == [(2, DRAFT_VOCAB)] * HEADS
    assert small.loss == pytest.approx(whole.loss, rel=1e-12)
    assert lab.apart(small.grads, whole.grads) <= 1e-12


@pytest.mark.parametrize("init", list(HeadInit))
def test_a_new_head_begins_as_the_verifiers_own(lab, init: HeadInit):
    """The blocks change nothing yet, so every head repeats what the verifier says at its row."""
    total, width = lab.head.shape
    config = MedusaConfig(width, total, DRAFT_VOCAB, HEADS, LAYERS, init is HeadInit.frozen)
    draft = MedusaDraft(config).double()
    vocab = DraftVocab.of_ids(torch.arange(0, 2 * DRAFT_VOCAB, 2), total)
    ends = VerifierEnds(torch.zeros_like(lab.head), lab.head, LlamaConfig())
    draft.initialise(ends, vocab, init)
    last = torch.randn(5, width, dtype=torch.float64)
    same = torch.equal(draft.logits(last, 1), (last @ lab.head.T)[:, vocab.target_ids])
    close = torch.allclose(draft.logits(last, 1), (last @ lab.head.T)[:, vocab.target_ids])
    assert (same or close) is (init is not HeadInit.random)
    frozen = [name for name, value in draft.named_parameters() if not value.requires_grad]
    assert frozen == (["lm_head.weight"] if init is HeadInit.frozen else [])
    assert torch.equal(draft.to_draft_ids(draft.to_target_ids(torch.arange(4))), torch.arange(4))
    assert MedusaConfig.from_json(replace(config).to_json()) == config
