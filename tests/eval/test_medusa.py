"""Medusa's side of a round, in the loop, in batches, in replays, and by the proofs of exactness."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.choices import EvalRule
from conf.schema import ConfigError, DraftSection, HeadInit, VerifierSection
from conf.shapes import DynamicShape, chain, parse_shape
from data.records import CachedSample, TokenizedSample
from data.states import states_of
from eval.acceptance import Counters
from eval.decode import DecodeSettings, decode
from eval.drafters.choose import check_pair, drafter_for, refuse_shapes
from eval.drafters.medusa import MedusaDrafter
from eval.generation import Generation
from eval.proof.first_token import prove_first_token
from eval.propose import propose
from eval.replay import Place, replay
from eval.round_plan import RoundPlan, rule_of
from eval.verify import AcceptRule
from models.medusa import MedusaConfig, MedusaDraft
from models.sampling import Sampling, SharedDice
from models.verifier import Verifier, load_ends
from models.vocab import DraftVocab

PROMPTS = [[1, 40, 41, 42, 43, 90, 3], [7], list(range(3, 20))]
TAIL = tuple(f"{kind}.{k}." for kind in ("blocks", "lm_heads") for k in range(1, 4))
CPU, HEADS, NEW = torch.device("cpu"), 4, 12
SHAPES = ["3", "2x2x2", "[[0],[1],[0,0],[0,1],[0,0,0]]", "dynamic:nodes=7,depth=3,top_k=3"]
SETTINGS = DecodeSettings(max_new_tokens=NEW, eos_ids=[])


@pytest.fixture
def heads(verifier: Verifier, section: VerifierSection, tmp_path: Path) -> Callable:
    """heads() -> heads that are right about some of the greedy texts of PROMPTS: least squares."""

    def make(vocab_size: int | str = "full") -> MedusaDraft:
        ends = load_ends(section, tmp_path, torch.float32)
        options = DraftSection(vocab_size=vocab_size, head_init=HeadInit.verifier)
        config = MedusaConfig.of(options, verifier.facts, HEADS)
        draft = MedusaDraft(config)
        counts = torch.arange(verifier.facts.vocab_size) % 5
        draft.initialise(
            ends, DraftVocab.from_counts(counts, config.draft_vocab_size), HeadInit.verifier
        )
        texts = greedy_texts(verifier)
        states = [verifier.states(torch.tensor([text])).last[0] for text in texts[:2]]
        for k in range(HEADS):
            rows = torch.cat([state[: len(state) - 2 - k] for state in states])
            ids = torch.cat([torch.tensor(text[2 + k :]) for text in texts[:2]])
            wanted = draft.logits(rows, k)  # no ties, which rounding would break at random
            inside = draft.t2d[ids]
            wanted[inside.nonzero().flatten(), draft.to_draft_ids(ids[inside])] += 5.0
            draft.rows(k).weight.data = torch.linalg.lstsq(rows, wanted).solution.T.contiguous()
        return draft.eval().requires_grad_(False)

    with torch.inference_mode():
        yield make


def greedy_texts(verifier: Verifier) -> list[list[int]]:
    plain = decode(verifier, None, PROMPTS, SETTINGS, tail=HEADS).generations
    return [[*ids, *one.tokens, *one.tail] for ids, one in zip(PROMPTS, plain, strict=True)]


def shaped(name: str, sampling: Sampling | None = None, rule: EvalRule = EvalRule.auto):
    shape, chosen = parse_shape(name, "eval.trees"), sampling or Sampling()
    return replace(SETTINGS, shape=shape, sampling=chosen, rule=rule_of(rule, shape, chosen))


def figures(one: Generation) -> tuple:
    return one.tokens, [(r.proposed, r.accepted, r.tested) for r in one.rounds]


@pytest.mark.parametrize("name", SHAPES)
def test_rounds_are_the_greedy_text_alone_and_in_batches(verifier: Verifier, heads, name: str):
    draft, plain = heads(), decode(verifier, None, PROMPTS, SETTINGS).generations
    together = decode(verifier, draft, PROMPTS, shaped(name)).generations
    for prompt, one, wanted in zip(PROMPTS, together, plain, strict=True):
        assert figures(one) == figures(
            decode(verifier, draft, [prompt], shaped(name)).generations[0]
        )
        assert one.tokens == wanted.tokens
    accepted = [r.accepted for one in together for r in one.rounds]
    assert 0 in accepted and max(accepted) >= 2


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (SHAPES[0], EvalRule.auto),
        (SHAPES[1], EvalRule.auto),
        (SHAPES[2], EvalRule.argmax_draft),
        (SHAPES[3], EvalRule.typical),
    ],
)
def test_sampled_batches_are_their_sequences(verifier: Verifier, heads, name: str, rule: EvalRule):
    settings, draft = shaped(name, Sampling(0.02, top_p=0.9), rule), heads(100)
    seeds = [5, 6, 7]
    together = decode(verifier, draft, PROMPTS, settings, seeds).generations
    for prompt, seed, one in zip(PROMPTS, seeds, together, strict=True):
        alone = decode(verifier, draft, [prompt], settings, [seed]).generations[0]
        assert figures(one) == figures(alone)
        assert all(bool(draft.t2d[i]) for r in one.rounds for i in r.proposed)
    assert any(r.accepted for one in together for r in one.rounds)


def test_the_first_token_is_the_verifiers_by_every_rule(verifier: Verifier, heads):
    found = prove_first_token(verifier, heads(60), PROMPTS, draws=4_000)
    assert {one.rule for one in found} > {AcceptRule.rejection, AcceptRule.tree_one_hot}
    assert all(one.as_expected for one in found), found


@pytest.mark.parametrize("text", ["4", "2x2x2x1", "dynamic:nodes=6,depth=4,top_k=2"])
def test_level_k_is_head_k_on_the_state_before_the_root(verifier: Verifier, heads, text: str):
    """Naive: x[L] is the root, head k on last[L-1]; and not the row after or before."""
    draft, texts = heads(), greedy_texts(verifier)
    ids, shape = texts[0], parse_shape(text, "shape")
    length = len(PROMPTS[0])
    states = verifier.states(torch.tensor([ids[: length + 1]]))
    drafter = drafter_for(draft, 1, 99, CPU)
    assert isinstance(drafter, MedusaDrafter)
    root = torch.tensor([ids[length : length + 1]])
    drafter.begin(torch.tensor([ids[:length]]), states[:, :length], root, [length])
    plan = RoundPlan(AcceptRule.greedy, Sampling())
    proposal = propose(drafter, shape, plan, SharedDice(0, 1))
    last = states.last[0, length - 1]
    wanted = [draft.logits(last, k) for k in range(4)]
    other = [draft.logits(states.last[0, length], k) for k in range(4)]
    assert not any(torch.allclose(a, b) for a, b in zip(wanted, other, strict=True))
    first = [int(draft.to_target_ids(logits.argmax())) for logits in wanted]
    node, chosen = 0, []
    for _ in range(4):  # the likeliest path
        parents = proposal.parents[0].tolist()
        node = next(i + 1 for i, parent in enumerate(parents) if parent == node)
        chosen.append(int(proposal.ids[0, node - 1]))
    assert chosen == first
    if not isinstance(shape, DynamicShape) and not shape.is_chain:
        second = [int(draft.to_target_ids(logits.topk(2).indices[1])) for logits in wanted[:3]]
        assert set(second) <= set(proposal.ids[0].tolist())


def test_a_replay_gives_the_loops_own_counters(verifier: Verifier, heads):
    draft, samples, live = heads(), [], []
    for ids, text in zip(PROMPTS, greedy_texts(verifier), strict=True):
        tokens = torch.tensor(text)
        mask = (torch.arange(len(text)) >= len(ids)) & (torch.arange(len(text)) < len(ids) + NEW)
        sample = TokenizedSample("", tokens, mask, greedy=True, held_out=True)
        samples.append(
            CachedSample(sample=sample, **vars(states_of(verifier, [sample], verifier.dtype)[0]))
        )
        made = decode(verifier, draft, [ids], replace(SETTINGS, shape=chain(3))).generations[0]
        live.append(Counters.of(made.rounds, len(made.tokens), 3))
    assert replay(draft, samples, 3, Place(CPU, torch.float32)) == live
    assert 0 < sum(one.accepted for one in live) < sum(one.drafted for one in live)


def test_deeper_shapes_are_refused_by_name(verifier: Verifier, heads):
    draft = heads()
    for text in ("5", "2x1x1x1x1", "dynamic:nodes=5,depth=5,top_k=1"):
        with pytest.raises(ConfigError, match=r"5 deep.* 4 Medusa heads.*ttt\.depth=5"):
            decode(verifier, draft, [PROMPTS[0]], shaped(text))
        with pytest.raises(ConfigError, match="Medusa"):
            refuse_shapes(draft, [chain(1), parse_shape(text, "shape")], CPU)


def test_a_lone_head_can_be_timed(verifier: Verifier, heads):
    """The costs of single steps feed a level after the first, whatever the shapes."""
    draft = heads()
    alone = MedusaDraft(replace(draft.config, heads=1))
    alone.load_state_dict({n: t for n, t in draft.state_dict().items() if not n.startswith(TAIL)})
    drafter, states = drafter_for(alone, 1, 9, CPU), verifier.states(torch.tensor([PROMPTS[0]]))
    drafter.begin(torch.tensor([PROMPTS[0]]), states, torch.tensor([[5]]), [len(PROMPTS[0])])
    first = drafter.start()
    again = drafter.step(torch.tensor([[5, 6]]), torch.zeros(1, 2, dtype=torch.long))
    assert torch.equal(again, first.expand(-1, 2, -1))


def test_another_verifier_is_refused_and_other_layers_are_not(verifier: Verifier, heads):
    draft = heads()
    check_pair(verifier, draft)  # whatever verifier.aux_layers are
    wide = MedusaDraft(replace(draft.config, hidden_size=32))
    with pytest.raises(ConfigError, match="hidden_size=32"):
        check_pair(verifier, wide)
