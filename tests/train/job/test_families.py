"""Every verifier family down the whole road: files, states, cache, training steps, export.

Tiny random models of the library's own classes. What they must give is what the library gives on
the same files, loaded apart.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as library
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from conf.runtime import RankInfo
from conf.schema import (
    FULL,
    Attention,
    CaptureSection,
    ConfigError,
    Device,
    DraftSection,
    HeadInit,
    Precision,
    RunConfig,
    StateDtype,
    VerifierSection,
)
from conf.shapes import parse_shape
from data.capture import capture
from data.loader import TrainLoader
from data.prepare import find_prepared, prepare
from data.reader import ShardReader
from eval.decode import DecodeSettings, decode
from models.architecture import auto_class
from models.branches import Branches
from models.eagle3 import DraftConfig, DraftOutput, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.read import read_head
from models.export.write import export
from models.kv import KVCache
from models.masks import Reach
from models.verifier import Verifier, VerifierStates, load_ends, scaled_logits, tensor_files
from models.vocab import DraftVocab
from train.loop import build, row_weights

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0)
SLOW = pytest.mark.slow
LENGTH, WINDOW = 40, 16
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # five times the usual: attention and experts then have a say
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
LONGROPE = {  # LENGTH is beyond the original limit
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WIDE = {"head_dim": 32}  # heads * head_dim is not the width


def make(name: str, **more: Any) -> PreTrainedConfig:
    return getattr(library, f"{name}Config")(**{**SIZES, **more})


def gemma3(**more: Any) -> PreTrainedConfig:
    return make("Gemma3Text", **WIDE, sliding_window=WINDOW, **more)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Llama": lambda: make("Llama", rope_parameters=LLAMA3, tie_word_embeddings=False),
    "Mistral": lambda: make("Mistral", head_dim=16, sliding_window=WINDOW),
    "Qwen2": lambda: make("Qwen2", tie_word_embeddings=True),
    "Qwen2Sliding": lambda: make(
        "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=4
    ),
    "Qwen3": lambda: make("Qwen3", **WIDE),
    "Qwen3Moe": lambda: make("Qwen3Moe", head_dim=16, num_experts=4, **MIXTURE),
    "Gemma2": lambda: make(
        "Gemma2",
        **WIDE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        final_logit_softcapping=2.0,
    ),
    "Gemma3Text": lambda: gemma3(final_logit_softcapping=2.0),
    "Gemma3": lambda: library.Gemma3Config(
        text_config=gemma3().to_dict(),
        vision_config=EYES,
        image_token_index=127,
        mm_tokens_per_image=4,
    ),
    "Mistral3": lambda: library.Mistral3Config(
        text_config=make("Mistral", head_dim=16, sliding_window=None),
        vision_config=library.PixtralVisionConfig(**EYES, head_dim=16),
        image_token_index=127,
    ),
    "Phi3": lambda: make(
        "Phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=WINDOW
    ),
    "Phi3Sliding": lambda: make("Phi3", sliding_window=WINDOW),
    "GptOss": lambda: make(
        "GptOss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={**YARN, "rope_theta": 1.5e5, "truncate": False},
    ),
    "DeepseekV3": lambda: make(
        "DeepseekV3",
        **{**MIXTURE, **LATENT},
        rope_parameters={**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "Olmo": lambda: make("Olmo"),
    "Olmo2": lambda: make("Olmo2"),
    "Olmo3": lambda: make("Olmo3", sliding_window=WINDOW),
    "Granite": lambda: make(
        "Granite", logits_scaling=8.0, embedding_multiplier=12.0, tie_word_embeddings=True
    ),
    "Cohere": lambda: make("Cohere", logit_scale=0.0625),
    "Cohere2": lambda: make("Cohere2", logit_scale=0.0625, sliding_window=WINDOW),
    "Glm4": lambda: make("Glm4", head_dim=16, partial_rotary_factor=0.5),
}
EAGER_ALONE = ("Gemma2", "GptOss")
WINDOWED = (
    *("Mistral", "Qwen2Sliding", "Gemma2", "Gemma3Text", "Gemma3", "Phi3Sliding", "GptOss"),
    *("Olmo3", "Cohere2"),
)
SCALED = ("Gemma2", "Gemma3Text", "Granite", "Cohere", "Cohere2")
TIED = ("Qwen2", "Gemma2", "Gemma3Text", "Gemma3", "Mistral3", "Granite", "Cohere", "Cohere2")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Callable[[str], Path]:
    """Name -> the folder of that family's tiny model, made when first asked for."""
    folder = tmp_path_factory.mktemp("families")

    def save(name: str) -> Path:
        place = folder / name
        if not place.is_dir():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = FAMILIES[name]()
                model = auto_class(config).from_config(config)
            model.save_pretrained(place)
            for path in (*tiny_verifier.glob("token*"), *tiny_verifier.glob("*.jinja")):
                os.link(path, place / path.name)
        return place

    return save


