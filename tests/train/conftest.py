"""Small heads, packs and the plain twin of the training step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from conf.schema import Feed, LossKind, StepWeights, Supervise, TTTSection
from data.chains import Chains
from data.records import TTTBatch
from models.attention import Kernel
from models.eagle3 import DraftConfig, Eagle3Draft
from models.kernels import CPU_FLASH
from train.loss import Distillation
from train.ttt import TrainingTimeTest, TTTOutput

WIDTH, VOCAB, DRAFT_VOCAB, AUX = 24, 40, 16, 3


@dataclass(frozen=True)
class Document:
    """One sample in fp64, and what the verifier says on it."""

    ids: Tensor  # [T]
    mask: Tensor  # [T] bool
    aux: Tensor  # [T, 3 D]
    last: Tensor  # [T, D]
    logits: Tensor  # [T, V]


@pytest.fixture
def make_draft() -> Callable[..., Eagle3Draft]:
    def make(seed: int = 1, **changes) -> Eagle3Draft:
        torch.manual_seed(seed)
        switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "draft_vocab_size": DRAFT_VOCAB}
        config = DraftConfig(
            hidden_size=WIDTH,  # heads * head_dim is not the width, as in Qwen3
            intermediate_size=32,
            vocab_size=VOCAB,
            aux_layers=list(range(1, AUX + 1)),
            rms_norm_eps=1e-5,
            max_positions=256,
            rope={"rope_type": "default", "rope_theta": 1e4},
            **(dict.fromkeys(switches, False) | sizes | changes),
        )
        draft = Eagle3Draft(config).double()
        for parameter in draft.parameters():
            parameter.data.normal_(std=0.4)
        size = config.draft_vocab_size
        ids = torch.randperm(VOCAB)[:size].sort().values
        draft.d2t.copy_(ids - torch.arange(size))
        draft.t2d[ids] = True
        return draft

    return make


@pytest.fixture
def head() -> Tensor:
    """The verifier's head [V, D]."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator)


@pytest.fixture
def make_document(head: Tensor) -> Callable[..., Document]:
    def make(mask: list[int], seed: int = 2) -> Document:
        generator = torch.Generator().manual_seed(seed)
        rows = len(mask)
        last = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)
        return Document(
            ids=torch.randint(0, VOCAB, (rows,), generator=generator),
            mask=torch.tensor(mask, dtype=torch.bool),
            aux=torch.randn(rows, AUX * WIDTH, dtype=torch.float64, generator=generator),
            last=last,
            logits=last @ head.T,
        )

    return make


@pytest.fixture
def make_pack() -> Callable[..., TTTBatch]:
    """Documents end to end; without a depth, every row of every document asks, once."""

    def make(
        documents: list[Document], depth: int = 0, rule: Supervise = Supervise.span
    ) -> TTTBatch:
        starts = torch.tensor([0, *(len(d.ids) for d in documents)]).cumsum(0)
        mask = torch.cat([d.mask for d in documents])
        everyone = torch.ones(1, len(mask), dtype=torch.bool)
        chains = (
            Chains.of(mask, starts, depth, rule)
            if depth
            else Chains.build(~everyone, everyone, starts)
        )
        logits = torch.cat([d.logits for d in documents])
        return TTTBatch(
            input_ids=torch.cat([d.ids for d in documents]),
            positions=torch.cat([torch.arange(len(d.ids)) for d in documents]),
            aux=torch.cat([d.aux for d in documents]),
            last=torch.cat([d.last for d in documents]),
            argmax=logits.argmax(-1),
            lse=logits.logsumexp(-1),
            samples=len(documents),
            chains=chains,
        )

    return make


# ---- the plain twin: one document, all rows, dense masks, everything by autograd -------------


def turn(states: Tensor, places: Tensor) -> Tensor:
    """Rotary by complex numbers: states [T, H, Dh] at ``places`` [T], theta 10,000."""
    half = states.shape[-1] // 2
    rates = 1.0 / (1e4 ** (torch.arange(half).float() / half))
    angles = places[:, None].float() * rates  # fp32, as the library computes them
    angle = torch.complex(angles.cos().double(), angles.sin().double())[:, None]
    spun = torch.complex(states[..., :half], states[..., half:]) * angle
    return torch.cat((spun.real, spun.imag), -1)


