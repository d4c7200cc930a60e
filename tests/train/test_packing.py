"""Documents in one pack know nothing of each other: the pack's sums are those of its parts."""

from dataclasses import replace

import pytest
import torch

from conf.schema import LossKind, Supervise
from data.chains import Chains, supervised_rows
from data.records import TTTBatch
from models.kernels import CPU_FLASH, PLAIN
from models.runs import Runs
from train.ttt import unroll, unroll_own

DEPTH = 4
FIRST = [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # ends with an answer
SECOND = [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]  # begins with one
NEITHER = [0] * 9
ORDERS = {"A B": [0, 1], "B A": [1, 0], "A with nothing B": [0, 2, 1], "A A": [0, 0]}


@pytest.fixture
def three(lab):
    return [lab.document(mask, seed) for seed, mask in enumerate((FIRST, SECOND, NEITHER), 10)]


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_a_packs_sums_are_those_of_its_documents(order, rule, kernel, lab, three):
    module = lab.module(lab.draft(fc_norm=True), DEPTH, rule, kernel=kernel)
    documents = [three[i] for i in order]
    weights = [0.5 + place for place in range(len(order))]  # also each document's own weight
    whole = lab.step(module, lab.pack(documents, DEPTH, rule), weights)
    parts = [
        lab.step(module, lab.pack([document], DEPTH, rule), [weight])
        for document, weight in zip(documents, weights, strict=True)
    ]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-12)
    sums = torch.stack([part.output.sums for part in parts]).sum(0)
    torch.testing.assert_close(whole.output.sums, sums, rtol=1e-12, atol=0)
    for field in ("counts", "hits"):
        total = sum(getattr(part.output, field) for part in parts)
        assert torch.equal(getattr(whole.output, field), total)
    added = {n: sum(part.grads[n] for part in parts) for n in whole.grads}
    assert lab.apart(whole.grads, added) <= 1e-12


@pytest.mark.parametrize("rule", list(Supervise))
def test_a_packs_sums_are_those_of_its_documents_with_two_layers(rule, lab, three):
    module = lab.module(lab.draft(layers=2), DEPTH, rule)
    whole = lab.step(module, lab.pack(three, DEPTH, rule))
    parts = [lab.step(module, lab.pack([document], DEPTH, rule)) for document in three]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-12)
    added = {n: sum(part.grads[n] for part in parts) for n in whole.grads}
    assert lab.apart(whole.grads, added) <= 1e-12


@pytest.mark.parametrize("rule", list(Supervise))
def test_another_neighbour_changes_nothing(rule, lab, three):
    """A's data and length change; B's loss, gradients and states, at weight 1 beside 0, do not."""
    module = lab.module(lab.draft(), DEPTH, rule)
    second = three[1]
    for order in ([0, 1], [1, 0]):
        found = []
        for first in (three[0], lab.document(FIRST, 77), lab.document([0, 1, 1, 1, 1], 78)):
            pair = [(first, second)[i] for i in order]
            found.append(lab.step(module, lab.pack(pair, DEPTH, rule), [float(i) for i in order]))
        for other in found[1:]:
            assert other.loss == pytest.approx(found[0].loss, rel=1e-12)
            assert lab.apart(other.grads, found[0].grads) <= 1e-12


@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_states_and_own_proposals_stay_inside(layers, lab, three):
    draft, depth = lab.draft(layers=layers), 6
    alone = [lab.through([document], depth) for document in three]
    together = lab.through(three, depth)
    packed = unroll(draft, together, CPU_FLASH)
    own = unroll_own(draft, together, CPU_FLASH, depth)
    begin, at = 0, [0] * depth
    for document, batch in zip(three, alone, strict=True):
        for k, normed in enumerate(unroll(draft, batch, CPU_FLASH)):
            part = packed[k][at[k] : at[k] + len(normed)]
            assert float((part - normed).detach().abs().max()) <= 1e-12
            at[k] += len(normed)
        end = begin + len(document.ids)
        assert torch.equal(own[:, begin:end], unroll_own(draft, batch, CPU_FLASH, depth))
        assert (own[:, end - 1] == -1).all() and (own[:, begin : end - 1] >= 0).all()
        begin = end
    assert at == [len(normed) for normed in packed]


