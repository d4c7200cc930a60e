"""The question that a plan answers: verifier, draft, samples and GPUs, from a configuration."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from conf.schema import ConfigError, DraftFamily, HeadInit, Precision, RunConfig
from data.amount import counts_of
from data.chains import asking_rows
from data.shard_plan import SAMPLE_BYTES, RowSizes
from launch.planning.hardware import KINDS, Hardware
from launch.planning.verifiers import VerifierSizes, verifier_sizes
from models.eagle3 import DraftConfig, Eagle3Draft
from models.flops import Counts, Flops, Sizes, eagle3_flops
from train.budget import eagle3_sizes


@dataclass(frozen=True)
class DraftCost:
    """The head to train, and what lies beside it frozen."""

    sizes: Sizes
    trainable: int
    embedding: int  # the verifier's, frozen
    other: int  # frozen besides: the head with draft.head_init=frozen
    teacher: int  # the verifier's head, of the draft vocabulary's rows alone

    @property
    def frozen(self) -> int:
        return self.embedding + self.other + self.teacher


@dataclass(frozen=True)
class Sample:
    """One sample of the average size: a prompt, and an answer at its end."""

    tokens: int
    answer: int
    asking: int  # rows whose next token is supervised
    counts: Counts

    @classmethod
    def of(cls, cfg: RunConfig) -> "Sample":
        tokens = cfg.plan.sample_tokens
        answer = max(2, round(tokens * cfg.plan.supervised_share))
        mask = torch.arange(tokens) >= tokens - answer
        starts = torch.tensor([0, tokens])
        counts = counts_of(mask, starts, cfg.ttt.depth, cfg.ttt.supervise)
        return cls(tokens, answer, int(asking_rows(mask, starts).sum()), counts)


@dataclass(frozen=True)
class Question:
    cfg: RunConfig
    verifier: VerifierSizes
    draft: DraftCost
    sample: Sample
    hardware: Hardware
    device: str = "cuda"  # or cpu, whose memory also holds what a GPU's machine does

    @classmethod
    def of(cls, cfg: RunConfig, cache: Path) -> "Question":
        """No weights are read. Raises ConfigError for what cannot be planned."""
        if cfg.draft.family is not DraftFamily.eagle3:
            raise ConfigError(
                f"draft.family={cfg.draft.family.value}: a plan knows the sizes of eagle3 alone; "
                "plan with draft.family=eagle3, which costs the most"
            )
        verifier = verifier_sizes(cfg.verifier, cache)
        draft = draft_cost(cfg, verifier)
        return cls(cfg, verifier, draft, Sample.of(cfg), KINDS[cfg.plan.gpu])

    def on(self, gpus: int) -> "Question":
        """The same job on so many GPUs, with a pack for each at least."""
        packs = max(self.cfg.optim.packs_per_step, gpus)
        optim = replace(self.cfg.optim, packs_per_step=packs)
        cfg = replace(self.cfg, optim=optim, plan=replace(self.cfg.plan, gpus=gpus))
        return replace(self, cfg=cfg)

    @property
    def gpus(self) -> int:
        return self.cfg.plan.gpus

    @property
    def samples(self) -> float:
        return self.cfg.plan.tokens / self.sample.tokens

    @property
    def stored_bytes(self) -> float:
        """Of the cache in capture.dtype."""
        return cache_bytes(self, stored_dtype(self))

    @property
    def weight_bytes(self) -> int:
        """Of a trained parameter in the training precision."""
        return 2 if self.cfg.engine.precision is Precision.bfloat16 else 4

    @property
    def pack_samples(self) -> float:
        """Samples of one pack: optim.micro_batch_tokens, or one sample that is longer."""
        return max(1.0, self.cfg.optim.micro_batch_tokens / self.sample.tokens)

    @property
    def epoch_steps(self) -> float:
        """Steps of one pass: samples / (samples of a pack x optim.packs_per_step)."""
        return self.samples / self.pack_samples / self.cfg.optim.packs_per_step


def draft_cost(cfg: RunConfig, verifier: VerifierSizes) -> DraftCost:
    """Counted on torch's meta device.

    EAGLE-3 by hand, with D the width, Q and KV those of queries and of keys with values, I the
    MLP's: fc A*D*D, projections 2*D*(Q + KV), output Q*D, MLP 3*D*I, head D*Vd, and norms. Later
    layers: D*(Q + KV) + Q*D + 3*D*I.
    """
    config = DraftConfig.of(cfg.draft, verifier.facts)
    with torch.device("meta"):
        draft = Eagle3Draft(config)
    draft.lm_head.requires_grad_(cfg.draft.head_init is not HeadInit.frozen)
    every = sum(one.numel() for one in draft.parameters())
    trainable = sum(one.numel() for one in draft.parameters() if one.requires_grad)
    embedding = draft.embed_tokens.weight.numel()
    return DraftCost(
        sizes=eagle3_sizes(cfg, config),
        trainable=trainable,
        embedding=embedding,
        other=every - trainable - embedding,
        teacher=config.draft_vocab_size * config.hidden_size,
    )


def training_flops(asked: Question) -> Flops:
    """Of one sample: models/flops.py on its chains."""
    return eagle3_flops(asked.draft.sizes, asked.sample.counts)


def forward_flops(asked: Question) -> float:
    """Of one sample through the verifier.

    2 FLOPs for each active parameter of the layers and token, the head on rows that ask alone; for
    attention 4 a pair of row and key, channel of the queries and layer.
    """
    verifier, sample = asked.verifier, asked.sample
    layers = 2 * (verifier.active - verifier.head) * sample.tokens
    pairs = sample.counts.all_pairs
    attention = 4 * verifier.facts.num_layers * verifier.queries * pairs
    return layers + 2 * verifier.head * sample.asking + attention


def cache_bytes(asked: Question, dtype: torch.dtype) -> float:
    """Of the whole cache: a row of data/shard_plan.py for every token and every row that asks.

    A token: A*D values (and A scales in fp8), id and mask. A row that asks: D values more, argmax
    and log-sum-exp. A sample: its entries in the shard's index.
    """
    facts = asked.verifier.facts
    sizes = RowSizes.of(facts.hidden_size, len(facts.aux_layers), dtype)
    one = asked.sample.tokens * sizes.token + asked.sample.asking * sizes.asking + SAMPLE_BYTES
    return asked.samples * one


def stored_dtype(asked: Question) -> torch.dtype:
    return getattr(torch, asked.cfg.capture.dtype.value)
