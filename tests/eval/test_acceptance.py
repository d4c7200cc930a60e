"""Counters by hand, walks against the live loop, the n-gram floor and the bootstrap."""

import math
import random
from dataclasses import replace

import pytest
import torch

from conf.schema import ConfigError
from conf.shapes import chain
from eval.acceptance import Counters, count_hits, report_acceptance, total, walk
from eval.decode import DecodeSettings, decode
from eval.generation import Round
from eval.ngram import floor_config, table_hits, table_walk
from models.phrases import PhraseTable
from models.verifier import Verifier

PROMPT = [1, 40, 41, 42, 43, 90, 3]
N = 4


def chain_round(proposed: list[int], accepted: int) -> Round:
    return Round(proposed, accepted, min(accepted + 1, len(proposed)))


def test_counters_by_hand():
    """Rounds of 3 guesses that accept 3, 0, 1, and one of 2 guesses that accepts 2."""
    rounds = [
        chain_round([5, 6, 7], 3),
        chain_round([5, 6, 7], 0),
        chain_round([5, 6, 7], 1),
        chain_round([5, 6], 2),
    ]
    counters = Counters.of(rounds, tokens=9, n_draft=3)
    assert counters == Counters(
        rounds=4,
        drafted=11,
        tested=3 + 1 + 2 + 2,
        accepted_by_depth=[3, 2, 1],
        reached_by_depth=[4, 3, 1],
        tokens=9,
    )
    assert counters.alpha == pytest.approx(6 / 8)
    assert counters.alpha_by_depth == pytest.approx([3 / 4, 2 / 3, 1.0])
    assert counters.survival_by_depth == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert counters.tau == pytest.approx(1 + 6 / 4)


def test_two_prompts_add_up():
    """Every round of every prompt weighs the same: not the last one alone, not prompts equally."""
    one = Counters.of([chain_round([1, 2], 2), chain_round([1, 2], 2)], 7, 2)
    two = Counters.of([chain_round([1, 2], 0)] * 4, 5, 2)
    both = one + two
    assert both == total([one, two])
    assert (both.rounds, both.drafted, both.tested, both.tokens) == (6, 12, 8, 12)
    assert both.tau == pytest.approx(1 + 4 / 6)
    assert report_acceptance([one, two], 10, 0).tau == both.tau


def test_tau_is_one_plus_survival_and_alpha_chains_to_it():
    generator = random.Random(0)
    accepted = [generator.randint(0, N) for _ in range(200)]
    counters = Counters.of([chain_round([0] * N, a) for a in accepted], 0, N)
    assert counters.tau == pytest.approx(1 + sum(counters.survival_by_depth))
    chained = [math.prod(counters.alpha_by_depth[: k + 1]) for k in range(N)]
    assert counters.survival_by_depth == pytest.approx(chained)
    assert counters.tested == sum(counters.reached_by_depth)


def test_nothing_counted_is_nan_and_adds_as_nothing():
    empty = Counters()
    assert math.isnan(empty.tau) and math.isnan(empty.alpha)
    some = Counters.of([chain_round([1, 2], 1)], 3, 2)
    assert empty + some == some == some + empty
    assert math.isnan(Counters.of([chain_round([1, 2], 0)], 2, 2).alpha_by_depth[1])


