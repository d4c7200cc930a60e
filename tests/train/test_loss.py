"""The loss against a plain twin written from the definitions, and its gradients."""

import pytest
import torch
from transformers import LlamaConfig

from conf.schema import LossKind, Supervise, TTTSection
from data.records import TTTBatch
from models.eagle3 import DraftConfig, Eagle3Draft
from train.loss import Distillation
from train.ttt import TrainingTimeTest, first_needed, supervised_rows, unroll

WIDTH, VOCAB, DRAFT_VOCAB, DEPTH = 16, 30, 12, 4


def make_module(kind: LossKind, seed: int = 0) -> tuple[TrainingTimeTest, torch.Tensor]:
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=[1, 2, 3],
        rms_norm_eps=1e-5,
        max_positions=64,
        rope={"rope_type": "default", "rope_theta": 1e4},
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=True,
        norm_output=False,
    )
    draft = Eagle3Draft(config).double()
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.5)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    draft.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    draft.t2d[ids] = True
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    distillation = Distillation(kind, head[ids], LlamaConfig())
    ttt = TTTSection(depth=DEPTH, decay=0.8, supervise=Supervise.span)
    return TrainingTimeTest(draft, distillation, ttt), head


def make_batch(head: torch.Tensor, masks: list[list[int]]) -> TTTBatch:
    torch.manual_seed(3)
    loss_mask = torch.tensor(masks, dtype=torch.bool)
    batch, rows = loss_mask.shape
    last = torch.randn(batch, rows, WIDTH, dtype=torch.float64)
    logits = last @ head.T
    return TTTBatch(
        input_ids=torch.randint(0, VOCAB, (batch, rows)),
        loss_mask=loss_mask,
        lengths=torch.full((batch,), rows),
        aux=torch.randn(batch, rows, 3 * WIDTH, dtype=torch.float64),
        last=last,
        argmax=logits.argmax(-1),
        lse=logits.logsumexp(-1),
    )


def twin(module: TrainingTimeTest, head: torch.Tensor, batch: TTTBatch) -> torch.Tensor:
    """Row by row, from the definitions: sum over k of 0.8**k * S_k, divided by N."""
    draft, kind = module.draft, module.distillation.kind
    steps = unroll(draft, batch, DEPTH)
    rows = supervised_rows(batch.loss_mask, DEPTH, module.ttt.supervise)
    total, count = torch.zeros((), dtype=torch.float64), int(rows[0].sum())
    ids = draft.d2t + torch.arange(DRAFT_VOCAB)
    for k in range(DEPTH):
        for b, t in rows[k].nonzero().tolist():
            draft_probs = (draft.lm_head.weight @ steps[k][b, t]).softmax(-1)
            target_full = (head @ batch.last[b, t + 1 + k]).softmax(-1)
            target = target_full[ids] / target_full[ids].sum()
            overlap = torch.minimum(target_full[ids], draft_probs).sum()
            if kind is LossKind.kl:
                value = (target * (target / draft_probs).log()).sum()
            elif kind is LossKind.ce:
                place = (ids == target_full.argmax()).nonzero().flatten()
                value = -draft_probs[place].log().sum()
            elif kind is LossKind.tv:
                value = 1 - overlap
            else:
                value = -overlap.log()
            total = total + 0.8**k * value
    return total / count