def over_heads(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head [Dh] of states [T, H, Dh] over its root mean square, times ``weight`` [Dh]."""
    return states / (states.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@dataclass
class PlainLayer:
    """One decoder layer of the twin, with the keys of the steps so far."""

    layer: nn.Module
    config: DraftConfig
    keys: list[Tensor] = field(default_factory=list)  # by step: [T, Hkv, Dh]
    values: list[Tensor] = field(default_factory=list)

    def attended(self, read: Tensor, k: int) -> Tensor:
        """All rows at step ``k`` over step-0 keys up to their own and their own of later steps."""
        config, attention, rows = self.config, self.layer.self_attn, len(read)
        heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
        query = attention.q_proj(read).view(rows, heads, width)
        new = attention.k_proj(read).view(rows, kv_heads, width)
        if config.qk_norm:
            query = over_heads(query, attention.q_norm.weight, config.rms_norm_eps)
            new = over_heads(new, attention.k_norm.weight, config.rms_norm_eps)
        places = torch.arange(rows) + k
        query = turn(query, places)
        self.keys.append(turn(new, places))
        self.values.append(attention.v_proj(read).view(rows, kv_heads, width))
        repeat = heads // kv_heads
        key = torch.cat(self.keys).repeat_interleave(repeat, 1)  # [(k+1) T, H, Dh]
        value = torch.cat(self.values).repeat_interleave(repeat, 1)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        seen = torch.cat([causal, *[torch.eye(rows, dtype=torch.bool)] * k], 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / width**0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return attention.o_proj(torch.einsum("hqk,khd->qhd", weights, value).flatten(1))

    def through_mlp(self, residual: Tensor) -> Tensor:
        inner, mlp = self.layer.post_attention_layernorm(residual), self.layer.mlp
        gated = torch.nn.functional.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner)
        return residual + mlp.down_proj(gated)


def plain_unroll(
    draft: Eagle3Draft, document: Document, depth: int, feed: Feed = Feed.data
) -> list[Tensor]:
    """K times [T, D]; token x[t+1+k] beyond the end is token 0."""
    config, rows = draft.config, len(document.ids)
    hidden = draft.fuse(document.aux)
    padded = torch.cat([document.ids, torch.zeros(depth + 1, dtype=torch.int64)])
    first, *later = [PlainLayer(layer, config) for layer in draft.stack]
    outputs = []
    for k in range(depth):
        tokens = padded[1 + k : 1 + k + rows]
        if k and feed is Feed.own:
            ids = draft.d2t + torch.arange(len(draft.d2t))
            tokens = ids[(outputs[-1] @ draft.lm_head.weight.T).argmax(-1)]
        embedded = draft.embed_tokens(tokens)
        states = first.layer.hidden_norm(hidden)
        both = torch.cat((first.layer.input_layernorm(embedded), states), -1)
        residual = states if config.norm_before_residual else hidden
        output = first.through_mlp(residual + first.attended(both, k))
        for one in later:
            read = one.layer.input_layernorm(output)
            output = one.through_mlp(output + one.attended(read, k))
        normed = draft.norm(output)
        hidden = normed if config.norm_output else output
        outputs.append(normed)
    return outputs


def plain_rows(mask: Tensor, depth: int, rule: Supervise) -> list[list[int]]:
    """Supervised rows by step, from the words of the rule."""
    length = len(mask)
    spans, start = [], None
    for t in [*range(length), None]:
        inside = t is not None and bool(mask[t])
        if inside and start is None:
            start = t
        elif not inside and start is not None:
            spans.append((start, length if t is None else t))
            start = None
    rows = []
    for k in range(depth):
        if rule is Supervise.span:
            of_step = [t for a, b in spans for t in range(a - 1, b - 2 - k) if t >= 0]
        else:
            of_step = [x - 2 - k for a, b in spans for x in range(a + 1, b) if x - 2 - k >= 0]
        rows.append(sorted(of_step))
    return rows


def plain_value(kind: LossKind, guess: "PlainGuess", share: float) -> Tensor:
    """One guess's loss from the definitions; ``share`` of KL in the mix."""
    full, ids, draft_probs = guess.full, guess.ids, guess.probs
    target = full[ids] / full[ids].sum()
    if kind is LossKind.kl:
        return (target * (target / draft_probs).log()).sum()
    if kind is LossKind.ce:
        return -draft_probs[(ids == full.argmax()).nonzero().flatten()].log().sum()
    if kind is LossKind.mix:
        kl = plain_value(LossKind.kl, guess, share)
        return share * kl + (1 - share) * (1 - guess.overlap)
    return 1 - guess.overlap if kind is LossKind.tv else -guess.overlap.log()


@dataclass(frozen=True)
class PlainGuess:
    step: int
    row: int
    probs: Tensor  # [Vd] the draft's
    full: Tensor  # [V] the verifier's
    ids: Tensor  # [Vd] the draft vocabulary

    @property
    def overlap(self) -> Tensor:
        return torch.minimum(self.full[self.ids], self.probs).sum()

    @property
    def hit(self) -> bool:
        return bool(self.ids[self.probs.argmax()] == self.full.argmax())


@dataclass(frozen=True)
class Plain:
    """The plain twin of a recipe."""

    depth: int
    rule: Supervise = Supervise.span
    kind: LossKind = LossKind.kl
    feed: Feed = Feed.data
    weights: StepWeights = StepWeights.decay

    def guesses(self, draft: Eagle3Draft, document: Document) -> list[PlainGuess]:
        steps = plain_unroll(draft, document, self.depth, self.feed)
        ids = draft.d2t + torch.arange(len(draft.d2t))
        return [
            PlainGuess(
                k,
                t,
                (draft.lm_head.weight @ steps[k][t]).softmax(-1),
                document.logits[t + 1 + k].softmax(-1),
                ids,
            )
            for k, rows in enumerate(plain_rows(document.mask, self.depth, self.rule))
            for t in rows
        ]

    def weight(self, guess: PlainGuess, chain: list[PlainGuess]) -> float:
        """``chain``: the guesses of the same row."""
        if self.weights is StepWeights.reached:
            before = [other.overlap.item() for other in chain if other.step < guess.step]
            return math.prod(before)
        twice = self.weights is StepWeights.missed and not guess.hit
        return 0.8**guess.step * (2 if twice else 1)

    def total(self, draft: Eagle3Draft, documents: list[Document]) -> Tensor:
        """Sum over documents, steps and supervised rows of weight times loss."""
        value, of_each = draft.fc.weight.sum() * 0.0, [self.guesses(draft, d) for d in documents]
        shares = []
        for k in range(self.depth):
            overlaps = [g.overlap.item() for guesses in of_each for g in guesses if g.step == k]
            shares.append(math.exp(-3 * sum(overlaps) / max(len(overlaps), 1)))
        for guesses in of_each:
            for guess in guesses:
                chain = [other for other in guesses if other.row == guess.row]
                loss = plain_value(self.kind, guess, shares[guess.step])
                value = value + self.weight(guess, chain) * loss
        return value


@pytest.fixture
def plain_sum() -> Callable[..., Tensor]:
    """Sum over steps and supervised rows of 0.8**k times the loss of one document."""

    def total(draft: Eagle3Draft, document: Document, depth: int, rule: Supervise, kind: LossKind):
        return Plain(depth, rule, kind).total(draft, [document])

    return total


# ---- all of the above under one name, and the training step on it -----------------------------


def starts_of(documents: list[Document]) -> Tensor:
    return torch.tensor([0, *(len(d.ids) for d in documents)]).cumsum(0)


@dataclass(frozen=True)
class Stepped:
    """What one training step gave."""

    output: TTTOutput
    grads: dict[str, Tensor]  # by name, of every trainable parameter

    @property
    def loss(self) -> float:
        return self.output.loss.item()


@dataclass(frozen=True)
class Lab:
    draft: Callable[..., Eagle3Draft]
    document: Callable[..., Document]
    pack: Callable[..., TTTBatch]
    head: Tensor
    plain_sum: Callable[..., Tensor]

    def documents(self, masks: list[list[int]]) -> list[Document]:
        return [self.document(mask, seed) for seed, mask in enumerate(masks)]

    def module(
        self,
        draft: Eagle3Draft,
        depth: int,
        rule: Supervise = Supervise.span,
        kind: LossKind = LossKind.kl,
        kernel: Kernel = CPU_FLASH,
    ) -> TrainingTimeTest:
        ttt = TTTSection(depth=depth, decay=0.8, supervise=rule)
        return TrainingTimeTest(draft, self.distillation(draft, kind), ttt, kernel)

    def distillation(self, draft: Eagle3Draft, kind: LossKind) -> Distillation:
        ids = draft.d2t + torch.arange(len(draft.d2t))
        return Distillation(kind, self.head.to(draft.fc.weight.dtype)[ids], LlamaConfig())

    def recipe(self, depth: int, **choices) -> Plain:
        """The plain twin of ttt.* and loss.kind in ``choices``."""
        return Plain(depth, **choices)

    def module_of(self, draft: Eagle3Draft, plain: Plain) -> TrainingTimeTest:
        """What trains by the recipe of ``plain``."""
        ttt = TTTSection(plain.depth, 0.8, plain.weights, plain.rule, plain.feed)
        return TrainingTimeTest(draft, self.distillation(draft, plain.kind), ttt, CPU_FLASH)

    def step(
        self, module: TrainingTimeTest, batch: TTTBatch, weights: list[float] | None = None
    ) -> Stepped:
        """Loss and gradients of ``batch``; every row weighs 1 unless ``weights`` are given."""
        each = torch.tensor(weights or [1.0] * batch.samples, dtype=torch.float64)
        output = module(batch, each)
        return Stepped(output, self.gradients(output.loss, module))

    def gradients(self, loss: Tensor, module: TrainingTimeTest) -> dict[str, Tensor]:
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(loss, list(parameters.values()))
        return dict(zip(parameters, grads, strict=True))

    def apart(self, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
        """Largest difference of any gradient, relative to that gradient's largest entry."""
        assert ours.keys() == theirs.keys()
        return max(
            float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp_min(1e-30))
            for n in theirs
            if float(theirs[n].abs().max()) > 0
        )

    def through(self, documents: list[Document], depth: int) -> TTTBatch:
        """A pack whose every row is unrolled as far as its document's tokens go; no loss."""
        starts = starts_of(documents)
        lengths = starts.diff()
        place = torch.cat([torch.arange(length) for length in lengths.tolist()])
        left = lengths.repeat_interleave(lengths) - place  # x[t+1+k] is there while k + 1 < left
        needed = torch.stack([left > k + 1 for k in range(depth)])
        batch = self.pack(documents)
        return replace(batch, chains=Chains.build(torch.zeros_like(needed), needed, starts))


@pytest.fixture
def lab(make_draft, make_document, make_pack, head: Tensor, plain_sum) -> Lab:
    return Lab(make_draft, make_document, make_pack, head, plain_sum)
