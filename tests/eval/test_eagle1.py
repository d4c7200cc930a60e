"""An EAGLE-1 head in the loop: guesses on its own guessed states, and not a token changed."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import ConfigError, DraftSection, Precision, Supervise, VerifierSection
from conf.shapes import chain, parse_shape
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from data.states import states_of
from eval.acceptance import Counters
from eval.decode import DecodeSettings, decode
from eval.drafters.choose import drafter_for
from eval.proof.first_token import CASES, prove_first_token
from eval.proof.greedy_proof import Exam, Way, prove_greedy
from eval.propose import propose
from eval.replay import Place, replay
from eval.round_plan import RoundPlan
from eval.verify import AcceptRule
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.kernels import CPU_FLASH
from models.memory import DraftCache
from models.sampling import Sampling, SharedDice
from models.verifier import Verifier
from train.families.eagle1 import FeatureRegression

N, LAYERS, NEW_TOKENS, STEPS = 4, 4, 24, 40
CPU = torch.device("cpu")
SETTINGS = DecodeSettings(max_new_tokens=NEW_TOKENS, eos_ids=[], shape=chain(N))
SHAPES = ("3", "2x2", "dynamic:nodes=5,depth=3,top_k=3")


@dataclass(frozen=True)
class Taught:
    """A head that was shown the verifier's answers to the first half of the prompts."""

    verifier: Verifier
    draft: Eagle1Draft
    prompts: list[list[int]]
    samples: list[CachedSample]  # of all prompts
    losses: list[float]  # by step, without noise


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Verifier:
    """Weights wide enough that it does not say one thing over and over."""
    folder = tmp_path_factory.mktemp("eagle1") / "verifier"
    shutil.copytree(tiny_verifier, folder)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    section = VerifierSection(path=str(folder), dtype=Precision.float32, aux_layers=[-1])
    return Verifier.load(section, folder, CPU, torch.float32)


