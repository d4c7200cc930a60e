"""What users of other implementations reported, as tests of the whole loop: each names its number.

In batches and on trees; tests/eval/test_decode.py has chains of single sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import DraftSection, HeadInit, Precision, VerifierSection
from conf.shapes import DynamicShape, Shape, parse_shape
from eval import decode as loop
from eval.batch import Batch
from eval.decode import DecodeSettings, Speculation, decode
from eval.drafters.eagle3 import Eagle3Drafter
from eval.generation import Generation
from eval.sides import TargetDecoder
from eval.verify import AcceptRule
from models.eagle3 import DraftConfig, Eagle3Draft
from models.sampling import Sampling
from models.steps import Steps
from models.verifier import Verifier, VerifierStates, load_ends
from models.vocab import DraftVocab

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 60)), [9, 8, 7, 6]]
SHAPES = {  # and at which rank the right guess of each level stands
    "4": lambda _root, _depth: 0,
    "2x2x2": lambda root, depth: (root + depth) % 2,
    "[[0],[1],[0,0],[0,1],[0,0,0]]": lambda _root, _depth: 0,
    "dynamic:nodes=9,depth=3,top_k=3": lambda root, depth: root % 2 if depth == 1 else 0,
}
SETTINGS = DecodeSettings(max_new_tokens=16, eos_ids=[])


def shaped(name: str, settings: DecodeSettings = SETTINGS) -> DecodeSettings:
    return replace(settings, shape=parse_shape(name, "shape"))


@dataclass(frozen=True)
class Script:
    """What a scripted draft knows of each sequence, and how far it is right in each round."""

    texts: list[list[int]]  # prompt, greedy answer, and some more
    accepted: Callable[[int, int], int]  # (sequence, its round) -> how many guesses are right
    rank: Callable[[int, int], int]  # (root's index, depth) -> at which rank the right one stands


class ScriptedSide(Eagle3Drafter):
    """The real draft with its real cache; but for its logits, which follow ``script``."""

    script: Script

    def __init__(self, draft: Eagle3Draft, batch: int, capacity: int, device: torch.device):
        super().__init__(draft, batch, capacity, device)
        self.which = list(range(batch))
        self.round = [-1] * batch

    def start(self) -> Tensor:
        logits = super().start()
        self.round = [n + 1 for n in self.round]
        self.right = [[True] for _ in self.which]  # whether each row's path is the greedy text
        return self.scripted(logits, 1)

    def step(self, ids: Tensor, parents: Tensor) -> Tensor:
        depth = self._depth + 1  # of ``ids``
        for row, (chosen, above) in enumerate(zip(ids.tolist(), parents.tolist(), strict=True)):
            wanted = self.text(row)[self.committed[row] + depth]
            self.right[row] = [
                self.right[row][parent] and token == wanted
                for token, parent in zip(chosen, above, strict=True)
            ]
        return self.scripted(super().step(ids, parents), depth + 1)

    def text(self, row: int) -> list[int]:
        return self.script.texts[self.which[row]]

    def scripted(self, logits: Tensor, depth: int) -> Tensor:
        """Scores 12, 11, ... for the guesses of ``depth``, the right one at its rank or absent."""
        scores = torch.zeros_like(logits)
        for row, right in enumerate(self.right):
            root = self.committed[row]
            token = self.text(row)[root + depth]
            order = [(token + 1 + wrong) % logits.shape[-1] for wrong in range(4)]
            accepted = self.script.accepted(self.which[row], self.round[row])
            for node, on_path in enumerate(right):
                if on_path and depth <= accepted:
                    ranked = [*order]
                    ranked.insert(self.script.rank(root, depth), token)
                else:
                    ranked = order
                for rank, guess in enumerate(ranked):
                    scores[row, node, guess] = 12.0 - rank
        return scores

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.which = [self.which[row] for row in rows]
        self.round = [self.round[row] for row in rows]


@pytest.fixture(scope="module")
def plain(verifier: Verifier) -> list[Generation]:
    return decode(verifier, None, PROMPTS, SETTINGS, tail=6).generations


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, plain: list[Generation]):
    """scripted(prompts' indices, accepted, rank): the loop's draft side follows that."""

    def use(chosen: list[int], accepted, rank) -> Script:
        texts = [[*PROMPTS[i], *plain[i].tokens, *plain[i].tail] for i in chosen]
        script = Script(texts, accepted, rank)
        side = type("Side", (ScriptedSide,), {"script": script})
        monkeypatch.setattr(loop, "drafter_for", side)
        return script

    return use


@pytest.mark.parametrize("chosen", [[0], [0, 1, 2, 3]], ids=["alone", "ragged batch"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_rejection_at_any_position_is_followed_by_greedy_text(
    verifier: Verifier, make_draft, scripted, plain, name: str, chosen: list[int]
):
    """B75: each number of guesses stands in a round, after rounds of other numbers."""
    settings = shaped(name)
    depth = settings.shape.depth
    for accepted in range(depth + 1):

        def wanted(sequence: int, number: int, accepted: int = accepted) -> int:
            return accepted if number == 1 else (sequence + 2 * number) % (depth + 1)

        scripted(chosen, wanted, SHAPES[name])
        prompts = [PROMPTS[i] for i in chosen]
        found = decode(verifier, make_draft(), prompts, settings).generations
        for sequence, one in enumerate(found):
            script = [wanted(sequence, number) for number in range(len(one.rounds))]
            assert [r.accepted for r in one.rounds] == script
            assert one.tokens == plain[chosen[sequence]].tokens


def play(verifier: Verifier, draft: Eagle3Draft, settings: DecodeSettings) -> Speculation:
    """Four rounds of all prompts, the fifth about to guess."""
    assert settings.shape is not None
    batch = Batch(Steps(verifier), PROMPTS, settings.ends, settings.shape.nodes, tail=0)
    run = Speculation(batch, draft, settings, [0, 1, 2, 3])
    run.prefill()
    for _ in range(4):
        run.play_round(run.rooms())
    run.draft.start()
    return run


def largest_gap(verifier: Verifier, draft: Eagle3Draft, run: Speculation) -> float:
    """Between the draft's cache and one built from scratch on the verifier's states."""
    found: list[float] = []
    for row, (prompt, output) in enumerate(zip(PROMPTS, run.batch.outputs, strict=True)):
        text = torch.tensor([[*prompt, *output.tokens]])
        rows = text.shape[1] - 1
        scratch = Eagle3Drafter(draft, 1, rows, verifier.device)
        scratch.feed(text[:, 1:], verifier.states(text)[:, :-1], [rows])
        scratch.start()
        assert run.draft.caches[0].ends[row] == rows  # no row of a guess is left
        for ours, theirs in (
            (run.draft.caches[0].keys, scratch.caches[0].keys),
            (run.draft.caches[0].values, scratch.caches[0].values),
        ):
            found.append(float((ours[row, :, :rows] - theirs[0, :, :rows]).abs().max()))
    return max(found)


def pattern(depth: int) -> Callable[[int, int], int]:
    """Others in every sequence and round: none, some, all."""
    return lambda sequence, number: (2 * sequence + 3 * number) % (depth + 1)


@torch.inference_mode()
@pytest.mark.parametrize("name", SHAPES)
def test_after_rounds_caches_are_as_built_from_scratch(
    verifier: Verifier, make_draft, scripted, name: str
):
    """B76: rows of accepted guesses are made anew from the verifier's states, a tree's path too."""
    settings, draft = shaped(name), make_draft()
    scripted([0, 1, 2, 3], pattern(settings.shape.depth), SHAPES[name])
    run = play(verifier, draft, settings)
    accepted = [r.accepted for log in run.logs for r in log.rounds]
    assert set(accepted) == set(range(settings.shape.depth + 1))
    assert largest_gap(verifier, draft, run) < 1e-5
    found = run.target.step()
    for row, (prompt, output) in enumerate(zip(PROMPTS, run.batch.outputs, strict=True)):
        fresh = verifier.states(torch.tensor([[*prompt, *output.tokens]])).last[0, -1]
        torch.testing.assert_close(found[row], verifier.logits_from(fresh), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_states_of_another_path_would_show(verifier: Verifier, make_draft, scripted, monkeypatch):
    """B76's control: the draft gets states of the first nodes, as if the tree were a chain."""
    settings, draft = shaped("2x2x2"), make_draft()
    scripted([0, 1, 2, 3], pattern(3), SHAPES["2x2x2"])

    def first_nodes(
        self: TargetDecoder, path: Tensor, accepted: list[int], line: bool
    ) -> VerifierStates:
        self.cache.commit(path, accepted)
        return self.states[:, : max(accepted) + 1]

    monkeypatch.setattr(TargetDecoder, "commit", first_nodes)
    assert largest_gap(verifier, draft, play(verifier, draft, settings)) > 1e-3


def rules_for(shape: Shape) -> list[AcceptRule]:
    if shape.is_chain:
        return [AcceptRule.argmax_draft, AcceptRule.rejection]
    if isinstance(shape, DynamicShape):
        return [AcceptRule.tree_one_hot]
    return [AcceptRule.tree_one_hot, AcceptRule.tree_without_replacement]


@pytest.mark.parametrize("name", SHAPES)
def test_temperature_zero_ignores_filters_with_and_without_a_draft(
    verifier: Verifier, bigrams, plain, name: str
):
    """B72: filters that would leave other tokens change nothing, whatever the rule."""
    filtered = replace(SETTINGS, sampling=Sampling(top_k=2, top_p=0.3, min_p=0.9))
    wanted = [one.tokens for one in plain]
    without = decode(verifier, None, PROMPTS, filtered).generations
    assert [one.tokens for one in without] == wanted
    draft = bigrams(PROMPTS, SETTINGS, vocab_size=100)
    for rule in rules_for(shaped(name).shape):
        found = decode(verifier, draft, PROMPTS, replace(shaped(name, filtered), rule=rule))
        assert [one.tokens for one in found.generations] == wanted
        assert any(r.accepted for one in found.generations for r in one.rounds)


LONG = [(5 * i) % 110 + 3 for i in range(80)]
AROUND_64 = {  # companies of a prompt that the head cannot follow
    "alone": [LONG],
    "with short ones": [[5, 6], LONG, [7]],
    "with one that gets there": [LONG[:58], LONG, [7]],
    "none has room": [LONG, [9] * 70, LONG[66::-1]],
}


@pytest.mark.parametrize("company", AROUND_64)
@pytest.mark.parametrize("name", ["4", "2x2x2"])
def test_beyond_the_heads_limit_the_verifier_goes_on_alone(
    verifier: Verifier, bigrams, company: str, name: str
):
    """B78: limit 64, prompt of 80 tokens; answers end at different lengths meanwhile."""
    prompts = AROUND_64[company]
    short = replace(SETTINGS, max_new_tokens=10)
    draft = bigrams(prompts, short, max_positions=64)
    plain = decode(verifier, None, prompts, short).generations
    others = {plain[-1].tokens[0], *plain[0].tokens}  # the end comes to the last, and not at once
    ends = [token for token in plain[-1].tokens if token not in others][:1]
    settings = replace(shaped(name, short), eos_ids=ends)
    plain = decode(verifier, None, prompts, settings).generations
    together = decode(verifier, draft, prompts, settings).generations
    assert len({len(one.tokens) for one in plain}) > 1 or len(prompts) == 1
    for prompt, one, wanted in zip(prompts, together, plain, strict=True):
        alone = decode(verifier, draft, [prompt], settings).generations[0]
        assert (one.tokens, one.rounds) == (alone.tokens, alone.rounds)
        assert one.tokens == wanted.tokens
        assert bool(one.rounds) is (len(prompt) < 65)


# ---- long prompts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_verifier(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Verifier:
    folder = tmp_path_factory.mktemp("long")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            **sizes,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    for path in (*tiny_verifier.glob("token*"), *tiny_verifier.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    section = VerifierSection(str(folder), Precision.float32, aux_layers=[1, 2, 3])
    return Verifier.load(section, folder, torch.device("cpu"), torch.float32)


class Wide(Eagle3Draft):
    """Notes how wide the states are that it is given."""

    widths: set[int]

    def fuse(self, aux: Tensor) -> Tensor:
        self.widths.add(aux.shape[-1])
        return super().fuse(aux)


@torch.inference_mode()
def test_prompts_of_700_and_2500_tokens(long_verifier: Verifier):
    """B80: long prompts beside a short one, and the fused states are three times as wide."""
    facts = long_verifier.facts
    section = VerifierSection(facts.path, Precision.float32, aux_layers=facts.aux_layers)
    draft = Wide(DraftConfig.of(DraftSection(vocab_size=100), facts))
    ends = load_ends(section, Path(facts.path), torch.float32)
    draft.initialise(ends, DraftVocab.from_counts(torch.arange(128), 100), HeadInit.verifier)
    draft, draft.widths = draft.eval().requires_grad_(False), set()

    prompts = [[(7 * i + i // 9) % 120 + 3 for i in range(size)] for size in (700, 2500, 3)]
    wanted: list[list[int]] = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(5):
            last = long_verifier.states(torch.tensor([text])).last[0, -1]
            text.append(int(long_verifier.logits_from(last).argmax()))
        wanted.append(text[len(prompt) :])
    for name in ("3", "2x2"):
        settings = shaped(name, replace(SETTINGS, max_new_tokens=5))
        found = decode(long_verifier, draft, prompts, settings).generations
        assert [one.tokens for one in found] == wanted
        assert all(one.rounds for one in found)
    assert draft.widths == {3 * facts.hidden_size} == {draft.fc.in_features}
    with pytest.raises(RuntimeError, match="shape"):
        draft.fuse(torch.zeros(1, 1, facts.hidden_size))
