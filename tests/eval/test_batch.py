"""Batches and trees: what a sequence gets does not depend on its company or on the shape."""

from dataclasses import replace

import pytest
import torch

from conf.choices import EvalRule
from conf.shapes import parse_shape
from eval.decode import DecodeSettings, decode
from eval.drafters.eagle3 import Eagle3Drafter
from eval.generation import Generation
from eval.output import StopStrings
from eval.propose import propose
from eval.round_plan import RoundPlan, rule_of
from eval.verify import AcceptRule
from models.sampling import Sampling, SharedDice
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 60)), [9, 8, 7, 6], [100, 3] * 10]
SHAPES = ["3", "2x2", "3x1x2", "[[0],[1],[0,0],[0,1],[0,0,0]]", "dynamic:nodes=7,depth=3,top_k=3"]
SHAPES += ["dynamic:nodes=4,depth=4,top_k=4"]  # the draft runs on more nodes than are kept
SETTINGS = DecodeSettings(max_new_tokens=24, eos_ids=[])


def shaped(name: str, settings: DecodeSettings = SETTINGS, rule: EvalRule = EvalRule.auto):
    shape = parse_shape(name, "eval.trees")
    return replace(settings, shape=shape, rule=rule_of(rule, shape, settings.sampling))


def figures(one: Generation) -> tuple:
    return one.tokens, [(r.proposed, r.accepted, r.tested) for r in one.rounds]


@pytest.fixture
def ends(verifier: Verifier) -> list[int]:
    """Tokens that end the answers at different lengths."""
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    return [plain[0].tokens[5], plain[2].tokens[11], plain[3].tokens[0]]


def test_plain_batches_are_their_sequences(verifier: Verifier, ends):
    settings = replace(SETTINGS, eos_ids=ends)
    together = decode(verifier, None, PROMPTS, settings, tail=3).generations
    for prompt, one in zip(PROMPTS, together, strict=True):
        alone = decode(verifier, None, [prompt], settings, tail=3).generations[0]
        assert one.tokens == alone.tokens and one.tail == alone.tail
    assert len({len(one.tokens) for one in together}) >= 3  # they left at different times


@pytest.mark.parametrize("name", SHAPES)
def test_batches_of_rounds_are_their_sequences_and_greedy_text(
    verifier: Verifier, bigrams, ends, name: str
):
    """User report B75: guesses are rejected at every depth, in sequences of different lengths."""
    settings = shaped(name, replace(SETTINGS, eos_ids=ends))
    draft = bigrams(PROMPTS, SETTINGS)
    plain = decode(verifier, None, PROMPTS, settings).generations
    together = decode(verifier, draft, PROMPTS, settings).generations
    for prompt, one, wanted in zip(PROMPTS, together, plain, strict=True):
        alone = decode(verifier, draft, [prompt], settings).generations[0]
        assert figures(one) == figures(alone)
        assert one.tokens == wanted.tokens
    accepted = [r.accepted for one in together for r in one.rounds]
    assert 0 in accepted and max(accepted) >= 2


@pytest.mark.parametrize("rule", [EvalRule.auto, EvalRule.argmax_draft])
@pytest.mark.parametrize("name", SHAPES)
def test_sampled_batches_are_their_sequences(
    verifier: Verifier, bigrams, name: str, rule: EvalRule
):
    sampling = Sampling(temperature=0.8, top_p=0.9)
    settings = shaped(name, replace(SETTINGS, sampling=sampling), rule)
    # prompt 2 comes near the limit
    draft = bigrams(PROMPTS, SETTINGS, vocab_size=100, max_positions=70, qk_norm=True, layers=2)
    seeds = [5, 6, 7, 8, 9]
    together = decode(verifier, draft, PROMPTS, settings, seeds).generations
    for prompt, seed, one in zip(PROMPTS, seeds, together, strict=True):
        alone = decode(verifier, draft, [prompt], settings, [seed]).generations[0]
        assert figures(one) == figures(alone)
    assert len(together[2].rounds) < len(together[2].tokens) - 1  # its last steps were plain
    assert together[0].tokens != decode(verifier, None, PROMPTS, SETTINGS).generations[0].tokens


def test_a_wider_tree_accepts_more_than_its_chain(verifier: Verifier, bigrams):
    draft = bigrams(PROMPTS, SETTINGS)

    def rounds(name: str) -> int:
        return sum(
            len(g.rounds) for g in decode(verifier, draft, PROMPTS, shaped(name)).generations
        )

    assert rounds("2x2x2") < rounds("3")


def test_stop_strings_end_with_and_without_a_draft(verifier: Verifier, bigrams):
    draft, tokenizer = bigrams(PROMPTS, SETTINGS), verifier.tokenizer
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    texts = tuple(str(tokenizer.decode(one.tokens[at : at + 2])) for at, one in enumerate(plain, 3))
    settings = replace(SETTINGS, stop=StopStrings(texts, tokenizer))
    stopped = decode(verifier, None, PROMPTS, settings).generations
    for one, whole in zip(stopped, plain, strict=True):
        assert one.tokens == whole.tokens[: len(one.tokens)]
        ends = [
            any(t in str(tokenizer.decode(whole.tokens[:n])) for t in texts) for n in range(1, 25)
        ]
        assert len(one.tokens) == (ends.index(True) + 1 if any(ends) else 24)
    for name in SHAPES:
        guided = decode(verifier, draft, PROMPTS, shaped(name, settings)).generations
        assert [one.tokens for one in guided] == [one.tokens for one in stopped]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["2x2x2", "3x1x2", "dynamic:nodes=9,depth=4,top_k=3"])
def test_draft_logits_of_a_node_are_those_of_its_path(verifier: Verifier, make_draft, name: str):
    """Ragged sequences, each with its own tree, against chains fed token by token."""
    draft, shape = make_draft(qk_norm=True, layers=2), parse_shape(name, "eval.trees")
    lengths = [6, 3]
    text = torch.tensor([[5, 9, 40, 41, 3, 8, 2], [7, 30, 31, 2, 0, 0, 0]])
    states = verifier.states(text)

    def fresh() -> Eagle3Drafter:
        side = Eagle3Drafter(draft, 2, 40, verifier.device)
        side.feed(text[:, 1:], states[:, :-1], lengths)
        return side

    seen: list[tuple] = []

    class Spy:
        """Notes which tokens led to each row of logits."""

        def __init__(self) -> None:
            self.side = fresh()
            self.target_ids = self.side.target_ids

        def start(self):
            self.paths = [[()], [()]]
            return self.note(self.side.start())

        def step(self, ids, parents):
            self.paths = [
                [
                    (*self.paths[b][p], i)
                    for i, p in zip(ids[b].tolist(), parents[b].tolist(), strict=True)
                ]
                for b in range(2)
            ]
            return self.note(self.side.step(ids, parents))

        def note(self, logits):
            for b in range(2):
                seen.extend((b, path, logits[b, w]) for w, path in enumerate(self.paths[b]))
            return logits

    propose(Spy(), shape, RoundPlan(AcceptRule.greedy, Sampling()), SharedDice(0, 2))
    assert len(seen) > 8
    for b, path, logits in seen:
        side = fresh()
        out = side.start()
        for token in path:
            out = side.step(torch.full((2, 1), token), torch.zeros(2, 1, dtype=torch.long))
        torch.testing.assert_close(out[b, 0], logits, atol=1e-5, rtol=1e-5)
