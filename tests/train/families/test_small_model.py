"""The small model's training step against single documents, all by autograd and the definitions."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conf.schema import LossKind, Supervise
from models.small_model import ModelConfig, SmallModel
from train.families.small_model import SmallModelTest
from train.loss import Distillation

VOCAB = 40  # the verifier's, as in the documents
FIRST = [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # ends with an answer
SECOND = [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]  # begins with one
NEITHER = [0] * 5


def small(rows: int = VOCAB, tied: bool = True, **more) -> SmallModel:
    layout = LlamaConfig(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=None,
        **more,
    )
    torch.manual_seed(4)
    return SmallModel.new(ModelConfig(layout.to_dict(), VOCAB, 256)).double()


def naive(draft: SmallModel, documents, kind: LossKind, rows_of, shift: int = 1) -> Tensor:
    """Each document on its own through the library's model; row t reads x[t+shift]."""
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        logits = draft.lm(document.ids[None]).logits[0]
        for t in rows_of(document.mask):
            probs = logits[t + shift, : draft.size].softmax(-1)
            full = document.logits[t + 1].softmax(-1)
            target = full[: draft.size] / full[: draft.size].sum()
            if kind is LossKind.kl:
                total = total + (target * (target / probs).log()).sum()
            elif int(full.argmax()) < draft.size:
                total = total - probs[full.argmax()].log()
    return total


def spans(mask: Tensor) -> list[int]:
    """House rows of step 0: x[t+1] and x[t+2] lie in one answer, and x[t] in the document."""
    on = mask.tolist()
    return [t for t in range(len(on) - 2) if on[t + 1] and on[t + 2]]


def graded(draft: SmallModel, loss: Tensor) -> dict[str, Tensor]:
    named = dict(draft.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def step(draft: SmallModel, lab, documents, kind: LossKind = LossKind.kl):
    teacher = Distillation(kind, lab.head[: draft.size], LlamaConfig())
    batch = lab.pack(documents, 1, Supervise.span)
    return SmallModelTest(draft, teacher)(batch, torch.ones(batch.samples, dtype=torch.float64))


@pytest.fixture
def documents(lab):
    return [lab.document(mask, seed) for seed, mask in enumerate((FIRST, NEITHER, SECOND), 10)]


@pytest.mark.parametrize("kind", [LossKind.kl, LossKind.ce])
@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 8, VOCAB - 6], ids=["equal", "padded", "fewer"])
def test_loss_and_gradients_are_those_of_single_documents(lab, documents, rows, kind):
    draft = small(rows, tied=rows == VOCAB)
    output = step(draft, lab, documents, kind)
    if rows < VOCAB:  # what the verifier may name beyond the rows reads the last one
        documents = [replace(d, ids=d.ids.clamp_max(rows - 1)) for d in documents]
    wanted = naive(draft, documents, kind, spans)
    assert float(output.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9)
    assert int(output.counts) == sum(len(spans(d.mask)) for d in documents) > 10
    assert lab.apart(graded(draft, output.loss), graded(draft, wanted)) <= 1e-8


@pytest.mark.parametrize("shift", [0, 2])
def test_one_row_off_is_another_loss(lab, documents, shift):
    """The control of the test above: the token before or after gives another loss."""
    draft = small()
    wanted = float(naive(draft, documents, LossKind.kl, spans, shift).detach())
    assert abs(float(step(draft, lab, documents).loss.detach()) / wanted - 1) > 1e-3


def test_a_window_counts_positions_and_not_rows(lab, documents):
    """Mistral's window, shorter than a document, which does not begin at row 0 of the pack."""
    kinds = {"model_type": "mistral", "sliding_window": 4, "architectures": None}
    config = ModelConfig({**small().config.layout, **kinds}, VOCAB, 256)
    torch.manual_seed(4)
    draft = SmallModel.new(config).double()
    wanted = naive(draft, documents, LossKind.kl, spans)
    assert type(draft.lm).__name__ == "MistralForCausalLM"
    found = step(draft, lab, documents).loss.detach()
    assert float(found) == pytest.approx(float(wanted.detach()), rel=1e-9)
    whole = ModelConfig({**config.layout, "sliding_window": None}, VOCAB, 256)
    torch.manual_seed(4)
    other = SmallModel.new(whole).double()
    assert abs(float(step(other, lab, documents).loss.detach()) / float(found) - 1) > 1e-3


def test_nothing_supervised_is_no_loss(lab):
    output = step(small(), lab, [lab.document([0], 3)])
    assert float(output.loss.detach()) == 0 == int(output.counts)
    output.loss.backward()


def test_a_cast_leaves_the_rotary_table(lab):
    draft = small()
    before = draft.lm.get_decoder().rotary_emb.inv_freq.clone()
    draft.bfloat16()
    after = draft.lm.get_decoder().rotary_emb.inv_freq
    assert after.dtype == torch.float32 and torch.equal(before, after)
    assert next(draft.parameters()).dtype == torch.bfloat16
