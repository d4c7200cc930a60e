"""A small model trained here, exported, and served by real vLLM: same tokens, same counts."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from compared import counted_apart
from learnt import N_DRAFT, NEW_TOKENS, SETTINGS, cached, own_counters
from pairwise import Family
from serving import load, random_prompts, random_verifier
from vllm_process import Request, VllmProcess

from conf.choices import ExportFormat
from conf.schema import (
    ConfigError,
    DraftFamily,
    DraftSection,
    LossKind,
    Precision,
    Supervise,
    VerifierSection,
)
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack
from eval.decode import decode
from launch.export import main as export_command
from models.export.card import CardFacts, DataFacts
from models.export.small_model import check_model, export_model
from models.model_folder import is_model_folder
from models.small_model import ModelConfig, SmallModel
from models.verifier import Verifier
from train.families.small_model import SmallModelTest
from train.loss import Distillation

STEPS = 60


@pytest.fixture(scope="module")
def verifier(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Heads of 32, the narrowest that vLLM takes on a CPU."""
    folder = tmp_path_factory.mktemp("verifier")
    AutoTokenizer.from_pretrained(tiny_verifier).save_pretrained(folder)
    random_verifier(Family.llama, tied=True).save_pretrained(folder)
    return load(VerifierSection(path=str(folder)), folder)


def new(verifier: Verifier, **more: Any) -> SmallModel:
    section = DraftSection(family=DraftFamily.model, width=64, layers=2, **more)
    torch.manual_seed(0)
    return SmallModel.new(ModelConfig.of(section, verifier.facts))


def taught(verifier: Verifier, prompts: list[list[int]]) -> SmallModel:
    """By the trainer's own step, on the verifier's answers to the first half of ``prompts``."""
    learnt = prompts[: len(prompts) // 2]
    samples = [
        cached(verifier, ids, decode(verifier, None, [ids], SETTINGS).generations[0].tokens)
        for ids in learnt
    ]
    pack = CachedPack.of(samples)
    mask = torch.cat([one.sample.loss_mask for one in samples])
    batch = batch_of(pack, Chains.of(mask, pack.starts, 1, Supervise.span))
    draft = new(verifier)
    loss = Distillation(LossKind.kl, verifier.head.weight, verifier.model.config)
    module = SmallModelTest(draft, loss)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    weights = torch.full((len(samples),), 1 / batch.chains.counts[0])
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(batch, weights).loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


def exported(draft: SmallModel, verifier: Verifier, folder: Path) -> Path:
    path = verifier.facts.path
    card = CardFacts(path, path, "float32", None, DataFacts("answers learnt by heart"))
    kind = ExportFormat.vllm
    return export_model(draft, folder, card, Precision.float32, kind, verifier.tokenizer)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_accepts_what_our_loop_accepts(vllm_python: Path, verifier: Verifier, tmp_path: Path):
    prompts = random_prompts()
    draft = taught(verifier, prompts)
    folder = exported(draft, verifier, tmp_path / "served")
    (tmp_path / "vllm").mkdir()
    process = VllmProcess(vllm_python, tmp_path / "vllm")
    speculative = {"method": "draft_model", "model": str(folder)}
    speculative["num_speculative_tokens"] = N_DRAFT
    path = verifier.facts.path
    process.ask(Request("plain", path, prompts, NEW_TOKENS))
    process.ask(Request("served", path, prompts, NEW_TOKENS, speculative))
    ours = own_counters(verifier, draft, prompts)
    assert 0.1 < ours.survival_by_depth[0] < 0.95  # equal counts say nothing where all stand
    assert 0 < ours.accepted_by_depth[-1] < ours.accepted_by_depth[0]
    try:
        plain, served = process.answer("plain"), process.answer("served")
    finally:
        process.close()
    assert plain.drafts == 0 and served.tokens == plain.tokens
    assert list(counted_apart(ours, served)) == []


def test_an_exported_model_is_checked(verifier: Verifier, tmp_path: Path, capsys):
    """Each mistake that vLLM would not notice is a finding, and none where there is none."""
    folder, path = exported(new(verifier), verifier, tmp_path / "out"), Path(verifier.facts.path)
    assert is_model_folder(folder) and check_model(folder, path) == []
    assert export_command(["--check", str(folder), "--verifier", str(path)]) == 0
    card = (folder / "README.md").read_text()
    assert '"method": "draft_model"' in card and "of them the embedding of" in card
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "num_hidden_layers": 3, "intermediate_size": 32, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(changed))
    found = " | ".join(check_model(folder, path))
    for words in ("layers.2.mlp.up_proj.weight missing", "must be (32, 64)", "vocab_size=64"):
        assert words in found
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokens.json"):
        (folder / file).unlink(missing_ok=True)
    assert ["tokenizer.json: missing" in one for one in check_model(folder)] == [True]
    assert export_command(["--check", str(folder)]) == 1
    assert "tokenizer.json: missing" in capsys.readouterr().out


def test_what_vllm_would_refuse_is_refused_here(verifier: Verifier, tmp_path: Path):
    draft = new(verifier)
    card = CardFacts("v", "v", "float32", None, DataFacts("none"))
    asked = (draft, tmp_path / "out", card, Precision.float32)
    with pytest.raises(ConfigError, match=r"--to sglang: .* for vLLM alone"):
        export_model(*asked, ExportFormat.sglang, verifier.tokenizer)
    draft.config = replace(draft.config, vocab_size=draft.rows + 8)
    with pytest.raises(ConfigError, match=r"embedding has \d+ rows and the verifier's"):
        export_model(*asked, ExportFormat.vllm, verifier.tokenizer)
    assert not (tmp_path / "out").exists()
