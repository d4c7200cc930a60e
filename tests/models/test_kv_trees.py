"""Trees of guesses in the cache: a node's logits are those of its path as plain text."""

import random

import pytest
import torch
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel

from models.branches import Branches
from models.kv import KVCache

VOCAB = 128
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "initializer_range": 0.25,  # attention far from uniform, so that a wrong row shows
}
LENGTHS = [3, 9, 5]


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def chunked() -> PreTrainedModel:
    """Chunks of 4 tokens in three layers of four; two experts in every second layer."""
    torch.manual_seed(0)
    mixture = {"num_local_experts": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64}
    config = Llama4TextConfig(attention_chunk_size=4, **{**SIZES, **mixture})
    model = Llama4ForCausalLM(config)
    for weight in model.parameters():  # the library leaves the experts' as they lie in memory
        weight.data.normal_(std=0.1)
    return model.eval().requires_grad_(False)


class Trees:
    """A batch of random trees over a root and ``guesses`` nodes each, parents first."""

    def __init__(self, batch: int, guesses: int, seed: int):
        draw = random.Random(seed)
        self.size = guesses + 1
        self.parents = [[draw.randint(0, n) for n in range(guesses)] for _ in range(batch)]
        self.ids = [[draw.randrange(VOCAB) for _ in range(self.size)] for _ in range(batch)]
        self.tokens = torch.tensor(self.ids)
        self.branches = Branches.of_parents(torch.tensor(self.parents, dtype=torch.long), guesses)

    def path(self, row: int, node: int) -> list[int]:
        """From the root, which is not among them, to ``node``."""
        return [] if node == 0 else [*self.path(row, self.parents[row][node - 1]), node]

    def text(self, row: int, path: list[int]) -> list[int]:
        return [self.ids[row][node] for node in (0, *path)]


class Run:
    """A cache, and the text that each of its sequences should hold."""

    def __init__(self, model: PreTrainedModel, lengths: list[int], capacity: int = 60):
        draw = random.Random(7)
        self.model = model
        self.texts = [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]
        self.cache = KVCache(model.config, len(lengths), capacity, CPU, model.dtype)
        padded = [text + [0] * (max(lengths) - len(text)) for text in self.texts]
        self.feed(torch.tensor(padded))
        self.cache.advance(lengths)

    def feed(self, ids: Tensor, branches: Branches | None = None) -> Tensor:
        """Logits [B, T, V]."""
        steps = ids.shape[1]
        return self.model(
            input_ids=ids,
            attention_mask=self.cache.mask(steps, branches),
            position_ids=self.cache.positions(steps, branches),
            cache=self.cache,
            use_cache=True,
        ).logits

    def plain(self, row: int, more: list[int]) -> Tensor:
        """Logits [V] after the row's text and ``more``, without a cache."""
        ids = torch.tensor([self.texts[row] + more])
        return self.model(input_ids=ids, use_cache=False).logits[0, -1]

    def difference(self, logits: Tensor, trees: Trees) -> float:
        """The largest over all nodes, as a share of the largest logit."""
        wanted = [
            self.plain(row, trees.text(row, trees.path(row, node)))
            for row in range(len(self.texts))
            for node in range(trees.size)
        ]
        apart = (logits.flatten(0, 1) - torch.stack(wanted)).abs().max()
        return float(apart / torch.stack(wanted).abs().max())

    def commit(self, trees: Trees, ends: list[int], counts: list[int]) -> None:
        """Keep the first counts[b] nodes on the way to node ends[b]."""
        paths = [trees.path(row, end) for row, end in enumerate(ends)]
        width = max(map(len, paths))
        padded = torch.tensor([path + [0] * (width - len(path)) for path in paths])
        self.cache.commit(padded, counts)
        self.note(trees, paths, counts)

    def note(self, trees: Trees, paths: list[list[int]], counts: list[int]) -> None:
        for row, (path, count) in enumerate(zip(paths, counts, strict=True)):
            self.texts[row] += trees.text(row, path[:count])

    def deepest(self, trees: Trees) -> list[int]:
        return trees.branches.depth.argmax(-1).tolist()


@pytest.mark.parametrize("guesses", [1, 4, 9])
@pytest.mark.parametrize("lengths", [[6], [6, 6], LENGTHS])
def test_nodes_equal_their_paths_and_what_is_committed_stays(
    llama: PreTrainedModel, lengths: list[int], guesses: int
):
    """Four rounds; every sequence keeps another part of another path, none and all among them."""
    run, draw = Run(llama, lengths), random.Random(guesses)
    for seed in range(4):
        trees = Trees(len(lengths), guesses, seed)
        logits = run.feed(trees.tokens, trees.branches)
        assert run.difference(logits, trees) < 1e-5
        ends = run.deepest(trees) if seed % 2 else [draw.randint(0, guesses) for _ in lengths]
        depths = [len(trees.path(row, end)) for row, end in enumerate(ends)]
        counts = depths if seed % 2 else [draw.randint(0, depth) for depth in depths]
        run.commit(trees, ends, counts)
        assert run.cache.lengths.tolist() == [len(text) for text in run.texts]
    line = Trees(len(lengths), 3, seed=9)
    line.parents = [[0, 1, 2]] * len(lengths)
    assert run.difference(run.feed(line.tokens), line) < 1e-5


def test_a_tree_in_a_batch_equals_the_tree_alone(llama: PreTrainedModel):
    trees = Trees(3, 6, seed=3)
    together = Run(llama, LENGTHS)
    logits = together.feed(trees.tokens, trees.branches)
    for row, length in enumerate(LENGTHS):
        alone = Run(llama, [length])
        alone.cache = KVCache(llama.config, 1, 60, CPU, llama.dtype)
        alone.feed(torch.tensor([together.texts[row]]))
        alone.cache.advance(length)
        own = Branches(trees.branches.depth[[row]], trees.branches.seen[[row]])
        found = alone.feed(trees.tokens[[row]], own)[0]
        assert float((found - logits[row]).abs().max() / found.abs().max()) < 1e-5


