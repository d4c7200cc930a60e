"""The small model in the loop and in the replay: no token, no chance and no count moves."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.choices import EvalRule
from conf.schema import VerifierSection
from conf.shapes import chain, parse_shape
from data.records import CachedSample, TokenizedSample
from data.states import states_of
from eval.acceptance import Counters
from eval.decode import DecodeSettings, decode
from eval.proof.first_token import prove_first_token
from eval.replay import Place, replay
from eval.round_plan import rule_of
from eval.verify import AcceptRule
from models.heads import load_head
from models.sampling import Sampling
from models.small_model import ModelConfig, SmallModel
from models.verifier import Verifier

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 60)), [9, 8, 7, 6], [100, 3] * 10]
N = 3
SETTINGS = DecodeSettings(max_new_tokens=24, eos_ids=[], shape=chain(N))
SHAPES = ["3", "[[0],[1],[0,0],[0,1],[0,0,0]]", "dynamic:nodes=4,depth=4,top_k=4"]


def like(verifier: Verifier, noise: float, max_positions: int = 2048) -> SmallModel:
    """The verifier itself as its draft, or nearly: some of its guesses are right."""
    lm = deepcopy(verifier.model)
    for module in lm.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    generator = torch.Generator().manual_seed(7)
    for parameter in lm.parameters():
        scale = noise * float(parameter.std(correction=0))
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return SmallModel(ModelConfig(lm.config.to_dict(), 128, max_positions), lm)


@pytest.fixture(scope="module")
def near(verifier: Verifier) -> SmallModel:
    return like(verifier, 0.1)


def shaped(name: str, settings: DecodeSettings = SETTINGS) -> DecodeSettings:
    shape = parse_shape(name, "eval.trees")
    return replace(settings, shape=shape, rule=rule_of(EvalRule.auto, shape, settings.sampling))


def test_the_verifier_as_its_own_draft_is_always_right(verifier: Verifier):
    """Every round ends with the guess that was never fed: its row is made up for in the next."""
    made = decode(verifier, like(verifier, 0.0), PROMPTS, SETTINGS).generations
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    assert [one.tokens for one in made] == [one.tokens for one in plain]
    assert {r.accepted for one in made for r in one.rounds} == {N}


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_text_alone_and_in_a_batch(verifier: Verifier, near: SmallModel, name: str):
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    ends = [plain[0].tokens[5], plain[2].tokens[11]]  # so that sequences leave one by one
    settings = shaped(name, replace(SETTINGS, eos_ids=ends))
    plain = decode(verifier, None, PROMPTS, settings).generations
    together = decode(verifier, near, PROMPTS, settings).generations
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    for prompt, one in list(zip(PROMPTS, together, strict=True))[:3]:
        alone = decode(verifier, near, [prompt], settings).generations[0]
        assert (alone.tokens, alone.rounds) == (one.tokens, one.rounds)
    accepted = [r.accepted for one in together for r in one.rounds]
    assert 0 < sum(accepted) < settings.shape.depth * len(accepted)  # some stand, some do not


def test_its_own_position_limit_ends_the_guessing(verifier: Verifier):
    """Of five prompts one is beyond it from the start, and the others get there or not."""
    for limit in (40, 41):
        short = like(verifier, 0.02, max_positions=limit)
        made = decode(verifier, short, PROMPTS, SETTINGS).generations
        plain = decode(verifier, None, PROMPTS, SETTINGS).generations
        assert [one.tokens for one in made] == [one.tokens for one in plain]
        assert made[2].rounds == [] and len(made[1].rounds) > 3
    exact = like(verifier, 0.0, max_positions=30)  # guesses are fed at positions up to 29
    rounds = decode(verifier, exact, PROMPTS[4:], SETTINGS).generations[0].rounds
    # Roots at 20, 24 and 28, of which the last may feed itself and the token after it.
    assert [len(one.proposed) for one in rounds] == [3, 3, 2]


def test_sampled_batches_are_their_sequences(verifier: Verifier, near: SmallModel):
    sampling = Sampling(temperature=0.8, top_p=0.9)
    settings = replace(SETTINGS, sampling=sampling, rule=AcceptRule.rejection)
    seeds = [5, 6, 7, 8, 9]
    together = decode(verifier, near, PROMPTS, settings, seeds).generations
    for prompt, seed, one in list(zip(PROMPTS, seeds, together, strict=True))[:3]:
        alone = decode(verifier, near, [prompt], settings, [seed]).generations[0]
        assert (alone.tokens, alone.rounds) == (one.tokens, one.rounds)


def test_every_rule_keeps_the_verifiers_distribution(verifier: Verifier):
    """And the wrong rule, without a residual, is caught."""
    found = prove_first_token(verifier, like(verifier, 0.5), PROMPTS[:1], draws=10_000)
    assert len({one.control for one in found}) == 2
    assert all(one.as_expected for one in found), found


def test_the_replay_counts_what_the_loop_counts(verifier: Verifier, near: SmallModel):
    live = decode(verifier, near, PROMPTS, SETTINGS).generations
    texts = decode(verifier, None, PROMPTS, SETTINGS, tail=N).generations
    cached = []
    for prompt, one in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([*prompt, *one.tokens, *one.tail])
        place = torch.arange(len(ids)) - len(prompt)
        mask = (place >= 0) & (place < len(one.tokens))
        sample = TokenizedSample("", ids, mask, greedy=True, held_out=True)
        states = states_of(verifier, [sample], torch.float32)[0]
        cached.append(CachedSample(sample=sample, **vars(states)))
    wanted = [Counters.of(one.rounds, len(one.tokens), N) for one in live]
    assert replay(near, cached, N, Place(verifier.device, torch.float32)) == wanted


def test_a_published_folder_is_measured_as_it_is(
    verifier: Verifier, section: VerifierSection, near: SmallModel, tmp_path: Path
):
    near.lm.save_pretrained(tmp_path)
    draft = load_head(tmp_path, verifier.facts, verifier.ends)
    made = [decode(verifier, one, PROMPTS[:1], SETTINGS).generations[0] for one in (draft, near)]
    assert made[0].rounds == made[1].rounds
