"""The library's own answers: batches padded on the left, and a small model that guesses."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import ConfigError, VerifierSection
from eval.decode import DecodeSettings, decode
from eval.library import (
    cut,
    generate,
    library_answers,
    library_sampling,
    load_assistant,
    refuse_other_assistant,
)
from eval.output import StopStrings
from eval.timed import Question
from models.sampling import Sampling
from models.verifier import Verifier

PROMPTS = [[5, 6, 7], [9, 8, 1, 4, 3, 2, 11], [12]]


@pytest.fixture
def settings(verifier: Verifier) -> DecodeSettings:
    """An end token that some of the answers have, so that they end apart."""
    settings = DecodeSettings(20, [])
    free = decode(verifier, None, PROMPTS, settings).generations
    return replace(settings, eos_ids=[free[0].tokens[6]])


@pytest.fixture
def assistant(section: VerifierSection, verifier: Verifier, tmp_path: Path):
    return load_assistant(section.path, section, tmp_path, verifier)


@pytest.mark.parametrize("size", [1, 3])
def test_greedy_answers_are_our_plain_loops(verifier: Verifier, settings, size: int):
    """In float32. A batch that were padded on the right would go on from its padding."""
    prompts = PROMPTS[:size]
    own = [one.tokens for one in decode(verifier, None, prompts, settings).generations]
    rows = generate(verifier, None, prompts, settings)
    found = [cut(verifier, ids, row, settings) for ids, row in zip(prompts, rows, strict=True)]
    assert found == own
    assert len({len(tokens) for tokens in own}) == min(size, 2), "they end apart"
    run = library_answers(verifier, None, [Question("", ids) for ids in prompts], settings, "x")
    assert run.timing.tokens == sum(map(len, own)) and run.timing.first_tokens == size
    assert run.timing.decode_seconds > 0 and run.requests == []


def test_assisted_answers_are_the_verifiers(verifier: Verifier, settings, assistant):
    for ids in PROMPTS:
        own = decode(verifier, None, [ids], settings).generations[0].tokens
        (row,) = generate(verifier, assistant, [ids], settings)
        assert cut(verifier, ids, row, settings) == own


def test_a_stop_string_ends_the_librarys_answers_where_it_ends_ours(verifier: Verifier, assistant):
    free = DecodeSettings(20, [])
    tokens = decode(verifier, None, PROMPTS[:1], free).generations[0].tokens
    texts = [str(verifier.tokenizer.decode([token])) for token in tokens[3:]]
    stop = StopStrings((next(text for text in texts if text),), verifier.tokenizer)
    settings = replace(free, stop=stop)
    own = decode(verifier, None, PROMPTS[:1], settings).generations[0].tokens
    (row,) = generate(verifier, None, PROMPTS[:1], settings)
    assert row == own and len(own) < 20
    (row,) = generate(verifier, assistant, PROMPTS[:1], settings)
    assert cut(verifier, PROMPTS[0], row, settings) == own and len(row) < 20


def test_the_same_filters_reach_the_library():
    found = library_sampling(Sampling(0.7, top_k=5, top_p=0.9, min_p=0.1))
    assert found["do_sample"] is True
    assert [found[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [
        0.7,
        5,
        0.9,
        0.1,
    ]
    assert library_sampling(Sampling(0.0, top_k=5))["do_sample"] is False


def test_an_assistant_that_is_not_there(section: VerifierSection, verifier, tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_assistant(str(tmp_path / "nowhere"), section, tmp_path, verifier)


def test_an_assistant_with_other_rows(section: VerifierSection, verifier, tmp_path, assistant):
    assistant.config.vocab_size += 8
    with pytest.raises(ConfigError, match=r"eval\.assistant=small: it has .* rows, the verifier"):
        refuse_other_assistant("small", assistant, section, tmp_path, verifier)