def test_hits_count_leading_matches_only():
    text = torch.tensor([10, 11, 12, 13, 14])
    guesses = torch.tensor([[12, 13, 14], [13, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert count_hits(guesses, text) == [3, 1, 0, 0, 0]
    right_then_unknown = torch.tensor([[0, 0, 0], [0, 0, 0], [14, 14, 14]])
    assert count_hits(right_then_unknown, text) == [0, 0, 1]
    after_a_miss = torch.tensor([[0, 13, 14]])
    assert count_hits(after_a_miss, text) == [0]


def test_walk_by_hand():
    """Answer x[3..9]: roots from x[3] on, rows 2..7; hits 2, then a miss, then 1."""
    hits = [9, 9, 2, 9, 9, 0, 1, 9]
    counters = walk(hits, first_row=2, end_row=8, n_draft=4)
    # Row 2 emits 3 tokens (x[4..6]), row 5 one (x[7]), row 6 two (x[8], x[9]): the end.
    assert counters == Counters.of(
        [chain_round([0] * 4, 2), chain_round([0] * 4, 0), chain_round([0] * 4, 1)], 7, 4
    )


def test_walk_of_an_answer_without_rounds():
    assert walk([0, 0, 0], first_row=2, end_row=2, n_draft=3) == Counters.of([], 1, 3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eos_at", [None, 1, 2, 5, 8])
def test_walk_counts_what_the_live_loop_counts(
    verifier: Verifier, follow, seed: int, eos_at: int | None
):
    """On the text with its tail, for a draft that is right at random rows and depths."""
    settings = DecodeSettings(40, [], chain(N))
    if eos_at is not None:
        answer = decode(verifier, None, [PROMPT], settings).generations[0].tokens
        settings = replace(settings, eos_ids=[answer[eos_at]])
    plain = decode(verifier, None, [PROMPT], settings, tail=N - 1).generations[0]
    text = torch.tensor([*PROMPT, *plain.tokens, *plain.tail])
    chance = random.Random(seed)
    right = [[chance.random() < 0.7 for _ in range(N)] for _ in range(200)]

    draft = follow(PROMPT, settings, lambda _number, root, depth: right[root - 1][depth])
    live = decode(verifier, draft, [PROMPT], settings).generations[0]
    guesses = torch.full((len(text), N), -1)
    for t in range(len(text)):
        for k in range(N):
            if right[t][k] and t + 2 + k < len(text):
                guesses[t, k] = text[t + 2 + k]
    end = len(PROMPT) + len(plain.tokens)
    walked = walk(count_hits(guesses, text), len(PROMPT) - 1, end - 2, N)
    assert walked == Counters.of(live.rounds, len(live.tokens), N)

    without_tail = walk(count_hits(guesses, text[:end]), len(PROMPT) - 1, end - 2, N)
    assert without_tail.rounds == walked.rounds
    assert 0 <= walked.accepted - without_tail.accepted < N


def counted(order: int, texts: list[list[int]]) -> PhraseTable:
    return PhraseTable.counted(replace(floor_config(16), order=order), texts)


def test_ngram_by_hand():
    table = counted(3, [[1, 2, 3, 1, 2, 4, 1, 2, 4], [5, 2, 9]])
    assert table.guess([1, 2]) == 4  # after (1, 2): 3 once, 4 twice
    assert table.guess([7, 7, 1, 2]) == 4  # only the last two tokens count
    assert table.guess([5, 2]) == 9
    assert table.guess([8, 2]) == 4  # (8, 2) unknown: after 2 comes 4 twice, 3 and 9 once
    assert table.guess([8]) == 2  # 8 unknown: 2 is the most frequent token
    assert table.guess([]) == 2


def test_ngram_ties_go_to_the_smallest_id():
    table = counted(4, [[1, 9], [1, 4], [1, 7]])
    assert table.guess([1]) == 4
    assert table.guess([2]) == 1  # 1 is seen three times


def test_ngram_hits_are_made_on_its_own_guesses():
    table = counted(4, [[1, 2, 3, 4, 5, 6]])
    text = [1, 2, 3, 4, 9, 6]
    assert table_hits(table, text, row=0, n_draft=4) == 2  # 3 and 4 right, 5 for 9 wrong
    assert table_hits(table, text, row=3, n_draft=4) == 0
    assert table_hits(table, text[:4], row=0, n_draft=4) == 2  # the end of the text


def test_ngram_walk_equals_walking_its_guesses():
    """Guess by guess on its own output, as a live draft would, against the shortcut."""
    chance = random.Random(1)
    texts = [[chance.choice([1, 2, 3, 4]) for _ in range(60)] for _ in range(8)]
    table = counted(4, texts[:6])
    text = texts[7]
    guesses = torch.zeros(len(text), N, dtype=torch.long)
    for t in range(len(text) - 1):
        context = text[: t + 2]
        for k in range(N):
            guesses[t, k] = table.guess(context)
            context = [*context, int(guesses[t, k])]
    walked = walk(count_hits(guesses, torch.tensor(text)), 9, 50, N)
    assert table_walk(table, text, 9, 50, N) == walked
    assert walked.accepted > 0


def test_ngram_without_text_is_refused():
    with pytest.raises(ConfigError, match=r"data\.path: .*n-gram table"):
        counted(4, [[], []])


def test_bootstrap_holds_the_estimate_and_narrows_with_prompts():
    chance = random.Random(2)

    def prompts(count: int) -> list[Counters]:
        return [
            Counters.of(
                [chain_round([0, 0], chance.choice([0, 0, 1, 2])) for _ in range(10)], 20, 2
            )
            for _ in range(count)
        ]

    few, lots = report_acceptance(prompts(10), 500, 0), report_acceptance(prompts(300), 500, 0)
    for report in (few, lots):
        assert report.tau_interval.low < report.tau < report.tau_interval.high
        assert report.alpha_interval.low < report.alpha < report.alpha_interval.high
        for alpha, interval in zip(
            report.alpha_by_depth, report.alpha_by_depth_intervals, strict=True
        ):
            assert interval.low <= alpha <= interval.high
    width = [r.tau_interval.high - r.tau_interval.low for r in (few, lots)]
    assert width[1] < width[0] / 3


def test_bootstrap_is_seeded_and_one_prompt_has_no_width():
    by_prompt = [Counters.of([chain_round([0], 1), chain_round([0], 0)], 4, 1)] * 3
    assert report_acceptance(by_prompt, 50, 7) == report_acceptance(by_prompt, 50, 7)
    single = report_acceptance(by_prompt[:1], 50, 7)
    assert single.tau_interval.low == single.tau_interval.high == single.tau == 1.5


def test_bootstrap_survives_a_depth_that_no_prompt_reached():
    report = report_acceptance([Counters.of([chain_round([0, 0], 0)], 2, 2)] * 3, 50, 0)
    assert math.isnan(report.alpha_by_depth[1])
    assert math.isnan(report.alpha_by_depth_intervals[1].low)
    with pytest.raises(ConfigError, match=r"no prompt.*eval\.prompts"):
        report_acceptance([], 50, 0)
