"""The whole training step against its plain twin: trimmed, packed and fused, yet the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conf.schema import LossKind, Supervise
from data.chains import Chains, supervised_rows
from data.records import TTTBatch
from models.eagle3 import Eagle3Draft
from models.kernels import CPU_FLASH, PLAIN

DEPTH = 5
MASKS = {
    "two answers": [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]],
    "short answers": [[0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]],
    "from the first token to the last": [[1] * 9],
    "packed": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0] * 4, [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
}


def random_masks(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 24, (4,), generator=generator).tolist()
    return [(torch.rand(length, generator=generator) < 0.6).int().tolist() for length in lengths]


ALL_MASKS = {**MASKS, **{f"random {seed}": random_masks(seed) for seed in range(3)}}


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("masks", ALL_MASKS.values(), ids=ALL_MASKS.keys())
def test_loss_and_gradients_equal_the_plain_twin(masks, rule, kernel, lab):
    draft, documents = lab.draft(fc_norm=True), lab.documents(masks)
    module = lab.module(draft, DEPTH, rule, kernel=kernel)
    found = lab.step(module, lab.pack(documents, DEPTH, rule))
    twin = sum(lab.plain_sum(draft, d, DEPTH, rule, LossKind.kl) for d in documents)
    assert found.loss == pytest.approx(twin.item(), rel=1e-12)
    assert lab.apart(found.grads, lab.gradients(twin, module)) <= 1e-12


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("layers", [2, 3])
def test_loss_and_gradients_with_further_layers_equal_the_plain_twin(layers, rule, kernel, lab):
    """Step 0 of all layers but the last runs every row, and the twin runs all of them always."""
    draft = lab.draft(layers=layers, norm_before_residual=True, qk_norm=True)
    documents = lab.documents(MASKS["packed"])
    module = lab.module(draft, DEPTH, rule, kernel=kernel)
    found = lab.step(module, lab.pack(documents, DEPTH, rule))
    twin = sum(lab.plain_sum(draft, d, DEPTH, rule, LossKind.kl) for d in documents)
    assert found.loss == pytest.approx(twin.item(), rel=1e-12)
    assert lab.apart(found.grads, lab.gradients(twin, module)) <= 1e-12


@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_equals_its_definition(kind, lab):
    draft, documents = lab.draft(qk_norm=True), lab.documents(MASKS["packed"])
    module = lab.module(draft, DEPTH, kind=kind)
    found = lab.step(module, lab.pack(documents, DEPTH))
    twin = lab.recipe(DEPTH, kind=kind).total(draft, documents)
    assert found.loss == pytest.approx(twin.item(), rel=1e-12)
    assert lab.apart(found.grads, lab.gradients(twin, module)) <= 1e-12


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rule", list(Supervise))
def test_recomputing_steps_changes_nothing(rule, layers, lab):
    module, batch = (
        lab.module(lab.draft(qk_norm=True, layers=layers), DEPTH, rule),
        lab.pack(lab.documents(MASKS["packed"]), DEPTH, rule),
    )
    kept = lab.step(module, batch)
    module.recompute = True
    again = lab.step(module, batch)
    assert again.loss == kept.loss
    assert lab.apart(again.grads, kept.grads) <= 1e-14


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_training_precisions_stay_near_the_twin(dtype, bound, qk_norm, lab):
    """Seven steps over long answers: one step's rounding is fed to the next."""
    draft = lab.draft(fc_norm=True, qk_norm=qk_norm)
    documents = lab.documents([[0] * 6 + [1] * 60, [1] * 50])
    for parameter in draft.parameters():
        parameter.data.mul_(0.4)
    if qk_norm:  # around 1, as trained ones: with small ones their gradients nearly cancel out
        for norm in (draft.midlayer.self_attn.q_norm, draft.midlayer.self_attn.k_norm):
            norm.weight.data.add_(1.0)
    module, exact = lab.module(draft, 7), lab.pack(documents, 7)
    right = lab.step(module, exact)
    rounded = lab.module(draft.to(dtype), 7)
    states = {name: getattr(exact, name).to(dtype) for name in ("aux", "last")}
    batch = replace(exact, lse=exact.lse.float(), **states)
    output = rounded(batch, torch.ones(2))
    assert output.loss.item() == pytest.approx(right.loss, rel=bound)
    for name, grad in lab.gradients(output.loss, rounded).items():
        assert grad.dtype is dtype
        difference = (grad.double() - right.grads[name]).norm() / right.grads[name].norm()
        assert float(difference) <= 2 * bound, name


