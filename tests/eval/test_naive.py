"""The loop against one that cannot be wrong: a sequence at a time, no cache, trees in plain Python.

The reference runs both models on the whole text for every single distribution it needs, and takes
the same random numbers in the same order. Shapes, prompts, ends, limits, filters, rules, seeds and
the company of a sequence are drawn; text, rounds, overlap and ranks must be the same.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conf.choices import EvalRule
from conf.schema import DraftSection, HeadInit, Precision, VerifierSection
from conf.shapes import DynamicShape, Shape, StaticShape, depths_of, parse_shape
from eval.decode import DecodeSettings, Speculation, decode
from eval.generation import Generation
from eval.output import StopStrings
from eval.round_plan import rule_of
from eval.sides import TargetDecoder
from eval.verify import LOSSY, AcceptRule
from models.eagle3 import DraftConfig, DraftOutput, Eagle3Draft
from models.kv import KVCache
from models.memory import DraftCache
from models.sampling import OwnDice, Sampling, probabilities
from models.verifier import Verifier, load_ends
from models.vocab import DraftVocab

V, POSITIONS = 32, 96
AUX = [1, 2, 4]


class LeaningDraft(Eagle3Draft):
    """A random head that leans towards what followed a token at its place: often right, not always.

    What it leans by stands beside the state, so that every row still depends on all it has seen.
    """

    leaning: Tensor  # [places * V, V] added to the logits after each token at each place

    def know(self, texts: Sequence[Sequence[int]], weight: float) -> "LeaningDraft":
        self.leaning = torch.zeros(POSITIONS * V, V)
        for text in texts:
            for at, (token, following) in enumerate(pairwise(text[1:])):
                self.leaning[at * V + token, following] = weight
        return self

    def share_of(self, tokens: Tensor, asks: bool = True) -> Tensor:
        self.tokens = tokens
        return super().share_of(tokens, asks)

    def forward(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories, known: bool = False
    ) -> DraftOutput:
        output = super().forward(share, hidden, positions, memories, known)
        beside = (positions * V + self.tokens)[..., None].to(output.normed.dtype)
        return DraftOutput(output.hidden, torch.cat([output.normed, beside], -1))

    def logits(self, normed: Tensor) -> Tensor:
        own = super().logits(normed[..., :-1])
        columns = self.to_target_ids(torch.arange(own.shape[-1]))
        return own + self.leaning[normed[..., -1].long()][..., columns].to(own.dtype)


@dataclass(frozen=True)
class World:
    """A verifier, what texts it writes, and heads for it."""

    verifier: Verifier
    section: VerifierSection
    texts: list[list[int]]

    def head(
        self, vocab_size: int, max_positions: int, weight: float, qk_norm: bool, layers: int
    ) -> LeaningDraft:
        options = DraftSection(
            vocab_size=vocab_size, max_positions=max_positions, qk_norm=qk_norm, layers=layers
        )
        config = DraftConfig.of(options, self.verifier.facts)
        ends = load_ends(self.section, Path(self.section.path), torch.float32)
        vocab = DraftVocab.from_counts((torch.arange(V) * 7) % 11, config.draft_vocab_size)
        draft = LeaningDraft(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            draft.initialise(ends, vocab, HeadInit.verifier)
            draft.fc.weight.normal_(std=0.2)
            for layer in draft.stack:
                for weights in layer.parameters():
                    if weights.dim() == 2:
                        weights.normal_(std=0.2)
        draft.lm_head.weight.mul_(0.3)
        draft = draft.to(self.verifier.dtype).eval().requires_grad_(False)
        return draft.know(self.texts, weight)


@pytest.fixture(scope="module", params=["float64", pytest.param("float32", marks=pytest.mark.slow)])
def world(request, tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> World:
    folder = tmp_path_factory.mktemp("sharp")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=V,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            initializer_range=0.2,  # ten times the usual: distributions with a say
            tie_word_embeddings=False,
            **sizes,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    for path in (*tiny_verifier.glob("token*"), *tiny_verifier.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    section = VerifierSection(str(folder), Precision.float32, aux_layers=AUX)
    dtype = getattr(torch, request.param)
    verifier = Verifier.load(section, folder, torch.device("cpu"), dtype)
    found = decode(verifier, None, POOL, DecodeSettings(max_new_tokens=24, eos_ids=[]))
    texts = [[*ids, *one.tokens] for ids, one in zip(POOL, found.generations, strict=True)]
    return World(verifier, section, texts)


POOL = [[5], [3, 9, 4, 30, 8], list(range(1, 31)), [7, 7, 7, 2, 1, 0, 6, 20, 21], [12, 31] * 10]


# ---- the reference ------------------------------------------------------------------------------


class AllRows:
    """A layer's memory of one text: every row at once, each sees itself and those before."""

    def remember(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key[0], value[0]  # [T, Hkv, Dh]

    def attend(self, query: Tensor) -> Tensor:
        rows, heads, width = query.shape[1:]
        group = heads // self.key.shape[1]
        out = torch.zeros_like(query[0])
        for head in range(heads):
            key, value = self.key[:, head // group], self.value[:, head // group]
            for row in range(rows):
                scores = key[: row + 1] @ query[0, row, head] / math.sqrt(width)
                out[row, head] = scores.softmax(0) @ value[: row + 1]
        return out[None]


class Naive:
    """One sequence with all that was ever said of it, by whole forwards."""

    def __init__(self, verifier: Verifier, draft: Eagle3Draft, settings: DecodeSettings, seed: int):
        self.verifier, self.draft, self.settings = verifier, draft, settings
        self.generator = torch.Generator().manual_seed(seed)
        self.plain = torch.Generator().manual_seed(seed + 2**32)
        self.rounds: list[tuple[list[int], int, int]] = []
        self.overlap: list[float] = []
        self.ranks: list[list[int]] = []
        self.tokens: list[int] = []
        self.path: dict[tuple[int, ...], list[Tensor]] = {}

    def roll(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def target(self, text: list[int]) -> Tensor:
        """[V] logits after ``text``."""
        return self.verifier.logits_from(self.verifier.states(torch.tensor([text])).last[0, -1])

    def guessing(self, text: list[int], path: tuple[int, ...]) -> Tensor:
        """[Vd] the draft's logits after ``text``, the root last, and guesses ``path``."""
        rows = len(text) - 1  # row t: token t+1 and the states of token t
        fused = self.draft.fuse(self.verifier.states(torch.tensor([text])).aux[:, :rows])
        outputs = [] if not path else self.path[path[:-1]]
        hidden = torch.cat([fused, *(one[None, None] for one in outputs)], 1)
        tokens = torch.tensor([[*text[1:], *path]])
        last = self.draft.config.max_positions - 1
        positions = torch.arange(hidden.shape[1]).clamp(max=last)[None]
        memories = [AllRows() for _ in self.draft.stack]
        output = self.draft(self.draft.share_of(tokens), hidden, positions, memories)
        self.path[path] = [*outputs, output.hidden[0, -1]]
        return self.draft.logits(output.normed[:, -1])[0]

    def of_target(self, logits: Tensor, sampling: Sampling) -> list[float]:
        """On the verifier's ids, whichever vocabulary ``logits`` have."""
        found = probabilities(logits, sampling).double().tolist()
        if len(found) == V:
            return found
        spread = [0.0] * V
        for own, value in enumerate(found):
            spread[self.target_id(own)] = value
        return spread

    def target_id(self, own: int) -> int:
        return int(self.draft.to_target_ids(torch.tensor(own)))

    # ---- proposals

    def tree(self, text: list[int]) -> tuple[list[int], list[int], dict[int, Tensor]]:
        """Guesses, their parents, and the logits that a node's children were chosen from."""
        shape = self.settings.shape
        self.path.clear()
        if isinstance(shape, DynamicShape):
            return (*self.confident(text, shape), {})
        assert isinstance(shape, StaticShape)
        drawn = self.settings.rule in (
            AcceptRule.rejection,
            AcceptRule.tree_without_replacement,
        )
        ids, logits = [0] * shape.nodes, {}
        paths: dict[int, tuple[int, ...]] = {0: ()}
        above = [0]
        for depth in range(1, shape.depth + 1):
            level = [i for i in range(shape.nodes) if shape.depths[i] == depth]
            width = 1 + max(shape.ranks[i] for i in level)
            uniform = self.roll(len(above), width) if drawn else None
            for row, node in enumerate(above):
                logits[node] = self.guessing(text, paths[node])
                order = sorted(range(len(logits[node])), key=lambda t: -float(logits[node][t]))
                if uniform is not None:
                    order = self.distinct(logits[node], uniform[row].tolist())
                for i in level:
                    if shape.parents[i] == node:
                        ids[i] = self.target_id(order[shape.ranks[i]])
                        paths[i + 1] = (*paths[node], ids[i])
            above = [i + 1 for i in level if i + 1 in shape.parents]
        return ids, list(shape.parents), logits

    def distinct(self, logits: Tensor, uniform: list[float]) -> list[int]:
        """Draws without replacement, by inverting what is left of the distribution."""
        left = probabilities(logits, self.settings.sampling).double().tolist()
        found: list[int] = []
        for u in uniform:
            found.append(invert(left, u) if sum(left) else len(left) - 1)
            left[found[-1]] = 0.0
        return found

    def confident(self, text: list[int], shape: DynamicShape) -> tuple[list[int], list[int]]:
        """EAGLE-2: the most likely paths of a pool that grows below each level's best."""
        pool: list[tuple[float, int, int]] = []  # score, token, parent in the pool + 1
        paths: dict[int, tuple[int, ...]] = {0: ()}
        reached, expanded = {0: torch.tensor(0.0)}, [0]
        for depth in range(1, shape.depth + 1):
            begin = len(pool)
            for node in expanded:
                logits = self.guessing(text, paths[node])
                gained = logits.float().log_softmax(-1)
                order = sorted(range(len(logits)), key=lambda t, of=logits: -float(of[t]))
                for own in order[: shape.top_k]:
                    score = reached[node] + gained[own].clamp_max(0)
                    pool.append((float(score), self.target_id(own), node))
                    paths[len(pool)] = (*paths[node], pool[-1][1])
                    reached[len(pool)] = score
            if depth < shape.depth:
                expanded = sorted(range(begin, len(pool)), key=lambda i: -pool[i][0])
                expanded = [i + 1 for i in expanded[: shape.top_k]]
        kept = sorted(sorted(range(len(pool)), key=lambda i: -pool[i][0])[: shape.nodes])
        number = {0: 0} | {i + 1: at + 1 for at, i in enumerate(kept)}
        return [pool[i][1] for i in kept], [number[pool[i][2]] for i in kept]

    # ---- judgement

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        if self.settings.sampling.greedy:
            return int(logits.argmax())
        u = float(torch.rand((), generator=generator, dtype=torch.float64))
        return invert(self.of_target(logits, self.settings.sampling), u)

    def round(self, text: list[int], room: int) -> list[int]:
        """Propose and walk down from the root; the tokens that the round emits."""
        ids, parents, logits = self.tree(text)
        depths, rule = depths_of(parents), self.settings.rule
        uniform = [0.0] * len(ids)
        if rule is not AcceptRule.greedy:
            uniform = self.roll(len(ids)).tolist()
        path: list[int] = []
        node, going = 0, True
        while going:
            here = self.target([*text, *(ids[n - 1] for n in path)])
            wanted = self.of_target(here, self.settings.sampling)
            offered = None
            if rule in (AcceptRule.rejection, AcceptRule.tree_without_replacement):
                offered = (
                    self.of_target(logits[node], self.settings.sampling)
                    if node in (logits)
                    else [0.0] * V
                )
            going = False
            for child in range(1, len(ids) + 1):
                if parents[child - 1] != node or len(path) == room:
                    continue
                token = ids[child - 1]
                if stands(wanted, offered, token, uniform[child - 1], rule):
                    path.append(child)
                    node, going = child, True
                    break
                wanted, offered = without(wanted, offered, token, rule)
        if rule is AcceptRule.greedy:
            last = int(here.argmax())
        else:
            if not sum(wanted):
                wanted = self.of_target(here, self.settings.sampling)
            last = invert(wanted, float(self.roll()))
        reachable = [i for i, depth in zip(ids, depths, strict=True) if depth <= room]
        tested = len(path) + (len(path) < room and node in parents)
        self.rounds.append((reachable, len(path), tested))
        if self.settings.measure_overlap and self.settings.shape.is_chain:
            self.measure(text, ids, logits, tested)
        return [*(ids[n - 1] for n in path), last]

    def measure(self, text: list[int], ids: list[int], logits: dict, tested: int) -> None:
        sampling = self.settings.sampling
        shape = Sampling(temperature=1.0) if sampling.greedy else sampling
        ranks = []
        for depth in range(tested):
            here = self.target([*text, *ids[:depth]])
            pairs = zip(
                self.of_target(here, shape), self.of_target(logits[depth], shape), strict=True
            )
            self.overlap.append(sum(min(pair) for pair in pairs))
            order = sorted(range(len(logits[depth])), key=lambda t, d=depth: -float(logits[d][t]))
            best = [self.target_id(own) for own in order[:10]]
            top = int(here.argmax())
            ranks.append(best.index(top) if top in best else -1)
        self.ranks.append(ranks)

    # ---- the loop

    def decode(self, prompt: list[int]) -> "Naive":
        text = list(prompt)
        self.emit(text, [self.choose(self.target(text), self.generator)])
        while not self.ended(prompt):
            root = len(text) - 1
            shape, facts = self.settings.shape, self.verifier.facts
            # Level k is judged at the verifier's position root + k - 1 and, were all to stand,
            # feeds position root + k; it is read from the draft's position root + k - 2.
            room = max(
                0,
                min(
                    shape.depth,
                    facts.max_positions - 1 - root,
                    self.draft.config.max_positions - 1 - root + 2,
                ),
            )
            if room:
                self.emit(text, self.round(text, room))
            else:
                self.emit(text, [self.choose(self.target(text), self.plain)])
        return self

    def emit(self, text: list[int], tokens: list[int]) -> None:
        prompt = text[: len(text) - len(self.tokens)]
        for token in tokens:
            if not self.tokens or not self.ended(prompt):
                self.tokens.append(token)
                text.append(token)

    def ended(self, prompt: list[int]) -> bool:
        stop = self.settings.stop
        written = str(self.verifier.tokenizer.decode(self.tokens))
        return (
            len(self.tokens) == self.settings.max_new_tokens
            or len(prompt) + len(self.tokens) == self.verifier.facts.max_positions
            or self.tokens[-1] in self.settings.eos_ids
            or (stop is not None and any(one in written for one in stop.texts))
        )


def invert(weights: list[float], u: float) -> int:
    """The first index at which the running sum passes u of the whole."""
    total = sum(weights)
    return next(i for i, upto in enumerate(accumulate(weights)) if upto > u * total)


def stands(
    wanted: list[float], offered: list[float] | None, token: int, u: float, rule: AcceptRule
) -> bool:
    if rule is AcceptRule.greedy:
        return wanted[token] == 1.0  # one-hot at temperature 0
    if offered is None:
        return u < wanted[token] / sum(wanted) if sum(wanted) else False
    if not sum(offered):
        return False
    return u < (wanted[token] / sum(wanted)) / (offered[token] / sum(offered))


def without(
    wanted: list[float], offered: list[float] | None, token: int, rule: AcceptRule
) -> tuple[list[float], list[float] | None]:
    """What is left of both after ``token`` was turned down."""
    if rule is AcceptRule.greedy or (offered is not None and not sum(offered)):
        return wanted, offered
    if offered is None:
        return [0.0 if i == token else p for i, p in enumerate(wanted)], None
    r, d = sum(wanted), sum(offered)
    left = [max(0.0, p / r - q / d) for p, q in zip(wanted, offered, strict=True)]
    return left, [0.0 if i == token else q for i, q in enumerate(offered)]


# ---- what is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    prompts: list[list[int]]
    seeds: list[int]
    settings: DecodeSettings
    positions: int  # of the verifier
    draft: tuple[int, int, float, bool, int]  # vocabulary, positions, leaning, qk_norm, layers


def random_shape(draw: random.Random) -> Shape:
    kind = draw.choice(["chain", "chain", "widths", "paths", "dynamic"])
    if kind == "chain":
        return parse_shape(str(draw.randint(1, 5)), "shape")
    if kind == "widths":
        return parse_shape(draw.choice(["2x2", "3", "3x1", "1x2x1", "2x1x2", "4x1"]), "shape")
    if kind == "dynamic":
        depth, top_k = draw.randint(1, 4), draw.randint(1, 4)
        nodes = draw.randint(depth, min(12, top_k + (depth - 1) * top_k**2))
        return parse_shape(f"dynamic:nodes={nodes},depth={depth},top_k={top_k}", "shape")
    paths: list[list[int]] = []
    for _ in range(draw.randint(1, 9)):
        above = draw.choice([[], *paths])
        rank = sum(path[:-1] == above for path in paths)
        if len(above) < 4 and rank < 4:
            paths.append([*above, rank])
    return parse_shape(str(paths or [[0]]).replace(" ", ""), "shape")


def random_case(seed: int, world: World, greedy: bool) -> Case:
    draw = random.Random(seed)
    prompts = draw.sample(POOL, draw.randint(1, 4))
    sampling = Sampling()
    if not greedy:
        sampling = Sampling(
            temperature=draw.choice([0.5, 1.0, 2.0]),
            top_k=draw.choice([0, 0, 1, 3, 20]),
            top_p=draw.choice([1.0, 0.9, 0.5]),
            min_p=draw.choice([0.0, 0.0, 0.1]),
        )
    elif draw.random() < 0.3:
        sampling = Sampling(top_k=2, top_p=0.4, min_p=0.5)  # ignored
    shape = random_shape(draw)
    choices = [EvalRule.auto, EvalRule.argmax_draft]
    rule = rule_of(draw.choice(choices), shape, sampling)
    if greedy and draw.random() < 0.3:  # every rule comes out as greedy at temperature 0
        certain = AcceptRule.argmax_draft if shape.is_chain else AcceptRule.tree_one_hot
        drawn = AcceptRule.rejection if shape.is_chain else AcceptRule.tree_without_replacement
        rule = draw.choice([certain, certain if isinstance(shape, DynamicShape) else drawn])
    said = [token for text in world.texts for token in text]
    text = str(world.verifier.tokenizer.decode(draw.choice(world.texts)))
    at = draw.randrange(len(text) - 2)
    stop = StopStrings((text[at : at + draw.randint(1, 3)], "~~"), world.verifier.tokenizer)
    settings = DecodeSettings(
        max_new_tokens=draw.choice([1, 2, 5, 9, 14]),
        eos_ids=draw.sample(said, draw.choice([0, 0, 1, 2])),
        shape=shape,
        stop=stop if draw.random() < 0.3 else None,
        sampling=sampling,
        rule=rule,
        measure_overlap=draw.random() < 0.3,
    )
    longest = max(len(ids) for ids in prompts)
    positions = draw.choice([POSITIONS, POSITIONS, longest + draw.randint(1, 9)])
    limit = draw.choice([POSITIONS, POSITIONS, draw.randint(1, 40)])
    seeds = [draw.randrange(10**6) for _ in prompts]
    return Case(
        prompts,
        seeds,
        settings,
        positions,
        (
            *(draw.choice([V, V, 20]), limit, draw.choice([0, 3, 9])),
            draw.random() < 0.5,
            draw.choice([1, 2]),
        ),
    )


def answers(world: World, case: Case, draft: LeaningDraft) -> list[Generation]:
    return decode(world.verifier, draft, case.prompts, case.settings, case.seeds).generations


@contextmanager
def limited(world: World, positions: int) -> Iterator[None]:
    """A verifier of so many positions meanwhile."""
    facts = world.verifier.facts
    world.verifier.facts = replace(facts, max_positions=positions)
    try:
        yield
    finally:
        world.verifier.facts = facts


@torch.inference_mode()
def mismatch(world: World, case: Case) -> str | None:
    """Where the loop and the reference part; None: nowhere."""
    with limited(world, case.positions):
        draft = world.head(*case.draft)
        found = answers(world, case, draft)
        for one, prompt, seed in zip(found, case.prompts, case.seeds, strict=True):
            wanted = Naive(world.verifier, draft, case.settings, seed).decode(prompt)
            rounds = [(r.proposed, r.accepted, r.tested) for r in one.rounds]
            pairs = {
                "tokens": (one.tokens, wanted.tokens),
                "rounds": (rounds, wanted.rounds),
                "ranks": (one.ranks, wanted.ranks),
                "overlap": (one.overlap, pytest.approx(wanted.overlap, abs=1e-5)),
            }
            for name, (ours, theirs) in pairs.items():
                if ours != theirs:
                    return f"prompt {prompt}, {name}: {ours} instead of {theirs}"
    return None


SAMPLED = pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])


@SAMPLED
def test_random_cases(world: World, greedy: bool):
    for seed in range(25):
        case = random_case(seed, world, greedy)
        assert mismatch(world, case) is None, case


@pytest.mark.slow
@pytest.mark.timeout(1200)
@SAMPLED
def test_hundreds_of_random_cases(world: World, greedy: bool):
    """About a minute each on an idle machine."""
    for seed in range(1000, 1300):
        case = random_case(seed, world, greedy)
        assert mismatch(world, case) is None, case


@torch.inference_mode()
@pytest.mark.parametrize("world", ["float64"], indirect=True)
def test_what_is_drawn_reaches_every_corner(world: World):
    """The random cases are worth their time: each of these happens in them, and not once only."""
    seen: Counter[str] = Counter()
    for seed in range(25):
        for greedy in (True, False):
            case = random_case(seed, world, greedy)
            shape, settings = case.settings.shape, case.settings
            seen[f"rule {settings.rule.value}"] += 1
            seen["dynamic"] += isinstance(shape, DynamicShape)
            with limited(world, case.positions):
                found = answers(world, case, world.head(*case.draft))
            for one, prompt in zip(found, case.prompts, strict=True):
                short = len(one.tokens) < settings.max_new_tokens
                full = len(prompt) + len(one.tokens) == case.positions
                end = one.tokens[-1] in settings.eos_ids
                seen["no room"] += not one.rounds and len(one.tokens) > 1
                seen["less room"] += any(len(r.proposed) < shape.nodes for r in one.rounds)
                seen["end of sequence"] += end
                seen["no position left"] += full and short
                seen["stop string"] += short and not full and not end
                for r in one.rounds:
                    seen[f"accepted {min(r.accepted, 3)}"] += 1
    corners = {f"rule {rule.value}" for rule in AcceptRule if rule not in LOSSY}
    corners |= {f"accepted {n}" for n in range(4)}
    corners |= {"dynamic", "no room", "less room", "end of sequence", "stop string"}
    corners |= {"no position left"}
    assert {name for name, times in seen.items() if times > 1} >= corners, seen


QUICK = ("rows stay where they were", "states of the first nodes")  # found within seconds
FAULTS = {  # what stands in for a method of the loop, and does it wrongly
    "rows stay where they were": (KVCache, "_move", lambda *_: None),
    "dice stay where they were": (
        OwnDice,
        "keep",
        lambda self, rows: vars(self).update(generators=self.generators[: len(rows)]),
    ),
    "rows of the draft stay where they were": (
        DraftCache,
        "keep",
        lambda self, rows: vars(self).update(
            ends=[self.ends[row] for row in rows],
            keys=self.keys if self.keys is None else self.keys[: len(rows)],
            values=self.values if self.values is None else self.values[: len(rows)],
        ),
    ),
    "states of the first nodes": (
        TargetDecoder,
        "commit",
        lambda self, path, accepted, line: (
            self.cache.commit(path, accepted, line),
            self.states[:, : max(accepted) + 1],
        )[1],
    ),
    "one level too many": (
        Speculation,
        "rooms",
        lambda self: [
            min(self.shape.depth, max(0, self.draft.last_position - output.length + 4))
            for output in self.batch.running
        ],
    ),
}


@pytest.mark.parametrize("world", ["float64"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS],
)
def test_faults_are_found(world: World, monkeypatch: pytest.MonkeyPatch, fault: str):
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    full = [(seed, greedy) for seed in range(25) for greedy in (True, False)]
    cases = (replace(random_case(one[0], world, one[1]), positions=POSITIONS) for one in full)
    assert any(mismatch(world, case) is not None for case in cases)
