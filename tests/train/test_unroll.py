"""The parity that matters: step k of the unroll equals k chained decoding steps, in fp64."""

import pytest
import torch

from data.records import TTTBatch
from models.attention import DraftCache
from models.eagle3 import DraftConfig, Eagle3Draft
from train.ttt import shifted, unroll, unroll_own

WIDTH, VOCAB, DRAFT_VOCAB, AUX = 24, 40, 16, 3


def make_draft(**flags: bool) -> Eagle3Draft:
    torch.manual_seed(1)
    switches = dict.fromkeys(
        ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False
    )
    config = DraftConfig(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,  # heads * head_dim is not the width, as in Qwen3
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=[1, 2, 3],
        rms_norm_eps=1e-5,
        max_positions=64,
        rope={"rope_type": "default", "rope_theta": 1e4},
        **{**switches, **flags},
    )
    draft = Eagle3Draft(config).double()
    for parameter in draft.parameters():
        parameter.data.normal_(std=0.4)
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    draft.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    return draft


def make_batch(lengths: list[int]) -> TTTBatch:
    torch.manual_seed(2)
    rows = max(lengths)
    inside = torch.arange(rows)[None] < torch.tensor(lengths)[:, None]
    aux = torch.randn(len(lengths), rows, AUX * WIDTH, dtype=torch.float64)
    return TTTBatch(
        input_ids=torch.randint(0, VOCAB, (len(lengths), rows)) * inside,
        loss_mask=inside,
        lengths=torch.tensor(lengths),
        aux=aux * inside[..., None],
        last=torch.zeros(len(lengths), rows, WIDTH, dtype=torch.float64),
        argmax=torch.zeros(len(lengths), rows, dtype=torch.int64),
        lse=torch.zeros(len(lengths), rows, dtype=torch.float64),
    )


def chained(draft: Eagle3Draft, ids: torch.Tensor, aux: torch.Tensor, row: int, depth: int):
    """Plain serving: rows 0..row from verifier states, then one token at a time -> [depth, D]."""
    cache = DraftCache(capacity=row + 1 + depth)
    positions = torch.arange(row + 1)[None]
    fused = draft.fuse(aux[None, : row + 1])
    output = draft(ids[None, 1 : row + 2], fused, positions, cache)
    normed = [output.normed[0, -1]]
    for k in range(1, depth):
        hidden = output.hidden[:, -1:]
        token = ids[None, row + 1 + k : row + 2 + k]
        output = draft(token, hidden, torch.tensor([[row + k]]), cache)
        normed.append(output.normed[0, -1])
    return torch.stack(normed)


@pytest.mark.parametrize("depth", [1, 4, 7, 10])
@pytest.mark.parametrize(
    "flag", [None, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_unroll_equals_chained_decoding(depth: int, flag: str | None):
    draft = make_draft(**({flag: True} if flag else {}))
    batch = make_batch([25, 17])
    steps = torch.stack(unroll(draft, batch, depth))  # [K, B, T, D]
    worst = 0.0
    for b, length in enumerate(batch.lengths.tolist()):
        for row in range(length - depth - 1):
            expected = chained(draft, batch.input_ids[b], batch.aux[b], row, depth)
            worst = max(worst, float((steps[:, b, row] - expected).detach().abs().max()))
    assert worst <= 1e-10


@pytest.mark.parametrize("mistake", ["position", "token", "hidden"])
def test_parity_catches_an_off_by_one(mistake: str, monkeypatch: pytest.MonkeyPatch):
    draft, batch, depth = make_draft(), make_batch([20]), 4
    forward = Eagle3Draft.forward
    calls = []

    def wrong(self, tokens, hidden, positions, memory):
        calls.append(hidden)
        if mistake == "position":
            positions = positions.clamp_max(positions[:, :1] * 0 + 18) * 0 + torch.arange(20)
        if mistake == "token" and len(calls) > 1:
            tokens = shifted(tokens, 1)
        if mistake == "hidden" and len(calls) > 1:
            hidden = calls[0]
        return forward(self, tokens, hidden, positions, memory)

    expected = chained(draft, batch.input_ids[0], batch.aux[0], 5, depth)
    monkeypatch.setattr(Eagle3Draft, "forward", wrong)
    steps = torch.stack(unroll(draft, batch, depth))
    assert float((steps[:, 0, 5] - expected).abs().max()) > 1e-3


def test_own_feeding_equals_chained_greedy_drafting():
    draft, batch, depth = make_draft(), make_batch([20, 14]), 5
    proposed = unroll_own(draft, batch, depth)
    for b, length in enumerate(batch.lengths.tolist()):
        for row in range(length - 1):
            ids = batch.input_ids[b, : row + 2].tolist()
            for k in range(depth):
                text = torch.tensor([*ids, 0])
                normed = chained(draft, text, batch.aux[b], row, k + 1)[-1]
                token = int(draft.to_target_ids(draft.logits(normed).argmax()))
                assert token == int(proposed[k, b, row])
                ids.append(token)


def test_padding_changes_nothing():
    draft = make_draft()
    short, padded = make_batch([12]), make_batch([12, 30])
    alone = torch.stack(unroll(draft, short, 4))[:, 0]
    aux = padded.aux.clone()
    aux[0, :12] = short.aux[0]
    ids = padded.input_ids.clone()
    ids[0, :12] = short.input_ids[0]
    beside = TTTBatch(
        ids, padded.loss_mask, padded.lengths, aux, padded.last, padded.argmax, padded.lse
    )
    together = torch.stack(unroll(draft, beside, 4))[:, 0, :12]
    assert float((alone[:, :8] - together[:, :8]).abs().max()) < 1e-12


def test_shift_moves_left_and_fills_with_zeros():
    values = torch.tensor([[1, 2, 3]])
    assert shifted(values, 1).tolist() == [[2, 3, 0]]
    assert shifted(values, 3).tolist() == [[0, 0, 0]]
    assert shifted(values, 9).tolist() == [[0, 0, 0]]
