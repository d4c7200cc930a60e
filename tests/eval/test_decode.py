"""The decoding loop on a tiny verifier: same tokens as plain decoding, whatever the draft does."""

from dataclasses import replace

import pytest
import torch

from conf.schema import FULL, ConfigError, JobError
from conf.shapes import chain, parse_shape
from eval.batch import Batch
from eval.decode import DecodeSettings, Speculation, decode
from eval.drafters.eagle3 import Eagle3Drafter
from eval.generation import Generation
from eval.propose import propose
from eval.round_plan import RoundPlan
from eval.rounds import judge_proposal
from eval.verify import AcceptRule, scatter_to_target
from models.eagle3 import Eagle3Draft
from models.sampling import Sampling, SharedDice, probabilities
from models.steps import Steps
from models.verifier import Verifier

PROMPT = [1, 40, 41, 42, 43, 90, 3]
N = 4
SETTINGS = DecodeSettings(max_new_tokens=30, eos_ids=[], shape=chain(N))


def decode_plain(
    verifier: Verifier, prompt: list[int], settings: DecodeSettings, tail: int = 0
) -> Generation:
    return decode(verifier, None, [prompt], settings, tail=tail).generations[0]


def decode_speculative(
    verifier: Verifier, draft: Eagle3Draft, prompt: list[int], settings: DecodeSettings
) -> Generation:
    return decode(verifier, draft, [prompt], settings).generations[0]


def speculation(verifier: Verifier, draft: Eagle3Draft, settings: DecodeSettings) -> Speculation:
    batch = Batch(Steps(verifier), [PROMPT], settings.ends, N, tail=0)
    return Speculation(batch, draft, settings, [settings.seed])


def test_plain_decoding_equals_argmax_without_a_cache(verifier: Verifier):
    plain = decode_plain(verifier, PROMPT, SETTINGS, tail=3)
    text = list(PROMPT)
    for _ in range(33):
        states = verifier.states(torch.tensor([text]))
        text.append(int(verifier.logits_from(states.last[:, -1]).argmax()))
    assert [*plain.tokens, *plain.tail] == text[len(PROMPT) :]
    assert len(plain.tokens) == 30 and plain.rounds == []


def test_a_real_draft_changes_no_token(verifier: Verifier, make_draft):
    for prompt in (PROMPT, [7], list(range(3, 60))):
        plain = decode_plain(verifier, prompt, SETTINGS)
        for vocab_size in (FULL, 40):
            output = decode_speculative(verifier, make_draft(vocab_size), prompt, SETTINGS)
            assert output.tokens == plain.tokens


def test_a_prompt_of_hundreds_of_tokens(verifier: Verifier, make_draft):
    """User report B80; 2,500 tokens are in tests/models/test_kv.py."""
    prompt = [(7 * i) % 120 + 3 for i in range(700)]
    settings = replace(SETTINGS, max_new_tokens=6)
    output = decode_speculative(verifier, make_draft(), prompt, settings)
    assert output.tokens == decode_plain(verifier, prompt, settings).tokens


@pytest.mark.parametrize("accepted", range(N + 1))
@pytest.mark.parametrize("at", [0, 1, 3])
def test_any_number_accepted_in_any_round(verifier: Verifier, follow, accepted: int, at: int):
    """User report B75: round ``at`` accepts ``accepted`` guesses, the rounds before it two."""
    wanted = [2] * at + [accepted] + [2] * 30

    draft = follow(PROMPT, SETTINGS, lambda number, _root, depth: depth < wanted[number])
    output = decode_speculative(verifier, draft, PROMPT, SETTINGS)
    assert [one.accepted for one in output.rounds] == wanted[: len(output.rounds)]
    assert output.tokens == decode_plain(verifier, PROMPT, SETTINGS).tokens