@pytest.fixture(scope="module")
def section(family: str, saved: Callable[[str], Path]) -> VerifierSection:
    attention = Attention.eager if family in EAGER_ALONE else Attention.sdpa
    return VerifierSection(str(saved(family)), Precision.float32, attention)


@pytest.fixture(scope="module")
def verifier(section: VerifierSection) -> Verifier:
    return Verifier.load(section, Path(section.path), CPU, torch.float32)


def library_model(section: VerifierSection, **changes: Any) -> PreTrainedModel:
    config = library.AutoConfig.from_pretrained(section.path)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    return auto_class(config).from_pretrained(
        section.path, config=config, attn_implementation=section.attention.value
    )


def some_ids(rows: int = 4) -> Tensor:
    return torch.randint(3, 120, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def library_streams(model: PreTrainedModel, ids: Tensor) -> Any:
    """hidden_states of length L + 1, the last one normed, and logits."""
    return model(input_ids=ids, use_cache=False, output_hidden_states=True)


def apart(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


# ---- the states are the library's -----------------------------------------------------------


def test_states_and_logits_are_the_librarys(section, verifier: Verifier):
    """Bit by bit: the streams after n layers, the normed state, and what the head makes of it."""
    ids = some_ids()
    wanted = library_streams(library_model(section), ids)
    assert len(wanted.hidden_states) == 9 and verifier.facts.aux_layers == [2, 4, 5]
    found = verifier.states(ids)
    streams = torch.cat([wanted.hidden_states[n] for n in (2, 4, 5)], -1)
    assert torch.equal(found.aux, streams)
    assert torch.equal(found.last, wanted.hidden_states[8])
    assert torch.equal(verifier.logits_from(found.last), wanted.logits)
    early = torch.cat([wanted.hidden_states[n - 1] for n in (2, 4, 5)], -1)
    assert not torch.allclose(found.aux, early)  # one layer off would be seen


def test_a_scale_or_a_cap_of_the_logits_shows(family: str, verifier: Verifier):
    last = verifier.states(some_ids()).last
    plain = verifier.head(last)
    assert torch.equal(verifier.logits_from(last), plain) == (family not in SCALED)


def test_embedding_and_head_are_read_from_the_files(family: str, section, verifier: Verifier):
    """By the model's own accessors, whatever their names there; a tied head is the embedding."""
    ends = load_ends(section, Path(section.path), torch.float32)
    assert torch.equal(ends.embedding, verifier.embedding)
    assert torch.equal(ends.head, verifier.head.weight)
    assert torch.equal(ends.head, ends.embedding) == (family in TIED)
    stored = [name for name in tensor_files(Path(section.path)) if "lm_head" in name]
    assert bool(stored) == (family not in TIED)
    last = verifier.states(some_ids()).last
    logits = scaled_logits(last @ ends.head.T, ends.config)
    assert apart(logits, verifier.logits_from(last)) < 1e-5


def test_batch_and_padding_change_nothing(verifier: Verifier):
    """Rows alone, in a batch of four, and cut short with padding behind."""
    ids, lengths = some_ids(), [LENGTH, 11, 29, 5]
    padded = ids.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 0
    whole, short = verifier.states(ids), verifier.states(padded)
    for row, length in enumerate(lengths):
        one, cut = verifier.states(ids[row : row + 1]), verifier.states(ids[row : row + 1, :length])
        for part in ("aux", "last"):
            alone = getattr(one, part)[0]
            assert apart(getattr(whole, part)[row], alone) < 1e-5
            assert apart(getattr(short, part)[row, :length], getattr(cut, part)[0]) < 1e-5
            assert apart(getattr(cut, part)[0], alone[:length]) < 1e-5


def test_eager_and_sdpa_give_the_same_states(family: str, section, verifier: Verifier):
    asked = Attention.sdpa if section.attention is Attention.eager else Attention.eager
    other = replace(section, attention=asked)
    if family in EAGER_ALONE:
        with pytest.raises(ConfigError, match=r"attention=sdpa: .* no such kernel; take .*eager"):
            Verifier.load(other, Path(section.path), CPU, torch.float32)
        return
    found = Verifier.load(other, Path(section.path), CPU, torch.float32).states(some_ids())
    wanted = verifier.states(some_ids())
    assert apart(found.aux, wanted.aux) < 1e-5 and apart(found.last, wanted.last) < 1e-5


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_is_at_work(name: str, saved: Callable[[str], Path]):
    """The control of the states beyond it: without the window the library gives others."""
    section = VerifierSection(str(saved(name)), attention=Attention.eager)
    ids = some_ids(1)
    with_it, without = (
        library_streams(library_model(section, **changes), ids).hidden_states[8][0]
        for changes in ({}, {"sliding_window": 4 * LENGTH})
    )
    assert apart(without[:WINDOW], with_it[:WINDOW]) < 1e-5
    assert apart(without[WINDOW + 1 :], with_it[WINDOW + 1 :]) > 1e-3


def test_longrope_would_couple_a_batch(saved: Callable[[str], Path]):
    """The control of its fixed table: alone, the library gives the start of a text other states."""
    model = library_model(VerifierSection(str(saved("Phi3"))))
    ids = some_ids(1)
    long, short = (library_streams(model, part).hidden_states[8] for part in (ids, ids[:, :11]))
    assert apart(short, long[:, :11]) > 1e-3


# ---- decoding gives the states of the whole text --------------------------------------------

SHARES = [33, 14, 5]  # of three prompts: beyond the window, about to leave it, within


def prefilled(verifier: Verifier, ids: Tensor) -> KVCache:
    """Three ragged prompts, padded on the right for one forward."""
    cache = KVCache(verifier.model.config, 3, LENGTH + 16, CPU, torch.float32)
    verifier.states(ids[:, : max(SHARES)], cache)
    cache.advance(SHARES)
    return cache


class RandomTree:
    """A root and guesses; parents come first. Tokens are drawn too."""

    def __init__(self, guesses: int, seed: int):
        draw = random.Random(seed)
        self.parents = [draw.randint(0, node) for node in range(guesses)]  # of nodes 1..guesses
        self.tokens = [draw.randint(3, 119) for _ in range(guesses + 1)]

    def path_of(self, node: int) -> list[int]:
        """The nodes from the root, which is not among them, to ``node``."""
        return [] if node == 0 else [*self.path_of(self.parents[node - 1]), node]

    def text_of(self, node: int) -> list[int]:
        return [self.tokens[n] for n in (0, *self.path_of(node))]


def worst(found: VerifierStates, wanted: VerifierStates, ends: list[int]) -> float:
    """The largest difference of T new rows [3, T] from those of the whole texts up to ``ends``."""
    steps = found.last.shape[1]
    return max(
        apart(getattr(found, part)[row], getattr(wanted, part)[row, end - steps : end])
        for part in ("aux", "last")
        for row, end in enumerate(ends)
    )


def test_cached_steps_give_the_states_of_the_whole_text(verifier: Verifier):
    """Ragged, within the window and beyond it, one token a step or several."""
    ids = some_ids(3)
    wanted = verifier.states(ids)
    cache, at = prefilled(verifier, ids), list(SHARES)
    for steps in (1, 1, 4, 1):
        tokens = torch.stack([ids[row, n : n + steps] for row, n in enumerate(at)])
        found = verifier.states(tokens, cache)
        cache.advance(steps)
        at = [n + steps for n in at]
        assert worst(found, wanted, at) < 1e-4


def test_tree_nodes_give_the_states_of_their_paths(verifier: Verifier):
    """Two trees, another one for each sequence; what the first accepts, the second stands on."""
    ids = some_ids(3)
    texts = [ids[row, :n].tolist() for row, n in enumerate(SHARES)]
    cache = prefilled(verifier, ids)
    for seed in (1, 2):
        trees = [RandomTree(7, seed=10 * seed + row) for row in range(3)]
        tokens = torch.tensor([tree.tokens for tree in trees])
        parents = torch.tensor([tree.parents for tree in trees])
        branches = Branches.of_parents(parents, parents.shape[1])
        found = verifier.states(tokens, cache, branches)
        wanted = [
            verifier.states(torch.tensor([text + tree.text_of(node)]))
            for text, tree in zip(texts, trees, strict=True)
            for node in range(8)
        ]
        for part in ("aux", "last"):
            rows = torch.stack([getattr(states, part)[0, -1] for states in wanted])
            assert apart(getattr(found, part).flatten(0, 1), rows) < 1e-4
        paths = [tree.path_of(7 - row) for row, tree in enumerate(trees)]
        padded = torch.tensor([path + [0] * (7 - len(path)) for path in paths])
        cache.commit(padded, [len(path) for path in paths])
        for text, tree, row in zip(texts, trees, range(3), strict=True):
            text += tree.text_of(7 - row)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_without_the_window_gives_other_states(name: str, saved: Callable[[str], Path]):
    section = VerifierSection(str(saved(name)), Precision.float32, Attention.eager)
    verifier = Verifier.load(section, Path(section.path), CPU, torch.float32)
    ids = some_ids(3)
    cache = prefilled(verifier, ids)
    cache.reaches = [Reach(reach.kind) for reach in cache.reaches]
    tokens = torch.stack([ids[row, n : n + 4] for row, n in enumerate(SHARES)])
    found = verifier.states(tokens, cache)
    wanted = verifier.states(ids)
    assert worst(found, wanted, [n + 4 for n in SHARES]) > 1e-3
    assert apart(found.last[2], wanted.last[2, 5:9]) < 1e-4  # within it the two are one


class Leaning(Eagle3Draft):
    """A random head that leans towards the last successor of a token in texts it has seen."""

    following: Tensor  # [V]

    def share_of(self, tokens: Tensor, asks: bool = True) -> Tensor:
        self.tokens = tokens
        return super().share_of(tokens, asks)

    def forward(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories, known: bool = False
    ) -> DraftOutput:
        output = super().forward(share, hidden, positions, memories, known)
        beside = self.tokens[..., None].to(output.normed.dtype)
        return DraftOutput(output.hidden, torch.cat([output.normed, beside], -1))

    def logits(self, normed: Tensor) -> Tensor:
        token = self.following[normed[..., -1].long()]
        return (
            super()
            .logits(normed[..., :-1])
            .scatter_add(
                -1, self.to_draft_ids(token)[..., None], torch.full(token.shape, 9.0)[..., None]
            )
        )


def leaning(section: VerifierSection, verifier: Verifier, texts: list[list[int]]) -> Leaning:
    draft = Leaning(DraftConfig.of(DraftSection(vocab_size=FULL), verifier.facts))
    ends = load_ends(section, Path(section.path), torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        draft.initialise(ends, DraftVocab.from_counts(torch.ones(128), 128), HeadInit.verifier)
    draft.following = torch.zeros(128, dtype=torch.long)
    for text in texts:
        for token, following in pairwise(text):
            draft.following[token] = following
    return draft.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "names",
    [["2x2"], pytest.param(["4", "3x1x2", "dynamic:nodes=7,depth=3,top_k=3"], marks=SLOW)],
    ids=["a tree", "other shapes"],
)
def test_rounds_emit_the_greedy_text(section, verifier: Verifier, names: list[str]):
    """Three ragged prompts, within the window, about to leave it and beyond it, with a draft.

    The text is that of whole forwards, alone and without a cache; which parts of a tree stand moves
    rows of every layer about. There is no family here that decoding refuses.
    """
    ids, size = some_ids(3), 10
    prompts = [ids[row, :length].tolist() for row, length in enumerate(SHARES)]
    wanted: list[list[int]] = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(size):
            last = verifier.states(torch.tensor([text])).last[0, -1]
            text.append(int(verifier.logits_from(last).argmax()))
        wanted.append(text[len(prompt) :])
    draft = leaning(section, verifier, wanted)
    for name in names:
        settings = DecodeSettings(size, eos_ids=[], shape=parse_shape(name, "shape"))
        found = decode(verifier, draft, prompts, settings).generations
        assert [one.tokens for one in found] == wanted
        assert any(r.accepted for one in found for r in one.rounds)


# ---- a head that follows them ---------------------------------------------------------------


@pytest.fixture
def cfg(place, section: VerifierSection, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache, cfg.run.device = str(tmp_path / "cache"), Device.cpu
    cfg.verifier = section
    cfg.data.path = [str(place.folder / "answers.jsonl")]
    cfg.data.valid_share = 0.2
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=256)
    cfg.draft = DraftSection(vocab_size=64)
    cfg.ttt.depth = 3
    cfg.engine.precision = Precision.float32
    cfg.optim.packs_per_step, cfg.optim.micro_batch_tokens = 3, 256
    return cfg


def test_prepare_capture_train_export(cfg: RunConfig, verifier: Verifier, tmp_path: Path):
    prepare(cfg)
    prepared = find_prepared(cfg)
    reader = ShardReader(capture(cfg, prepared, ALONE))
    for index in range(len(reader)):  # as many states as ids and mask entries
        one = reader.read(index)
        ids, mask = prepared.samples[index].input_ids, prepared.samples[index].loss_mask
        assert len(one.aux) == len(one.sample.loss_mask) == len(ids)
        assert {len(x) for x in (one.last, one.argmax, one.lse)} == {int(mask[1:].sum())}
    module = build(cfg, prepared, reader, CPU)
    losses = train(cfg, module, TrainLoader(reader, cfg.optim, cfg.ttt, 0, ALONE))
    assert losses[-1] < 0.9 * losses[0]
    exported = tmp_path / "head"
    card = CardFacts("a/verifier", "a/verifier", "float32", "0123", DataFacts("answers.jsonl"))
    export(module.draft.eval(), verifier.facts, exported, card, Precision.float32)
    again = read_head(exported, verifier.facts, verifier.ends)
    assert again.config == module.draft.config
    assert again.config.head_dim == module.draft.midlayer.self_attn.head_dim


def train(cfg: RunConfig, module, loader: TrainLoader) -> list[float]:
    """Eight plain steps -> their losses."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for step in range(8):
        batches = loader.window(step % loader.steps_per_epoch).batches
        weights = row_weights(cfg, batches).weights
        optimizer.zero_grad()
        loss = torch.stack([module(b, w).loss for b, w in zip(batches, weights, strict=True)]).sum()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trainable)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", "DeepseekV3", "Phi3"])
def test_the_whole_job(name: str, place, saved: Callable[[str], Path]):
    """torchrun on two ranks, from conversations to an exported head, as people start it."""
    words = [f"verifier.path={saved(name)}", "eval.max_new_tokens=3"]
    place.finish(place.words(f"of-{name}", *words, cache=f"cache-{name}"), ranks=2)
    run = place.run(f"of-{name}")
    assert (run / "export" / "vllm" / "config.json").is_file()
    report = json.loads((run / "eval" / "report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0