# ---- trimming: what may be left out, and what may not ------------------------------------------


@pytest.fixture
def trimming(lab):
    """(batch, emits, needed, starts) of the packed masks by rule."""

    def make(rule: Supervise) -> tuple[TTTBatch, Tensor, Tensor, Tensor]:
        documents = lab.documents(MASKS["packed"])
        starts = torch.tensor([0, *(len(d.ids) for d in documents)]).cumsum(0)
        mask = torch.cat([d.mask for d in documents])
        emits = supervised_rows(mask, starts, DEPTH, rule)
        needed = emits.flip(0).cumsum(0).flip(0) > 0
        return lab.pack(documents, DEPTH, rule), emits, needed, starts

    return make


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rule", list(Supervise))
def test_rows_and_steps_left_out_change_nothing(rule, layers, lab, trimming):
    """Against the same step with every row of every document unrolled to the text's end."""
    trimmed, emits, needed, starts = trimming(rule)
    everywhere = lab.through(lab.documents(MASKS["packed"]), DEPTH).chains
    all_rows = torch.zeros_like(needed)
    for k, step in enumerate(everywhere.steps):
        all_rows[k, step.rows] = True
    assert int(all_rows.sum()) > 1.5 * int(needed.sum())  # else the test shows nothing
    whole = replace(trimmed, chains=Chains.build(emits, all_rows, starts))
    module = lab.module(lab.draft(fc_norm=True, layers=layers), DEPTH, rule)
    one, other = lab.step(module, trimmed), lab.step(module, whole)
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert lab.apart(one.grads, other.grads) <= 1e-12
    assert torch.equal(one.output.counts, other.output.counts)
    assert torch.equal(one.output.hits, other.output.hits)


@pytest.mark.parametrize(
    ("rule", "mistake"),
    [
        (Supervise.any, "rows whose own label at step 0 is supervised"),
        (Supervise.span, "rows inside the answer"),
        (Supervise.any, "rows one later"),
        (Supervise.span, "rows one later"),
    ],
)
def test_other_rows_are_another_loss(rule, mistake, lab, trimming):
    """Negative control: the wrong choice of rows shows in the loss and in the gradients."""
    batch, emits, needed, starts = trimming(rule)
    mask = torch.cat([d.mask for d in lab.documents(MASKS["packed"])])
    if mistake == "rows one later":
        label = torch.cat([torch.zeros(1, dtype=torch.bool), mask[:-1]])
        emits = supervised_rows(label, starts, DEPTH, rule)
        needed = emits.flip(0).cumsum(0).flip(0) > 0
    else:
        kept = emits[0] if rule is Supervise.any else mask
        emits, needed = emits & kept, needed & kept
    wrong = replace(batch, chains=Chains.build(emits, needed, starts))
    module = lab.module(lab.draft(fc_norm=True), DEPTH, rule)
    one, other = lab.step(module, batch), lab.step(module, wrong)
    assert abs(one.loss - other.loss) > 1e-3 * abs(one.loss)
    assert lab.apart(other.grads, one.grads) > 1e-3