@pytest.mark.parametrize("prompt", [PROMPT, [7]], ids=["prompt", "one token"])
@pytest.mark.parametrize("right", ["always", "never", "sometimes"])
def test_always_never_sometimes(verifier: Verifier, follow, prompt: list[int], right: str):
    def script(_number: int, root: int, depth: int) -> bool:
        return right == "always" or (right == "sometimes" and (root * 7 + depth * 3) % 5 > 1)

    output = decode_speculative(verifier, follow(prompt, SETTINGS, script), prompt, SETTINGS)
    assert output.tokens == decode_plain(verifier, prompt, SETTINGS).tokens
    if right == "always":
        assert [one.accepted for one in output.rounds] == [N] * 6  # 29 tokens, 5 a round
    if right == "never":
        assert [one.accepted for one in output.rounds] == [0] * 29


@pytest.mark.parametrize("eos_at", range(10))
def test_end_of_sequence_inside_a_draft_cuts_the_output(verifier: Verifier, follow, eos_at: int):
    answer = decode_plain(verifier, PROMPT, SETTINGS).tokens
    eos = answer[eos_at]
    settings = replace(SETTINGS, eos_ids=[eos, 126])
    plain = decode_plain(verifier, PROMPT, settings)
    assert plain.tokens == answer[: answer.index(eos) + 1]
    output = decode_speculative(
        verifier, follow(PROMPT, settings, lambda *_: True), PROMPT, settings
    )
    assert output.tokens == plain.tokens
    # Counted before the cut: the rounds accepted all, whatever was emitted of it.
    assert all(one.accepted == N for one in output.rounds)
    assert len(output.rounds) == -(-(len(plain.tokens) - 1) // (N + 1))


@pytest.mark.parametrize("length", range(1, 13))
def test_length_limit_cuts_the_output(verifier: Verifier, follow, length: int):
    settings = replace(SETTINGS, max_new_tokens=length)
    draft = follow(PROMPT, settings, lambda *_: True)
    output = decode_speculative(verifier, draft, PROMPT, settings)
    assert output.tokens == decode_plain(verifier, PROMPT, settings).tokens
    assert len(output.tokens) == length
    assert all(len(one.proposed) == N for one in output.rounds)


def test_without_drafts_it_is_plain_decoding(verifier: Verifier, make_draft):
    settings = replace(SETTINGS, shape=None)
    output = decode_speculative(verifier, make_draft(), PROMPT, settings)
    assert output.tokens == decode_plain(verifier, PROMPT, settings).tokens
    assert output.rounds == []


@pytest.mark.parametrize("limit", [4, 7, 8, 12, 20])
def test_drafting_stops_at_the_drafts_position_limit(verifier: Verifier, scripted, limit: int):
    """Prompts of 7 tokens and heads with fewer positions than prompt and answer."""
    plain = decode_plain(verifier, PROMPT, SETTINGS, tail=N)
    draft = scripted(max_positions=limit)  # it asserts its limit itself
    draft.follow([*PROMPT, *plain.tokens, *plain.tail], lambda *_: True)
    output = decode_speculative(verifier, draft, PROMPT, SETTINGS)
    assert output.tokens == plain.tokens
    assert bool(output.rounds) is (limit >= len(PROMPT))
    emitted = 1 + sum(one.accepted + 1 for one in output.rounds)
    last_root = len(PROMPT) + emitted - 1
    assert last_root - 1 >= limit - 1 or not output.rounds  # no row was left to draft with


def test_no_position_beyond_the_verifiers_limit(verifier: Verifier, follow, monkeypatch):
    limit = 16
    text = follow(PROMPT, SETTINGS, lambda *_: True)
    monkeypatch.setattr(verifier, "facts", replace(verifier.facts, max_positions=limit))
    plain = decode_plain(verifier, PROMPT, SETTINGS, tail=N)
    assert len(plain.tokens) == limit - len(PROMPT) and plain.tail == []
    output = decode_speculative(verifier, text, PROMPT, SETTINGS)
    assert output.tokens == plain.tokens
    assert [len(one.proposed) for one in output.rounds] == [4, 3]  # roots 7 and 12 of 0..15


def test_bad_prompts_and_settings_are_named(verifier: Verifier, make_draft):
    for prompt in ([], [5] * verifier.facts.max_positions):
        with pytest.raises(ConfigError, match=f"prompt of {len(prompt)} tokens"):
            decode_plain(verifier, prompt, SETTINGS)
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        replace(SETTINGS, max_new_tokens=0)
    with pytest.raises(ConfigError, match="rule=greedy"):
        replace(SETTINGS, sampling=Sampling(temperature=1.0))


@pytest.fixture
def broken_head(verifier: Verifier):
    """A NaN in every row of logits, until the test is over."""
    row = verifier.head.weight.data[50]
    kept = row.clone()
    row.fill_(torch.nan)
    yield
    row.copy_(kept)


@pytest.mark.usefixtures("broken_head")
@pytest.mark.parametrize("shape", [None, "3", "2x2", "dynamic:nodes=4,depth=2,top_k=2"])
def test_broken_logits_end_the_decoding(verifier: Verifier, make_draft, shape):
    """No token is made of a NaN."""
    draft = make_draft(FULL) if shape else None
    settings = replace(SETTINGS, shape=parse_shape(shape, "test") if shape else SETTINGS.shape)
    with pytest.raises(JobError, match="NaN or -inf"):
        decode(verifier, draft, [PROMPT], settings)


def test_a_draft_of_other_layers_is_refused(verifier: Verifier, make_draft):
    draft = make_draft()
    draft.config = replace(draft.config, aux_layers=[1, 4, 5])
    with pytest.raises(ConfigError, match=r"aux_layers=\[1, 4, 5\]"):
        decode_speculative(verifier, draft, PROMPT, SETTINGS)


@torch.inference_mode()
def test_after_rounds_both_caches_are_as_built_from_scratch(verifier: Verifier, follow):
    """User report B76: draft rows come from verifier states alone; rejected ones left nothing."""
    draft = follow(
        PROMPT, SETTINGS, lambda number, _root, depth: depth < (number * 3) % (N + 1), layers=2
    )
    run = speculation(verifier, draft, SETTINGS)
    run.prefill()
    for number in range(6):
        run.play_round(run.rooms())
        assert run.logs[0].rounds[-1].accepted == (number * 3) % (N + 1)
        assert (
            run.draft.caches[0].ends == run.draft.caches[1].ends == run.draft.committed
        )  # no row of a guess is left
    run.draft.start()

    text = torch.tensor([[*PROMPT, *run.batch.outputs[0].tokens]])
    states = verifier.states(text)
    scratch = Eagle3Drafter(draft, 1, run.draft.caches[0].capacity, verifier.device)
    scratch.feed(text[:, 1:], states[:, :-1], [text.shape[1] - 1])
    scratch.start()
    rows = text.shape[1] - 1
    for one, other in zip(run.draft.caches, scratch.caches, strict=True):
        assert one.length == other.length == rows
        for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
            torch.testing.assert_close(ours[:, :, :rows], theirs[:, :, :rows], atol=1e-5, rtol=1e-5)

    fresh = verifier.logits_from(states.last[:, -1])
    torch.testing.assert_close(run.target.step(), fresh, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 2])