MASKS = [[0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("kind", list(LossKind))
def test_loss_and_gradients_equal_the_plain_twin(kind: LossKind):
    module, head = make_module(kind)
    batch = make_batch(head, MASKS)
    count = supervised_rows(batch.loss_mask, 1, Supervise.span).sum()
    weights = torch.ones(2, dtype=torch.float64) / count
    expected = twin(module, head, batch)
    parameters = [p for p in module.parameters() if p.requires_grad]
    expected_grads = torch.autograd.grad(expected, parameters)
    output = module(batch, weights)
    grads = torch.autograd.grad(output.loss, parameters)
    assert float((output.loss - expected).detach().abs()) <= 1e-12 * max(
        1.0, float(expected.detach().abs())
    )
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-11 * max(1.0, float(theirs.abs().max()))


def test_a_moved_mask_is_caught():
    """Negative control: supervising rows one too late changes the loss."""
    module, head = make_module(LossKind.kl)
    batch = make_batch(head, MASKS)
    late = TTTBatch(
        batch.input_ids, batch.loss_mask.roll(1, 1), batch.lengths, batch.aux, batch.last,
        batch.argmax, batch.lse,
    )  # fmt: skip
    weights = torch.full((2,), 0.1, dtype=torch.float64)
    difference = module(batch, weights).loss - module(late, weights).loss
    assert abs(float(difference.detach())) > 1e-3


def test_nothing_supervised_gives_zero_loss_and_zero_gradients():
    module, head = make_module(LossKind.kl)
    batch = make_batch(head, [[0] * 10])
    output = module(batch, torch.ones(1, dtype=torch.float64))
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().max()) == 0.0


def test_out_of_vocabulary_argmax_is_a_miss():
    module, head = make_module(LossKind.ce)
    batch = make_batch(head, MASKS)
    outside = int((~module.draft.t2d).nonzero()[0])
    all_out = TTTBatch(
        batch.input_ids, batch.loss_mask, batch.lengths, batch.aux, batch.last,
        torch.full_like(batch.argmax, outside), batch.lse,
    )  # fmt: skip
    output = module(all_out, torch.ones(2, dtype=torch.float64))
    assert output.hits.sum() == 0
    assert output.counts[0] == 14
    assert float(output.loss.detach()) == 0.0


def test_sample_padded_to_64_and_to_512_has_the_same_gradient():
    module, head = make_module(LossKind.kl)
    grads = []
    for rows in (64, 512):
        mask = [0, 0, 0, *[1] * 20, *[0] * (rows - 23)]
        batch = make_batch(head, [mask])
        short = make_batch(head, [mask[:64]])
        padded = {}
        for name in ("input_ids", "aux", "last", "argmax", "lse"):
            value = torch.zeros_like(getattr(batch, name))
            value[:, :64] = getattr(short, name)
            padded[name] = value
        batch = TTTBatch(loss_mask=batch.loss_mask, lengths=torch.tensor([23]), **padded)
        module.zero_grad()
        module(batch, torch.tensor([1 / 19], dtype=torch.float64)).loss.backward()
        grads.append(module.draft.fc.weight.grad.clone())
    assert float((grads[0] - grads[1]).abs().max()) <= 1e-14


@pytest.mark.parametrize("rule", list(Supervise))
def test_rows_before_the_first_needed_one_only_give_keys(rule: Supervise):
    module, head = make_module(LossKind.kl)
    module.ttt.supervise = rule
    masks = [[0] * 6 + [1, 1, 1, 1, 0, 1, 1], [0] * 8 + [1, 1, 1, 1, 1]]
    batch = make_batch(head, masks)
    rows = supervised_rows(batch.loss_mask, DEPTH, rule)
    first = first_needed(rows)
    assert first == (5 if rule is Supervise.span else 2)
    weights = torch.full((2,), 0.1, dtype=torch.float64)
    parameters = [p for p in module.parameters() if p.requires_grad]
    trimmed = module(batch, weights)
    grads = torch.autograd.grad(trimmed.loss, parameters)
    steps = unroll(module.draft, batch, DEPTH)
    parts = module.distillation(module.draft, batch, steps, rows)
    whole = sum(0.8**k * 0.1 * part.losses.sum() for k, part in enumerate(parts))
    expected = torch.autograd.grad(whole, parameters)
    assert float((trimmed.loss - whole).detach().abs()) <= 1e-12 * float(whole.detach())
    for ours, theirs in zip(grads, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-12 * max(1.0, float(theirs.abs().max()))


def test_trimming_one_row_too_many_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Negative control: dropping a row that is needed changes the loss."""
    module, head = make_module(LossKind.kl)
    batch = make_batch(head, [[0] * 6 + [1] * 7])
    weights = torch.ones(1, dtype=torch.float64)
    right = module(batch, weights).loss.detach()
    monkeypatch.setattr("train.ttt.first_needed", lambda rows: first_needed(rows) + 1)
    assert float((module(batch, weights).loss.detach() - right).abs()) > 1e-3
