"""The preview shows what is supervised, and its figures are the data's."""

import json
from pathlib import Path

import pytest
import torch

from conf.schema import RunConfig
from data import preview
from data.records import TokenizedSample
from models.verifier import load_tokenizer


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    config = RunConfig()
    config.verifier.path = str(tiny_verifier)
    config.run.cache = str(tmp_path / "cache")
    config.data.path = [str(tmp_path / "a.jsonl")]
    config.draft.vocab_size = 16
    with Path(config.data.path[0]).open("w") as file:
        for i in range(20):
            turns = [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "ab" * (i + 1)},
            ]
            file.write(json.dumps({"id": f"p{i}", "messages": turns}) + "\n")
    return config


def test_preview_prints_samples_and_figures(cfg, capsys):
    preview.main(cfg)
    out = capsys.readouterr().out
    assert "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n⟦ab<|im_end|>⟧" in out
    assert "\033[" not in out  # not a terminal
    assert out.count("\nsample ") == 2
    assert "tokens a sample (20 samples" in out
    assert "draft vocabulary: 16 of 128 tokens cover 100.0% of the training labels" in out
    supervised = sum(2 * (i + 1) + 1 for i in range(20))
    assert f"supervised: {supervised:,} tokens" in out


def test_colour_marks_the_same_text(cfg):
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    ids = torch.tensor(tokenizer("xyz", add_special_tokens=False)["input_ids"])
    sample = TokenizedSample("x", ids, torch.tensor([False, True, False]), False, False)
    assert preview.marked_text(sample, tokenizer, colour=False) == "x⟦y⟧z"
    assert preview.marked_text(sample, tokenizer, colour=True) == "x\033[1;32my\033[0mz"


def test_histogram_counts_every_sample():
    lengths = [1, 1, 2, 9, 10, 10, 10, 37]
    lines = preview.histogram(lengths)
    counts = [int(line.split()[3]) for line in lines]
    assert sum(counts) == len(lengths)
    assert counts[0] == 3
    assert lines[0].split()[:3] == ["1", "to", "4"]
    assert max(line.count("█") for line in lines) == 40
    assert preview.histogram([7]) == [line for line in preview.histogram([7]) if "to" in line]
