"""Batched generation: every request as if it were alone, each ended by its own end token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError, Precision, VerifierSection
from models.generate import Request, end_ids, generate
from models.sampling import Sampling
from models.verifier import Verifier


@pytest.fixture
def verifier(tiny_verifier: Path, tmp_path: Path) -> Verifier:
    section = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    return Verifier.load(section, tmp_path, torch.device("cpu"), torch.float32)


def test_an_end_token_as_the_last_allowed_one_is_no_cut(verifier: Verifier):
    prompt = verifier.tokenizer("hello")["input_ids"]
    free = next(generate(verifier, [Request(prompt)], 6, []))
    assert free.cut and len(free.ids) == 6
    at = free.ids.index(free.ids[5])  # the first place of that token
    ended = next(generate(verifier, [Request(prompt)], at + 1, [free.ids[5]]))
    assert not ended.cut and ended.ids == free.ids[: at + 1]


def test_end_ids_come_from_all_three_places(verifier: Verifier):
    verifier.facts = replace(verifier.facts, eos_ids=[7])
    verifier.model.generation_config.eos_token_id = [9, 7]
    assert end_ids(verifier) == [2, 7, 9]
    verifier.model.generation_config.eos_token_id = None
    assert end_ids(verifier) == [2, 7]


def test_sampling_of_a_batch_may_differ_by_request(verifier: Verifier):
    prompt = verifier.tokenizer("hello")["input_ids"]
    kinds = [Sampling(), Sampling(1.0), Sampling(2.0, top_p=0.9), Sampling(1.0)]
    requests = [Request(prompt, kind, seed=i) for i, kind in enumerate(kinds)]
    together = {a.index: a.ids for a in generate(verifier, requests, 8, [2])}
    alone = {i: next(generate(verifier, [r], 8, [2])).ids for i, r in enumerate(requests)}
    assert together == alone


def test_an_empty_batch_and_an_empty_prompt(verifier: Verifier):
    assert list(generate(verifier, [], 4, [2])) == []
    with pytest.raises(ConfigError, match=r"verifier\.path=.*: a prompt has no tokens"):
        list(generate(verifier, [Request([5]), Request([])], 4, [2]))


def test_answers_come_as_they_end(verifier: Verifier):
    """Ragged prompts, each cut off the batch at its own end; the order is that of ending."""
    prompts = [verifier.tokenizer(text)["input_ids"] for text in ("abc", "z", "hello there", "q!")]
    free = {a.index: a.ids for a in generate(verifier, [Request(p) for p in prompts], 12, [])}
    ends = [free[0][2], free[2][5]]
    answers = list(generate(verifier, [Request(p) for p in prompts], 12, ends))
    for answer in answers:
        at = next((i for i, token in enumerate(free[answer.index]) if token in ends), 11)
        assert answer.ids == free[answer.index][: at + 1]
    assert [len(a.ids) for a in answers] == sorted(len(a.ids) for a in answers)
    assert len({len(a.ids) for a in answers}) > 1