def test_guesses_are_chained_on_the_drafts_own_output(verifier: Verifier, make_draft, layers: int):
    """Guess k+1 from one forward a token equals the draft unrolled by hand over all rows."""
    draft = make_draft(qk_norm=True, layers=layers)
    side = Eagle3Drafter(draft, 1, 32, verifier.device)
    states = verifier.states(torch.tensor([PROMPT]))
    text = torch.tensor([[*PROMPT, 9]])
    side.feed(text[:, 1:], states, [len(PROMPT)])
    plan = RoundPlan(AcceptRule.greedy, Sampling(), measure_overlap=True)
    proposal = propose(side, chain(3), plan, SharedDice(0, 1))

    rows = len(PROMPT)
    hidden, tokens = draft.fuse(states.aux), text[:, 1:]
    for k in range(3):
        memories = Eagle3Drafter(draft, 1, 32, verifier.device).caches
        positions = torch.arange(rows + k)[None]
        output = draft(draft.share_of(tokens), hidden, positions, memories)
        logits = draft.logits(output.normed[:, -1])
        torch.testing.assert_close(proposal.logits[:, k], logits, atol=1e-5, rtol=1e-5)
        guess = draft.to_target_ids(logits.argmax(-1))
        assert int(guess) == int(proposal.ids[0, k])
        hidden = torch.cat([hidden, output.hidden[:, -1:]], 1)
        tokens = torch.cat([tokens, guess[:, None]], 1)


