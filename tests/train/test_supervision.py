"""Which rows carry loss: checked by hand, by the definition, and at the edges."""

import pytest
import torch

from conf.schema import Supervise
from train.ttt import supervised_rows


def rows(mask: list[int], depth: int, rule: Supervise) -> list[list[int]]:
    found = supervised_rows(torch.tensor([mask], dtype=torch.bool), depth, rule)
    return [found[k, 0].nonzero().flatten().tolist() for k in range(depth)]


def test_five_prompt_tokens_and_three_answer_tokens():
    # answer [5, 8): labels x[6], x[7]; step 0 at rows 4, 5; step 1 at row 4; nothing deeper
    mask = [0, 0, 0, 0, 0, 1, 1, 1]
    assert rows(mask, 4, Supervise.span) == [[4, 5], [4], [], []]


def test_any_counts_chains_that_start_before_the_answer():
    mask = [0, 0, 0, 0, 0, 1, 1, 1]
    assert rows(mask, 3, Supervise.any) == [[4, 5], [3, 4], [2, 3]]


def test_two_answers_never_share_a_chain():
    mask = [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert rows(mask, 3, Supervise.span) == [[0, 1, 5, 6], [0, 5], []]


@pytest.mark.parametrize("rule", list(Supervise))
def test_definition_on_random_masks(rule: Supervise):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        mask = (torch.rand(1, 40, generator=generator) < 0.7).to(torch.bool)
        spans, start = [], None
        flags = [*mask[0].tolist(), False]
        for i, inside in enumerate(flags):
            if inside and start is None:
                start = i
            if not inside and start is not None:
                spans.append((start, i))
                start = None
        found = supervised_rows(mask, 5, rule)
        for k in range(5):
            expected = set()
            for a, b in spans:
                if rule is Supervise.span:
                    expected |= set(range(max(a - 1, 0), b - 2 - k))
                else:
                    expected |= {j - 2 - k for j in range(a + 1, b) if j - 2 - k >= 0}
            assert set(found[k, 0].nonzero().flatten().tolist()) == expected


def test_short_answers_give_fewer_steps_and_padding_none():
    assert rows([0, 1, 1, 0, 0, 0], 7, Supervise.span) == [[0], [], [], [], [], [], []]
    assert rows([0, 1, 0, 0], 2, Supervise.span) == [[], []]
    assert rows([0, 0, 0, 0], 2, Supervise.any) == [[], []]