@pytest.fixture(scope="module")
def taught(verifier: Verifier) -> Taught:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in (9, 5, 13, 7)]
    # Past an answer's end, too: a round's guesses reach beyond it.
    answers = [decode(verifier, None, [ids], SETTINGS, tail=N).generations[0] for ids in prompts]
    samples = []
    for ids, answer in zip(prompts, answers, strict=True):
        whole = torch.tensor([*ids, *answer.tokens, *answer.tail])
        mask = (torch.arange(len(whole)) >= len(ids)) & (
            torch.arange(len(whole)) < len(ids) + NEW_TOKENS
        )
        sample = TokenizedSample("", whole, mask, greedy=True, held_out=False)
        states = states_of(verifier, [sample], torch.float32)[0]
        samples.append(CachedSample(sample=sample, **vars(states)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = Eagle1Draft(Eagle1Config.of(DraftSection(), verifier.facts))
        draft.initialise(verifier.ends)
    losses = teach(draft, samples[:2])
    return Taught(verifier, draft.eval().requires_grad_(False), prompts, samples, losses)


def teach(draft: Eagle1Draft, samples: list[CachedSample]) -> list[float]:
    pack = CachedPack.of(samples)
    mask = torch.cat([one.loss_mask for one in pack.samples])
    chains = Chains.of(mask, pack.starts, 1, Supervise.span)
    batch, module = batch_of(pack, chains), FeatureRegression(draft, CPU_FLASH)
    weights = torch.full((len(samples),), 1 / chains.counts[0])
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        losses.append(module.eval()(batch, weights).loss.item())
        optimizer.zero_grad()
        module.train()(replace(batch, draw=step), weights).loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return losses


def counters_of(taught: Taught, prompt: int, settings: DecodeSettings = SETTINGS) -> Counters:
    made = decode(taught.verifier, taught.draft, [taught.prompts[prompt]], settings).generations[0]
    return Counters.of(made.rounds, len(made.tokens), N)


def test_training_steps_lower_the_loss_and_teach_guessing(taught: Taught):
    assert taught.losses[-1] < 0.7 * taught.losses[0]
    learnt, new = counters_of(taught, 0), counters_of(taught, 3)
    assert learnt.accepted_by_depth[0] > new.accepted_by_depth[0]
    assert learnt.accepted_by_depth[1] > 0  # a guess on a guessed state
    assert learnt.accepted_by_depth[0] < learnt.rounds  # and some were wrong: see below


@torch.inference_mode()
def test_guesses_are_chained_on_guessed_states(taught: Taught):
    """Guess k+1 from one forward a token equals a plain run over all rows so far."""
    verifier, draft, prompt = taught.verifier, taught.draft, taught.prompts[0]
    states = verifier.states(torch.tensor([prompt]))
    root = verifier.logits_from(states.last[:, -1]).argmax(-1)
    side = drafter_for(draft, 1, 32, CPU)
    side.begin(torch.tensor([prompt]), states, root[:, None], [len(prompt)])
    plan = RoundPlan(AcceptRule.greedy, Sampling(), measure_overlap=True)
    proposal = propose(side, chain(3), plan, SharedDice(0, 1))
    assert proposal.logits is not None

    hidden = states.last  # not the draft's own norm of the stream: the verifier's final state
    tokens = torch.tensor([[*prompt[1:], int(root)]])
    for k in range(3):
        positions, memories = torch.arange(tokens.shape[1])[None], [DraftCache(32)]
        guess = draft(draft.share_of(tokens), hidden, positions, memories).hidden[:, -1:]
        logits = verifier.logits_from(guess[:, 0])  # the verifier's head, and no norm before it
        torch.testing.assert_close(proposal.logits[:, k], logits, atol=1e-5, rtol=1e-5)
        token = logits.argmax(-1)
        assert int(token) == int(proposal.ids[0, k])
        hidden, tokens = torch.cat([hidden, guess], 1), torch.cat([tokens, token[:, None]], 1)


def test_greedy_text_is_the_verifiers_alone_and_in_company(taught: Taught):
    ways = [Way(parse_shape(name, "x"), 3) for name in SHAPES]
    ways.append(Way(parse_shape(SHAPES[2], "x"), 1))
    prompts = [taught.prompts[i] for i in (0, 1, 3)]  # two of them learnt
    exam = Exam(taught.verifier, taught.draft, prompts, replace(SETTINGS, shape=None))
    checks = prove_greedy(exam, 1, ways)
    assert [(one.checked, one.identical) for one in checks] == [(3, 3)] * len(ways)


def test_a_tree_accepts_no_less_than_its_first_chain(taught: Taught):
    """EAGLE-2's tree and a static one hold the chain of the likeliest guesses."""
    tau = {}
    for name in ("3", "2x2x2", "dynamic:nodes=14,depth=3,top_k=4"):
        settings = replace(SETTINGS, shape=parse_shape(name, "x"))
        made = decode(taught.verifier, taught.draft, taught.prompts[:2], settings).generations
        tau[name] = sum(len(one.tokens) for one in made) / sum(len(one.rounds) for one in made)
    assert min(tau.values()) == tau["3"] < max(tau.values())


def test_first_tokens_follow_the_verifier(taught: Taught):
    found = prove_first_token(taught.verifier, taught.draft, taught.prompts[:1], draws=10_000)
    assert len(found) == len(CASES) and all(one.as_expected for one in found)


def test_a_replay_of_cached_states_counts_what_the_loop_counts(taught: Taught):
    played = replay(taught.draft, taught.samples, N, Place(CPU, torch.float32))
    assert played == [counters_of(taught, i) for i in range(len(taught.prompts))]


def test_states_of_other_layers_are_refused(taught: Taught):
    section = VerifierSection(path=taught.verifier.facts.path, aux_layers=[LAYERS - 1])
    other = Verifier.load(section, Path(section.path), CPU, torch.float32)
    with pytest.raises(ConfigError, match=r"draft aux_layers=\[4\].*has \[3\]"):
        decode(other, taught.draft, taught.prompts[:1], SETTINGS)