@pytest.mark.parametrize("rule", [AcceptRule.argmax_draft, AcceptRule.rejection])
def test_temperature_zero_ignores_filters_and_is_greedy(
    verifier: Verifier, follow, rule: AcceptRule
):
    settings = replace(SETTINGS, rule=rule, sampling=Sampling(temperature=0, top_p=0.3))
    draft = follow(PROMPT, SETTINGS, lambda _number, root, depth: (root + depth) % 3 > 0)
    output = decode_speculative(verifier, draft, PROMPT, settings)
    assert output.tokens == decode_plain(verifier, PROMPT, SETTINGS).tokens
    assert any(one.accepted for one in output.rounds)


@pytest.mark.parametrize("rule", [AcceptRule.argmax_draft, AcceptRule.rejection])
def test_sampling_is_repeatable_and_measures_the_overlap(
    verifier: Verifier, make_draft, rule: AcceptRule
):
    sampling = Sampling(temperature=0.8, top_p=0.95)
    settings = replace(SETTINGS, rule=rule, sampling=sampling, seed=3, measure_overlap=True)
    draft = make_draft(vocab_size=60)
    first = decode_speculative(verifier, draft, PROMPT, settings)
    assert first.tokens == decode_speculative(verifier, draft, PROMPT, settings).tokens
    other = decode_speculative(verifier, draft, PROMPT, replace(settings, seed=4))
    assert other.tokens != first.tokens
    tested = sum(min(one.accepted + 1, N) for one in first.rounds)
    assert len(first.overlap) == tested and all(0 <= v <= 1 + 1e-6 for v in first.overlap)
    assert all(int(draft.t2d[i]) for one in first.rounds for i in one.proposed)
    silent = decode_speculative(verifier, draft, PROMPT, replace(settings, measure_overlap=False))
    assert silent.overlap == [] and silent.tokens == first.tokens


@torch.inference_mode()
def test_overlap_at_temperature_zero_is_of_the_plain_softmax(verifier: Verifier, make_draft):
    draft = make_draft(vocab_size=60)
    run = speculation(verifier, draft, replace(SETTINGS, measure_overlap=True))
    run.prefill()
    proposal = propose(run.draft, run.shape, run.plan, run.dice)
    logits = run.target.score(proposal, None)
    outcome = judge_proposal(proposal, logits, run.draft.target_ids, run.plan, run.dice)
    target = logits[:, :-1].softmax(-1)
    guesses = scatter_to_target(
        probabilities(proposal.logits, Sampling(temperature=1.0)), run.draft.target_ids, 128
    )
    torch.testing.assert_close(outcome.overlap, torch.minimum(target, guesses).sum(-1))


def test_times_add_up(verifier: Verifier, make_draft):
    output = decode(verifier, make_draft(), [PROMPT], SETTINGS)
    times = output.times
    assert times.prefill > 0 and times.draft > 0 and times.verify > 0
    assert times.draft + times.verify <= times.decode
    assert times.prefill + times.decode == pytest.approx(output.generations[0].seconds)
    assert output.steps == len(output.generations[0].rounds)