@pytest.mark.parametrize("rule", list(Supervise))
def test_the_first_of_two_layers_cannot_be_trimmed(rule, lab, monkeypatch: pytest.MonkeyPatch):
    """Negative control: rows that ask nothing skip it at step 0, as they do the last layer."""
    batch = lab.pack(lab.documents([[0] * 12 + [1] * 6]), DEPTH, rule)
    module = lab.module(lab.draft(layers=2), DEPTH, rule)
    right = lab.step(module, batch)
    remember, rows = Eagle3Draft.remember, batch.chains.steps[0].rows

    def trimmed(self, share, hidden, positions, memories):
        through = remember(self, share, hidden, positions, memories)
        skipped = hidden.index_copy(0, rows, through[rows])
        self.stack[-1].remember(None, skipped, positions, memories[-1])
        return through

    monkeypatch.setattr(Eagle3Draft, "remember", trimmed)
    wrong = lab.step(module, batch)
    assert abs(wrong.loss - right.loss) > 1e-3 * abs(right.loss)
    assert lab.apart(wrong.grads, right.grads) > 1e-3


@pytest.mark.parametrize("rule", list(Supervise))
def test_no_row_more_can_be_left_out(rule, lab, trimming):
    """Negative control: each of the rows that run is needed."""
    batch, emits, needed, starts = trimming(rule)
    module = lab.module(lab.draft(fc_norm=True), DEPTH, rule)
    whole = lab.step(module, batch)
    for row in needed[0].nonzero().flatten().tolist():
        kept = torch.arange(needed.shape[1]) != row
        fewer = replace(batch, chains=Chains.build(emits & kept, needed & kept, starts))
        found = lab.step(module, fewer)
        assert abs(found.loss - whole.loss) > 1e-3, row
        assert lab.apart(found.grads, whole.grads) > 1e-3, row


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rule", list(Supervise))
def test_rows_that_never_ask_still_give_keys(rule, layers, lab):
    """The prompt is seen though none of its rows runs; what comes after the last answer is not."""
    mask = [0] * 12 + [1, 1, 1, 1, 1, 1] + [0] * 6
    draft, document = lab.draft(layers=layers), lab.document(mask)
    module = lab.module(draft, 2, rule)
    right = lab.step(module, lab.pack([document], 2, rule))

    def with_other(row: int) -> float:
        aux = document.aux.clone()
        aux[row] += 1.0
        other = replace(document, aux=aux)
        return lab.step(module, lab.pack([other], 2, rule)).loss

    assert abs(with_other(0) - right.loss) > 1e-6
    assert with_other(20) == right.loss


# ---- nothing supervised -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("kind", list(LossKind))
@pytest.mark.parametrize("masks", [[[0] * 10], [[0]], [[0] * 4, [0, 1, 0], [0] * 7]], ids=str)
def test_nothing_supervised_gives_zero_loss_and_zero_gradients(masks, kind, rule, lab):
    """Every trainable parameter takes part, so that all ranks reduce the same gradients."""
    draft = lab.draft(fc_norm=True, norm_before_fc=True, qk_norm=True, layers=2)
    module = lab.module(draft, DEPTH, rule, kind)
    output = module(lab.pack(lab.documents(masks), DEPTH, rule), torch.ones(len(masks)).double())
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert output.counts.tolist() == output.sums.tolist() == output.hits.tolist() == [0] * DEPTH
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert set(dict(module.named_parameters())) - set(trained) == {"draft.embed_tokens.weight"}
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
        assert not parameter.grad.any() and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("rule", list(Supervise))
def test_an_answer_of_three_tokens_has_two_steps_at_most_and_stays_finite(rule, lab):
    """Depth 7; under ``any`` as many steps as its prompt of one token leaves rows for."""
    batch = lab.pack(lab.documents([[0, 1, 1, 1]]), 7, rule)
    assert [len(step.rows) for step in batch.chains.steps[2:]] == [1] * 5  # idle
    assert batch.chains.counts == [2, 1, 0, 0, 0, 0, 0]
    found = lab.step(lab.module(lab.draft(), 7, rule), batch)
    assert found.output.loss.isfinite() and found.loss > 0
    assert all(grad.isfinite().all() for grad in found.grads.values())
    assert found.output.sums[2:].tolist() == [0.0] * 5
