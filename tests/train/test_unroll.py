"""The parity that matters: step k of the unroll equals k chained decoding steps, in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from data.chains import Chains, shifted
from models.eagle3 import Eagle3Draft
from models.kernels import CPU_FLASH, PLAIN
from models.memory import DraftCache
from train.ttt import unroll, unroll_own

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
SWITCHES = {"none": {}, **{f: {f: True} for f in FLAGS}, "all": dict.fromkeys(FLAGS, True)}


def chained(draft: Eagle3Draft, ids: Tensor, aux: Tensor, depth: int) -> Tensor:
    """Plain serving after len(aux) rows: one forward on the verifier's states, then one a token.

    ids [R+depth] of the rows and of what is fed later, aux [R, A*D] -> [depth, D], what the head
    reads for each guess.
    """
    rows = len(aux)
    caches = [DraftCache(capacity=rows + depth) for _ in draft.stack]
    fused = draft.fuse(aux[None])
    share = draft.share_of(ids[None, 1 : rows + 1])
    output = draft(share, fused, torch.arange(rows)[None], caches)
    normed = [output.normed[0, -1]]
    for k in range(1, depth):
        share = draft.share_of(ids[None, rows + k : rows + k + 1])
        output = draft(share, output.hidden[:, -1:], torch.tensor([[rows - 1 + k]]), caches)
        normed.append(output.normed[0, -1])
    return torch.stack(normed)


def worst_difference(lab, draft, depth: int, kernel) -> float:
    """Over all rows and steps of a pack of three documents."""
    documents = lab.documents([[0] * length for length in (19, 3, 13)])
    batch = lab.through(documents, depth)
    steps = unroll(draft, batch, kernel)
    assert len(steps) == depth
    worst, begin = 0.0, 0
    for document in documents:
        for row in range(len(document.ids) - 1):
            most = min(depth, len(document.ids) - 1 - row)
            expected = chained(draft, document.ids[: row + 1 + most], document.aux[: row + 1], most)
            for k in range(most):
                place = int(torch.searchsorted(batch.chains.steps[k].rows, begin + row))
                worst = max(worst, float((steps[k][place] - expected[k]).detach().abs().max()))
        begin += len(document.ids)
    return worst


@pytest.mark.parametrize("depth", [1, 4, 5, 7, 10])
@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_unroll_equals_chained_decoding(depth, switches, lab):
    assert worst_difference(lab, lab.draft(**switches), depth, CPU_FLASH) <= 1e-10


@pytest.mark.parametrize(
    ("layers", "depth", "switches"),
    [*((2, depth, name) for depth in (1, 4, 7) for name in ("none", "all")), (3, 4, "none")],
)
def test_parity_holds_with_further_layers(layers, depth, switches, lab):
    draft = lab.draft(layers=layers, **SWITCHES[switches])
    assert worst_difference(lab, draft, depth, CPU_FLASH) <= 1e-10


def test_parity_holds_for_the_plain_kernel_and_without_key_sharing(lab):
    assert worst_difference(lab, lab.draft(), 5, PLAIN) <= 1e-10
    assert worst_difference(lab, lab.draft(num_kv_heads=4), 5, CPU_FLASH) <= 1e-10


@pytest.mark.parametrize(
    "mistake", ["position", "token", "hidden", "keys", "keys of the second layer"]
)
def test_parity_catches_an_off_by_one(mistake: str, lab, monkeypatch: pytest.MonkeyPatch):
    """Negative control: each of the four things a later step is fed."""
    draft = lab.draft(layers=2 if "second" in mistake else 1)
    forward = Eagle3Draft.forward
    calls: list[tuple[Tensor, Tensor]] = []

    def wrong(self, share, hidden, positions, memories, known=False):
        step = len(calls)
        calls.append((share, hidden))
        if mistake == "position" and positions.dim() == 1:
            positions = positions - step
        if mistake == "token" and step and len(calls[step - 1][0]) >= len(share):
            share = calls[step - 1][0][: len(share)]
        if mistake == "hidden" and step:
            hidden = calls[0][1][: len(hidden)]
        if mistake.startswith("keys"):
            memories[0 if mistake == "keys" else 1].earlier = []
        return forward(self, share, hidden, positions, memories, known)

    document = lab.document([0] * 20)
    expected = chained(draft, document.ids[:10], document.aux[:6], 4)
    batch = lab.through([document], 4)

    def apart() -> float:
        steps = torch.stack([normed[5] for normed in unroll(draft, batch, CPU_FLASH)])
        return float((steps - expected).detach().abs().max())

    assert apart() <= 1e-10
    monkeypatch.setattr(Eagle3Draft, "forward", wrong)
    assert apart() > 1e-3


class OverAllHeads(nn.Module):
    """A norm of the right weight whose root mean square is that of all heads together."""

    def __init__(self, right: nn.RMSNorm):
        super().__init__()
        self.right = right

    def forward(self, states: Tensor) -> Tensor:
        means = states.square().mean((-2, -1), keepdim=True)
        return states / (means + self.right.eps).sqrt() * self.right.weight


NORMS = {  # of query and key, given the right ones
    "none": lambda _q, _k: (nn.Identity(), nn.Identity()),
    "each other's": lambda q, k: (k, q),
    "over all heads": lambda q, k: (OverAllHeads(q), OverAllHeads(k)),
}


@pytest.mark.parametrize("wrong", NORMS.values(), ids=NORMS.keys())
def test_other_norms_of_query_and_key_are_seen(wrong, lab):
    """Negative control, in the first step (its keys come from ``remember``) and in a later one."""
    draft = lab.draft(qk_norm=True)
    batch = lab.through(lab.documents([[0] * 20]), 3)
    attention = draft.midlayer.self_attn
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.data.add_(1.0)  # or all keys would get nearly the same share
    right = unroll(draft, batch, CPU_FLASH)
    attention.q_norm, attention.k_norm = wrong(attention.q_norm, attention.k_norm)
    for found, wanted in zip(unroll(draft, batch, CPU_FLASH), right, strict=True):
        assert float((found - wanted).detach().abs().max()) > 1e-2


@pytest.mark.parametrize(("layers", "lengths"), [(1, (20, 14)), (2, (9, 5))])
def test_own_feeding_equals_chained_greedy_drafting(layers, lengths, lab):
    draft, depth = lab.draft(qk_norm=True, layers=layers), 5
    documents = lab.documents([[0] * length for length in lengths])
    proposed = unroll_own(draft, lab.through(documents, 1), CPU_FLASH, depth)
    assert proposed.shape == (depth, sum(lengths))
    begin = 0
    for document in documents:
        for row in range(len(document.ids) - 1):
            ids = document.ids[: row + 2].tolist()
            for k in range(depth):
                normed = chained(draft, torch.tensor([*ids, 0]), document.aux[: row + 1], k + 1)[-1]
                token = int(draft.to_target_ids(draft.logits(normed).argmax()))
                assert token == int(proposed[k, begin + row])
                ids.append(token)
        begin += len(document.ids)


def test_rows_outside_the_chains_propose_nothing(lab):
    """Only the rows from which a decoding loop can ask: mask[t+1] in the same document."""
    masks = [[0, 0, 1, 1, 1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0]]
    documents = lab.documents(masks)
    mask = torch.cat([document.mask for document in documents])
    batch = lab.pack(documents)
    chains = Chains.of_answers(mask, torch.tensor([0, 8, 12, 15]))
    draft = lab.draft()
    some = unroll_own(draft, replace(batch, chains=chains), CPU_FLASH, 3)
    every = unroll_own(draft, lab.through(documents, 1), CPU_FLASH, 3)
    asking = [1, 2, 3, 6, 8]
    assert torch.equal(some[:, asking], every[:, asking])
    others = [t for t in range(15) if t not in asking]
    assert (some[:, others] == -1).all()


def test_shift_moves_left_and_fills_with_zeros():
    values = torch.tensor([1, 2, 3])
    assert shifted(values, 0).tolist() == [1, 2, 3]
    assert shifted(values, 1).tolist() == [2, 3, 0]
    assert shifted(values, 3).tolist() == [0, 0, 0]
    assert shifted(values, 9).tolist() == [0, 0, 0]