def test_a_line_as_branches_is_a_line(llama: PreTrainedModel):
    """The same logits without them; and a path that is one moves nothing, said or not."""
    run, other = Run(llama, LENGTHS), Run(llama, LENGTHS)
    line = Branches.of_parents(torch.arange(4).repeat(3, 1), 4)
    tokens = torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(run.feed(tokens, line), other.feed(tokens), rtol=0, atol=1e-5)
    path, counts = torch.tensor([[1, 2, 3, 4]] * 3), [4, 0, 2]
    run.cache.commit(path, counts)
    other.cache.commit(path, torch.tensor(counts), line=True)
    assert run.cache.lengths.tolist() == other.cache.lengths.tolist() == [8, 10, 8]
    more = tokens[:, :1]
    assert torch.allclose(run.feed(more), other.feed(more), rtol=0, atol=1e-5)


def test_a_tree_on_an_empty_cache(llama: PreTrainedModel):
    run = Run(llama, [2])
    run.cache, run.texts = KVCache(llama.config, 1, 20, CPU, llama.dtype), [[]]
    trees = Trees(1, 6, seed=4)
    assert run.difference(run.feed(trees.tokens, trees.branches), trees) < 1e-5


@pytest.mark.parametrize("lengths", [[6], LENGTHS])
def test_chunks_of_a_tree_go_by_position(chunked: PreTrainedModel, lengths: list[int]):
    run = Run(chunked, lengths)
    for seed in range(3):
        trees = Trees(len(lengths), 6, seed)
        logits = run.feed(trees.tokens, trees.branches)
        assert run.difference(logits, trees) < 1e-5
        ends = run.deepest(trees)
        run.commit(trees, ends, [len(trees.path(row, end)) for row, end in enumerate(ends)])
    assert max(len(text) for text in run.texts) > 12


def test_sequences_that_leave_take_their_rows_with_them(llama: PreTrainedModel):
    run = Run(llama, LENGTHS)
    trees = Trees(3, 6, seed=5)
    run.feed(trees.tokens, trees.branches)
    ends = run.deepest(trees)
    run.commit(trees, ends, [len(trees.path(row, end)) for row, end in enumerate(ends)])
    run.cache.keep(torch.tensor([2, 1]))
    run.texts = [run.texts[2], run.texts[1]]
    trees = Trees(2, 6, seed=6)
    assert run.difference(run.feed(trees.tokens, trees.branches), trees) < 1e-5
    ends = run.deepest(trees)
    run.commit(trees, ends, [len(trees.path(row, end)) for row, end in enumerate(ends)])
    more = Trees(2, 2, seed=8)
    assert run.difference(run.feed(more.tokens, more.branches), more) < 1e-5


# ---- controls: what the tests above would see ------------------------------------------------


def wrong(run: Run, trees: Trees, branches: Branches) -> float:
    return run.difference(run.feed(trees.tokens, branches), trees)


def test_controls_of_positions_and_mask(llama: PreTrainedModel):
    trees = Trees(3, 6, seed=1)
    depth, seen = trees.branches.depth, trees.branches.seen
    in_order = torch.arange(7).repeat(3, 1)
    assert wrong(Run(llama, LENGTHS), trees, Branches(in_order, seen)) > 1e-3
    itself_alone = torch.eye(7, dtype=torch.bool).repeat(3, 1, 1)
    assert wrong(Run(llama, LENGTHS), trees, Branches(depth, itself_alone)) > 1e-3
    all_before = torch.ones(7, 7, dtype=torch.bool).tril().repeat(3, 1, 1)
    assert wrong(Run(llama, LENGTHS), trees, Branches(depth, all_before)) > 1e-3
    others = Branches(depth.roll(1, 0), seen.roll(1, 0))  # each sequence with its neighbour's tree
    assert wrong(Run(llama, LENGTHS), trees, others) > 1e-3


@pytest.mark.parametrize("off", [-1, 1, None])
def test_controls_of_compaction(llama: PreTrainedModel, off: int | None):
    """Rows off by one, or left where they were."""
    run, trees = Run(llama, [6, 4]), Trees(2, 6, seed=2)
    trees.parents = [[0, 0, 2, 2, 4, 0]] * 2
    trees.branches = Branches.of_parents(torch.tensor(trees.parents), trees.size)
    run.feed(trees.tokens, trees.branches)
    path = [2, 4, 5]
    if off is None:
        run.cache.commit(torch.tensor([path] * 2), [3, 3], line=True)
    else:
        run.cache.commit(torch.tensor([path] * 2) + off, [3, 3])
    run.note(trees, [path] * 2, [3, 3])
    line = Trees(2, 1, seed=3)
    assert run.difference(run.feed(line.tokens, line.branches), line) > 1e-3


def test_commits_that_do_not_fit_are_refused(llama: PreTrainedModel):
    run = Run(llama, [6, 4], capacity=9)
    with pytest.raises(ValueError, match="3 counts for a batch of 2"):
        run.cache.commit(torch.ones(2, 1, dtype=torch.long), [0, 0, 0])
    with pytest.raises(ValueError, match=r"6 cached \+ 5 new tokens exceed capacity=9"):
        run.feed(Trees(2, 4, seed=1).tokens, Trees(2, 4, seed=1).branches)
    with pytest.raises(ValueError, match=r"leave 0\.\.capacity=9"):
        run.cache.commit(torch.tensor([[1, 2, 3]] * 2), [3, 0], line=True)
    assert run.cache.lengths.tolist() == [6, 4]
