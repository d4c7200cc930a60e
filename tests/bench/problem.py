"""One step of Eyrie on random states: any sizes, device and precision, without a peer beside it."""

from dataclasses import dataclass, replace

import torch
from contender import clear
from contender_eyrie import draft_config, row_weights
from flops import chain_rows, step_flops
from torch import Tensor
from transformers import LlamaConfig
from workload import Shape, answer_length

from conf.schema import LossKind, TTTSection
from data.chains import Chains
from data.records import TTTBatch
from models.attention import Kernel
from models.eagle3 import INIT_STD, Eagle3Draft
from models.runs import with_moved
from models.vocab import DraftVocab
from train.loss import Distillation
from train.ttt import TrainingTimeTest


@dataclass(frozen=True)
class Problem:
    """Documents of one length, each with its answer at the end."""

    shape: Shape
    share: int = 40  # per cent of a document's tokens that its answer holds
    depth: int = 7  # K
    recompute: bool = False  # activation checkpointing of each unroll step

    @property
    def tokens(self) -> int:
        return self.shape.batch * self.shape.tokens

    @property
    def rows(self) -> list[int]:
        """[K] guesses by step."""
        return chain_rows(self.shape, self.share, self.depth)

    @property
    def guesses(self) -> int:
        return sum(self.rows)

    @property
    def flops(self) -> int:
        """Needed by all but attention's products with step-0 keys; recomputing adds none."""
        return step_flops(self.shape, self.share, self.depth).products

    @property
    def attention_flops(self) -> int:
        return step_flops(self.shape, self.share, self.depth).attention


@dataclass(frozen=True)
class Place:
    device: torch.device
    dtype: torch.dtype  # of weights and states

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)


def make_draft(shape: Shape, place: Place) -> Eagle3Draft:
    """Small random matrices, norms of weight 1."""
    with place.device:
        draft = Eagle3Draft(draft_config(shape)).to(place.dtype)
    vocab = DraftVocab.from_counts(torch.rand(shape.vocab), shape.draft_vocab)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=INIT_STD)
    return draft


def make_module(problem: Problem, place: Place, kernel: Kernel) -> TrainingTimeTest:
    """As training starts it: the draft's head is the verifier's."""
    shape = problem.shape
    head = place.normal(shape.draft_vocab, shape.hidden) * (3 / shape.hidden**0.5)
    draft = make_draft(shape, place)
    draft.lm_head.weight.data.copy_(head)
    teacher = Distillation(LossKind.kl, head, LlamaConfig())
    section = TTTSection(depth=problem.depth)
    return TrainingTimeTest(draft, teacher, section, kernel, problem.recompute)


def make_batch(problem: Problem, place: Place) -> TTTBatch:
    """Random states of mean square 1. Drawn, too: the verifier's argmax, of which ``kl`` only
    counts hits, and its log-sum-exp, which ``kl`` does not read."""
    shape, tokens = problem.shape, problem.tokens
    starts = torch.arange(shape.batch + 1) * shape.tokens
    mask = torch.zeros(shape.batch, shape.tokens, dtype=torch.bool)
    mask[:, shape.tokens - answer_length(shape, problem.share) :] = True
    chains = Chains.of(mask.flatten(), starts, problem.depth, TTTSection().supervise)
    assert chains.counts == problem.rows, "the counted FLOPs are of other rows"
    batch = TTTBatch(
        input_ids=torch.randint(shape.vocab, (tokens,)),
        positions=torch.arange(shape.tokens).repeat(shape.batch),
        aux=place.normal(tokens, shape.aux * shape.hidden),
        last=place.normal(tokens, shape.hidden),
        argmax=torch.randint(shape.vocab, (tokens,)),
        lse=torch.randn(tokens),
        samples=shape.batch,
        chains=chains,
    )
    there = with_moved(batch, lambda tensor: tensor.to(place.device))
    return replace(there, chains=chains.moved(lambda tensor: tensor.to(place.device)))


def take_step(module: TrainingTimeTest, batch: TTTBatch) -> Tensor:
    """Forward and backward from cleared gradients -> the loss []."""
    clear(module)
    loss = module(batch, row_weights(batch).to(batch.lse.device)).loss
    loss.backward()
    return loss.detach()
