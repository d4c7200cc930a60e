"""Decoding by kinds of steps: single steps and whole answers timed in turn, tokens compared."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, cast

import torch
from contender_eyrie import draft_config
from machine import seconds_of
from problem import Place, make_draft
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from workload import ROPE_THETA, Shape

from conf.choices import EvalRule, StepKind
from conf.shapes import parse_shape
from eval.decode import DecodeSettings, decode
from eval.round_plan import rule_of
from models.eagle3 import Eagle3Draft
from models.facts import VerifierFacts
from models.fixed import FixedCache
from models.kv import KVCache
from models.layer_shape import LayerShape
from models.steps import Step, Steps, run
from models.verifier import Verifier

GROWING, FIXED = "eager", "eager, fixed shapes"
POSITIONS = 4096
EXACT, ROUNDED = (
    1e-5,
    2e-2,
)  # how far a step's states may be from those of growing shapes: fp32, 16 bits


@dataclass(frozen=True)
class StepTimes:
    """One step of one kind, at ``context`` tokens in a cache of ``capacity``."""

    kind: str
    tokens: int  # fed to a sequence
    batch: int
    context: int
    capacity: int
    seconds: list[float]
    prepared_seconds: float  # to compile or capture it
    error: float  # of the last state, against growing shapes: norm of the difference / norm

    @property
    def typical(self) -> float:
        return median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "median_seconds": self.typical}


def kinds_on(device: torch.device, compiled: bool) -> list[StepKind]:
    """Beside eager steps; graphs where the device has them."""
    kinds = [StepKind.compiled] if compiled else []
    return [*kinds, StepKind.graphed] if device.type == "cuda" else kinds


class Contest:
    """The kinds of steps over one text, each with a cache of its own."""

    def __init__(self, verifier: Verifier, batch: int, context: int, capacity: int):
        self.verifier, self.batch = verifier, batch
        self.context, self.capacity = context, capacity
        draw = torch.Generator().manual_seed(0)
        self.text = torch.randint(verifier.facts.vocab_size, (batch, context), generator=draw)

    def filled(self, cache: KVCache) -> KVCache:
        self.verifier.states(self.text.to(self.verifier.device), cache)
        cache.advance(self.context)
        return cache

    def way(self, kind: str, tokens: Tensor) -> Callable[[], Step]:
        """A step of ``kind`` over ``tokens`` [B, T], which may be taken any number of times."""
        growing = kind in (GROWING, FIXED)
        steps = Steps(self.verifier, StepKind.eager if growing else StepKind(kind))
        cache = self.filled(steps.cache(self.batch, self.capacity))
        if kind != FIXED:
            return lambda: steps.take(tokens, cache)
        fixed = FixedCache(cache)

        def step() -> Step:
            fixed.follow(cache)
            return run(self.verifier, tokens, fixed, None)

        return step

    def times(self, width: int, kinds: Sequence[StepKind], repeats: int) -> list[StepTimes]:
        """Every kind once, ``repeats`` times over; the first, which makes it, counts apart."""
        device = self.verifier.device
        tokens = self.text[:, :width].to(device)
        names = [GROWING, FIXED, *(kind.value for kind in kinds)]
        ways = {name: self.way(name, tokens) for name in names}
        made = {name: seconds_of(way, device) for name, way in ways.items()}
        wanted = ways[GROWING]().states.last.double()
        errors = {
            name: float((way().states.last.double() - wanted).norm() / wanted.norm())
            for name, way in ways.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(seconds_of(ways[name], device))
        place = (width, self.batch, self.context, self.capacity)
        return [StepTimes(n, *place, seconds[n], made[n], errors[n]) for n in names]


@torch.inference_mode()
def step_times(
    contest: Contest, widths: Sequence[int], kinds: Sequence[StepKind], repeats: int
) -> list[StepTimes]:
    return [one for width in widths for one in contest.times(width, kinds, repeats)]


def step_lines(times: Sequence[StepTimes]) -> list[str]:
    first = times[0]
    lines = [
        f"Steps at {first.context} tokens of {first.capacity}, batch {first.batch}: median ms, "
        "and eager's time over it",
        f"  {'tokens':>6}  {'kind':<22}{'ms':>9}{'ratio':>8}{'made in s':>11}{'error':>10}",
    ]
    eager = {one.tokens: one.typical for one in times if one.kind == GROWING}
    for one in times:
        lines.append(
            f"  {one.tokens:>6}  {one.kind:<22}{1e3 * one.typical:>9.3f}"
            f"{eager[one.tokens] / one.typical:>8.3f}{one.prepared_seconds:>11.2f}"
            f"{one.error:>10.1e}"
        )
    return [*lines, ""]


# ---- whole answers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerTimes:
    """Answers of one kind of steps and one shape of guesses."""

    kind: str
    shape: str  # plain: no draft
    tokens: int  # decoded, without the first ones
    seconds: list[float]  # after prefill, a repeat each
    prepared_seconds: float
    same: bool  # the tokens are those of plain eager decoding

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


PLAIN = "plain"


@dataclass(frozen=True)
class Decoding:
    """A pair of models and what they are to answer."""

    verifier: Verifier
    draft: Eagle3Draft
    prompts: list[list[int]]
    max_new_tokens: int

    def settings(self, shape: str, steps: Steps) -> DecodeSettings:
        plain = DecodeSettings(self.max_new_tokens, [], steps=steps)
        if shape == PLAIN:
            return plain
        parsed = parse_shape(shape, "--shapes")
        return replace(plain, shape=parsed, rule=rule_of(EvalRule.auto, parsed, plain.sampling))

    def times(
        self, shapes: Sequence[str], kinds: Sequence[StepKind], repeats: int
    ) -> list[AnswerTimes]:
        """Plain decoding and each shape by each kind, in turn; the first run of each apart."""
        steps = {kind: Steps(self.verifier, kind) for kind in (StepKind.eager, *kinds)}
        ways = [(kind, shape) for kind in steps for shape in (PLAIN, *shapes)]
        texts: list[list[list[int]]] = []
        made: list[float] = []
        seconds: list[list[float]] = [[] for _ in ways]
        for repeat in range(1 + repeats):
            for i, (kind, shape) in enumerate(ways):
                settings = self.settings(shape, steps[kind])
                guide = None if shape == PLAIN else self.draft
                done = decode(self.verifier, guide, self.prompts, settings)
                if repeat == 0:
                    texts.append([one.tokens for one in done.generations])
                    made.append(done.times.decode)
                else:
                    seconds[i].append(done.times.decode)
        return [
            AnswerTimes(
                kind.value,
                shape,
                sum(len(tokens) - 1 for tokens in texts[i]),
                seconds[i],
                made[i],
                texts[i] == texts[0],
            )
            for i, (kind, shape) in enumerate(ways)
        ]


def answer_lines(times: Sequence[AnswerTimes]) -> list[str]:
    lines = [f"Answers\n  {'steps':<12}{'guesses':<16}{'tokens/s':>10}  tokens of plain eager"]
    for one in times:
        lines.append(
            f"  {one.kind:<12}{one.shape:<16}{one.tokens_per_second:>10.1f}  "
            f"{'the same' if one.same else 'OTHERS'}"
        )
    return [*lines, ""]


# ---- random models -----------------------------------------------------------------------------


def random_verifier(shape: Shape, layers: int, place: Place) -> Verifier:
    """A Llama of random weights; nothing here asks for its tokenizer."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=POSITIONS,
    )
    with place.device:
        model = LlamaForCausalLM._from_config(config, dtype=place.dtype)
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    facts = VerifierFacts(
        path="random",
        architectures=["LlamaForCausalLM"],
        hidden_size=shape.hidden,
        num_layers=layers,
        vocab_size=shape.vocab,
        max_positions=POSITIONS,
        layer=LayerShape.of(config, rope),
        rope=rope,
        aux_layers=draft_config(shape).aux_layers,
        bos_id=None,
        eos_ids=[],
    )
    return Verifier(model, cast(PreTrainedTokenizerBase, None), facts)


def random_decoding(shape: Shape, layers: int, place: Place, batch: int, length: int) -> Decoding:
    """Random prompts of ``length`` tokens and more, answers as long."""
    verifier = random_verifier(shape, layers, place)
    draft = make_draft(shape, place).eval().requires_grad_(False)
    draft.embed_tokens.weight.copy_(verifier.embedding)
    prompts = [torch.randint(shape.vocab, (length + row,)).tolist() for row in range(batch)]
    return Decoding(verifier, draft, prompts, length)