def as_one_document(batch: TTTBatch, mask: torch.Tensor, rule: Supervise) -> TTTBatch:
    rows = len(mask)
    chains = Chains.of(mask, torch.tensor([0, rows]), DEPTH, rule)
    return replace(batch, positions=torch.arange(rows), samples=1, chains=chains)


def borders_ignored_by(part: str, batch: TTTBatch, mask: torch.Tensor, rule: Supervise) -> TTTBatch:
    one = as_one_document(batch, mask, rule)
    starts = torch.tensor([0, len(FIRST), len(mask)])
    if part == "positions":  # of keys alone: moved together, queries and keys turn alike
        return replace(batch, positions=one.positions)
    if part == "attention":
        whole = torch.tensor([0, len(mask)])
        steps = [replace(s, runs=Runs.of(s.rows, whole)) for s in batch.chains.steps]
        return replace(batch, chains=replace(batch.chains, steps=steps))
    if part == "attention of the first layer at step 0":
        return replace(batch, chains=replace(batch.chains, whole=one.chains.whole))
    if part == "unroll":
        emits = supervised_rows(mask, torch.tensor([0, len(mask)]), DEPTH, rule)
        needed = emits.flip(0).cumsum(0).flip(0) > 0
        return replace(batch, chains=Chains.build(emits, needed, starts))
    return one


@pytest.mark.parametrize("rule", list(Supervise))
@pytest.mark.parametrize(
    "part",
    [
        "positions",
        "attention",
        "attention of the first layer at step 0",
        "unroll",
        "everything",
    ],
)
def test_a_border_that_is_ignored_shows(part, rule, lab, three):
    """Negative control: each way of reaching over the border changes loss and gradients."""
    batch = lab.pack(three[:2], DEPTH, rule)
    mask = torch.cat([document.mask for document in three[:2]])
    wrong = borders_ignored_by(part, batch, mask, rule)
    module = lab.module(lab.draft(layers=2 if "first" in part else 1), DEPTH, rule)
    right, leaking = lab.step(module, batch), lab.step(module, wrong)
    assert abs(leaking.loss - right.loss) > 1e-3
    assert lab.apart(leaking.grads, right.grads) > 1e-3


@pytest.mark.parametrize("beside", [41, 489])
def test_a_sample_weighs_the_same_however_much_lies_beside_it(beside, lab):
    """23 rows alone, and filled up to 64 and to 512 rows."""
    document = lab.document([0, 0, 0, *[1] * 20])
    module = lab.module(lab.draft(), DEPTH)
    alone = lab.step(module, lab.pack([document], DEPTH), [1 / 19])
    filled = lab.step(
        module, lab.pack([document, lab.document([0] * beside)], DEPTH), [1 / 19, 1 / 19]
    )
    assert filled.loss == pytest.approx(alone.loss, rel=1e-14)
    assert lab.apart(filled.grads, alone.grads) <= 1e-14
    tail = lab.document([0, 0, 0, *[1] * 20, *[0] * beside])
    rows = slice(0, 23)
    same = replace(
        tail,
        **{
            name: torch.cat([getattr(document, name), getattr(tail, name)[23:]])
            for name in ("ids", "aux", "last", "logits")
        },
    )
    assert torch.equal(same.mask[rows], document.mask)
    longer = lab.step(module, lab.pack([same], DEPTH), [1 / 19])
    assert longer.loss == pytest.approx(alone.loss, rel=1e-14)
    assert lab.apart(longer.grads, alone.grads) <= 1e-14


def test_borders_that_do_not_add_up_to_the_rows_are_refused():
    mask = torch.ones(10, dtype=torch.bool)
    for starts in ([0, 4, 9], [0, 4, 11]):
        for rule in Supervise:
            with pytest.raises(RuntimeError):
                Chains.of(mask, torch.tensor(starts), DEPTH, rule)


@pytest.mark.parametrize("kind", [k for k in LossKind if k is not LossKind.mix])  # its own mean
def test_every_loss_adds_up(kind, lab, three):
    module = lab.module(lab.draft(), DEPTH, kind=kind)
    whole = lab.step(module, lab.pack(three, DEPTH)).loss
    parts = [lab.step(module, lab.pack([document], DEPTH)).loss for document in three]
    assert whole == pytest.approx(sum(parts), rel=1e-12)
