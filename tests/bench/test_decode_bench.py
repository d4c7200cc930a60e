"""The decoding benchmark's whole path on a tiny verifier and a random head."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.schema import DraftSection, HeadInit, VerifierSection
from models.draft_file import save_draft
from models.eagle3 import DraftConfig, Eagle3Draft
from models.verifier import load_ends, load_facts
from models.vocab import DraftVocab

DECODE = Path(__file__).with_name("decode.py")


@pytest.fixture
def head(tiny_verifier: Path, tmp_path: Path) -> Path:
    section = VerifierSection(path=str(tiny_verifier))
    config = DraftConfig.of(DraftSection(), load_facts(section, tmp_path))
    draft = Eagle3Draft(config)
    vocab = DraftVocab.from_counts(torch.arange(config.vocab_size), config.draft_vocab_size)
    draft.initialise(load_ends(section, tmp_path, torch.float32), vocab, HeadInit.verifier)
    save_draft(tmp_path / "head", config, draft.state_dict())
    return tmp_path / "head"


def test_the_path_runs_and_leaves_its_figures(head: Path, tiny_verifier: Path, tmp_path: Path):
    target, prompts = tmp_path / "decode.json", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(3)))
    options = ["--verifier", tiny_verifier, "--prompts", prompts, "--count", "3", "--tokens", "8"]
    options += ["--batches", "1", "3", "--dtypes", "float32", "--chains", "2", "--trees", "2x1"]
    options += ["--assistant-layers", "2", "--repeats", "2", "--threads", "1", "--json", target]
    run = subprocess.run(
        [sys.executable, DECODE, head, *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "| 1 | N = 2" in run.stdout and "| 3 | 2x1" in run.stdout
    figures = json.loads(target.read_text())
    by_batch = figures["figures"]["float32"]["by_batch"]
    assert set(by_batch["1"]["library"]) == {"generate", "assistant_model"}
    assert set(by_batch["3"]["shapes"]) == {"1", "2", "2x1"}
    assert [bar["bound"] for bar in figures["bars"]] == [0.9, 1.0]
    assert all(bar["value"] > 0 for bar in figures["bars"])
