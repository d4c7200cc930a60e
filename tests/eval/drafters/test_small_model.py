"""The small model in the loop: what it says after any round is what it says of the text alone."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from conf.shapes import parse_shape
from eval.drafters.small_model import SmallModelDrafter
from eval.propose import propose
from eval.round_plan import RoundPlan
from eval.verify import AcceptRule
from models.sampling import Sampling, SharedDice
from models.small_model import ModelConfig, SmallModel
from models.verifier import VerifierStates

VOCAB, N = 128, 3
PROMPTS = [[5, 9, 40, 41, 3], [7, 30]]
ROOTS = [8, 31]
UNREAD = VerifierStates(torch.empty(0), torch.empty(0))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small() -> SmallModel:
    layout = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        draft = SmallModel.new(ModelConfig(layout.to_dict(), VOCAB, 512))
    return draft.eval().requires_grad_(False)


def begun(draft: SmallModel) -> SmallModelDrafter:
    side = SmallModelDrafter(draft, 2, 40, CPU)
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in PROMPTS])
    side.begin(padded, UNREAD, torch.tensor(ROOTS)[:, None], [len(ids) for ids in PROMPTS])
    return side


def alone(draft: SmallModel, text: list[int]) -> Tensor:
    """Logits [V] after ``text``, by the library without a cache."""
    return draft.lm(torch.tensor([text])).logits[0, -1]


def equal(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-5)


def test_chains_are_what_the_model_generates(small: SmallModel):
    side = begun(small)
    logits, guesses = side.start(), [[], []]
    for _ in range(8):
        ids = logits.argmax(-1)  # [B, 1]
        for own, token in zip(guesses, ids[:, 0].tolist(), strict=True):
            own.append(token)
        logits = side.step(ids, torch.zeros_like(ids))
    for prompt, root, own in zip(PROMPTS, ROOTS, guesses, strict=True):
        text = torch.tensor([[*prompt, root]])
        free = small.lm.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=8,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert own == free[0, text.shape[1] :].tolist()
    assert len({*guesses[0], *guesses[1]}) > 3


@pytest.mark.parametrize("second", [0, N])
@pytest.mark.parametrize("first", range(N + 1))
def test_after_any_acceptance_the_text_alone_counts(small: SmallModel, first: int, second: int):
    """``first`` and ``second`` of three guesses stand; where all do, the last was never fed."""
    side = begun(small)
    texts = [[*prompt, root] for prompt, root in zip(PROMPTS, ROOTS, strict=True)]
    for turn, accepted in enumerate(([first, second], [second, first], [first, first])):
        logits, guesses = side.start(), []
        for text, row in zip(texts, logits, strict=True):
            equal(row[0], alone(small, text))
        for depth in range(N):
            guesses.append(logits.argmax(-1))
            if depth < N - 1:
                logits = side.step(guesses[-1], torch.zeros_like(guesses[-1]))
        chain = torch.cat(guesses, 1)  # [B, N]
        rows = []
        for b, n in enumerate(accepted):
            new = [*chain[b, :n].tolist(), (17 * turn + 50 + b) % VOCAB]
            texts[b] += new
            rows.append([*new, *[0] * (max(accepted) + 1 - len(new))])
        side.feed(torch.tensor(rows), UNREAD, [n + 1 for n in accepted])
    for text, row in zip(texts, side.start(), strict=True):
        equal(row[0], alone(small, text))


def test_the_missing_row_is_felt(small: SmallModel):
    """The control: without the last guess's own row, the next round starts from another text."""
    side = begun(small)
    logits = side.start()
    first = logits.argmax(-1)
    side.step(first, torch.zeros_like(first))
    side.feed(torch.cat([first, first + 1], 1).clamp_max(VOCAB - 1), UNREAD, [2, 2])
    side.cache.advance(1)  # as if a guess more had been fed
    texts = [[*p, r, int(g), int(g) + 1] for p, r, g in zip(PROMPTS, ROOTS, first, strict=True)]
    wrong = [float((row[0] - alone(small, text)).abs().max()) for text, row in
             zip(texts, side.start(), strict=True)]  # fmt: skip
    assert min(wrong) > 1e-2


SHAPES = ["2x2x2", "3x1x2", "[[0],[1],[0,0],[0,0,0]]", "dynamic:nodes=9,depth=4,top_k=3"]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_a_node_are_those_of_its_path(small: SmallModel, name: str):
    """Ragged sequences, each with its own tree, then a round more from what stood."""

    class Spy:
        """Notes the path to each row of logits, and compares it with the library's."""

        def __init__(self, texts: list[list[int]], side: SmallModelDrafter):
            self.texts, self.side, self.target_ids = texts, side, side.target_ids
            self.seen = 0

        def start(self) -> Tensor:
            self.paths = [[[]], [[]]]
            return self.note(self.side.start())

        def step(self, ids: Tensor, parents: Tensor) -> Tensor:
            pairs = [
                zip(*rows, strict=True) for rows in zip(ids.tolist(), parents.tolist(), strict=True)
            ]
            self.paths = [[[*self.paths[b][p], i] for i, p in own] for b, own in enumerate(pairs)]
            return self.note(self.side.step(ids, parents))

        def note(self, logits: Tensor) -> Tensor:
            for b, text in enumerate(self.texts):
                for w, path in enumerate(self.paths[b]):
                    equal(logits[b, w], alone(small, [*text, *path]))
                    self.seen += 1
            return logits

    side, plan = begun(small), RoundPlan(AcceptRule.greedy, Sampling())
    texts = [[*prompt, root] for prompt, root in zip(PROMPTS, ROOTS, strict=True)]
    shape = parse_shape(name, "eval.trees")
    for turn, last in enumerate((shape.nodes, 2, shape.nodes)):  # 2: beside the likeliest
        spy = Spy(texts, side)
        proposal = propose(spy, shape, plan, SharedDice(0, 2))
        assert spy.seen >= 2 * shape.depth
        rows = []
        for b in range(2):  # the path to ``last`` stands in one sequence, its parent's in the other
            node, path = last, []
            while node:
                path.insert(0, int(proposal.ids[b, node - 1]))
                node = int(proposal.parents[b, node - 1])
            new = [*path[: len(path) - b], 60 + turn]
            texts[b] = [*texts[b], *new]
            rows.append(new)
        most = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (most - len(row))] for row in rows])
        side.feed(padded, UNREAD, [len(row) for row in rows])
    side.keep([1])
    equal(side.start()[0, 0], alone(small, texts[1]))
