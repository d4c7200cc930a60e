"""A head and a verifier of other tokens: refused, with the first id that differs."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conf.schema import ConfigError
from models.token_strings import FILE, refuse_other_tokens, save_tokens, token_strings


@pytest.fixture
def tokenizer(tiny_verifier: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(tiny_verifier)


def test_every_id_has_its_token(tokenizer: PreTrainedTokenizerFast):
    tokens = token_strings(tokenizer)
    assert len(tokens) == 128 and tokens[:4] == ["<|unk|>", "<|im_start|>", "<|im_end|>", "\n"]
    assert [tokenizer.convert_tokens_to_ids(token) for token in tokens] == list(range(128))


def test_the_tokens_of_its_own_verifier(tokenizer, tmp_path: Path, capsys):
    save_tokens(tmp_path, tokenizer)
    refuse_other_tokens(tmp_path, tokenizer)
    assert capsys.readouterr().out == ""


def test_the_first_id_that_differs_is_named(tokenizer, tmp_path: Path):
    tokens = token_strings(tokenizer)
    tokens[70], tokens[71] = tokens[71], tokens[70]
    (tmp_path / FILE).write_text(json.dumps(tokens))
    with pytest.raises(ConfigError) as refused:
        refuse_other_tokens(tmp_path, tokenizer)
    text = str(refused.value)
    assert text.startswith(f"verifier.path={tokenizer.name_or_path}: token 70 is {tokens[71]!r}")
    assert f"trained with {tokens[70]!r} there" in text and "\n" not in text


@pytest.mark.parametrize("change", ["more", "fewer", "a gap"])
def test_a_spare_row_is_no_difference(change: str, tokenizer, tmp_path: Path):
    tokens = token_strings(tokenizer)
    if change == "more":
        tokens += [None, "<|new|>"]
    elif change == "fewer":
        del tokens[120:]
    else:
        tokens[50] = None
    (tmp_path / FILE).write_text(json.dumps(tokens))
    refuse_other_tokens(tmp_path, tokenizer)


def test_a_head_without_them_is_not_compared_in_silence(tokenizer, tmp_path: Path, capsys):
    refuse_other_tokens(tmp_path, tokenizer)
    assert "holds no tokens.json, so its tokens were not compared" in capsys.readouterr().out
