"""launch.export --check DIR --verifier PATH on a head that learnt a tiny verifier's own answers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from conf.schema import (
    FULL,
    DraftSection,
    HeadInit,
    LossKind,
    Precision,
    Supervise,
    TTTSection,
    VerifierSection,
)
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample
from data.states import states_of
from launch.alignment import TALKS, TURNS, own_texts
from launch.export import main
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.write import export
from models.kernels import CPU_FLASH
from models.verifier import Verifier, load_ends
from models.vocab import DraftVocab
from train.loss import Distillation
from train.ttt import TrainingTimeTest

IDS, STEPS = [2, 4, 6], 60
AUX = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Trained:
    folder: Path  # an export
    path: Path  # the verifier's
    verifier: Verifier


@pytest.fixture(scope="module")
def trained(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The tiny verifier with layers that turn the stream far, and a head that learnt from it."""
    path, cache = tmp_path_factory.mktemp("lively"), tmp_path_factory.mktemp("cache")
    model = LlamaForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= 8
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_verifier).save_pretrained(path)
    section = VerifierSection(path=str(path), dtype=Precision.float32, aux_layers=list(IDS))
    verifier = Verifier.load(section, cache, torch.device("cpu"), torch.float32)
    ends = load_ends(section, cache, torch.float32)
    draft = Eagle3Draft(DraftConfig.of(DraftSection(vocab_size=FULL), verifier.facts))
    torch.manual_seed(0)
    counts = torch.ones(verifier.facts.vocab_size, dtype=torch.int64)
    draft.initialise(ends, DraftVocab.from_counts(counts, len(counts)), HeadInit.verifier)
    teach(draft, verifier, ends.head)
    card = CardFacts(str(path), str(path), "float32", None, DataFacts("its own answers"))
    folder = export(draft, verifier.facts, tmp_path_factory.mktemp("run") / "vllm", card)
    return Trained(folder, path, verifier)


def teach(draft: Eagle3Draft, verifier: Verifier, head: torch.Tensor) -> None:
    samples = [
        CachedSample(sample=one, **vars(states_of(verifier, [one], verifier.dtype)[0]))
        for one in own_texts(verifier)
    ]
    ttt, pack = TTTSection(depth=2), CachedPack.of(samples)
    mask = torch.cat([one.sample.loss_mask for one in samples])
    batch = batch_of(pack, Chains.of(mask, pack.starts, ttt.depth, Supervise.span))
    teacher = Distillation(LossKind.ce, head, verifier.model.config)
    module = TrainingTimeTest(draft, teacher, ttt, CPU_FLASH)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    weights = torch.full((len(samples),), 1 / int(mask.sum()))
    for _ in range(STEPS):
        module(batch, weights).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.eval().requires_grad_(False)


def copy_with(trained: Trained, folder: Path, change: Callable[[dict], object]) -> Path:
    """The export with a config.json that is consistent, and wrong."""
    shutil.copytree(trained.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_texts_are_the_verifiers_own(trained: Trained):
    """Token for token what a forward without a cache finds likeliest, in both turns."""
    texts = own_texts(trained.verifier)
    assert len(texts) == TALKS
    for text in texts:
        rows = text.loss_mask.nonzero().flatten() - 1
        begins = (text.loss_mask.int().diff() == 1).sum()
        assert begins == TURNS
        states = trained.verifier.states(text.input_ids[None])
        found = trained.verifier.logits_from(states.last[0, rows]).argmax(-1)
        assert (found == text.input_ids[rows + 1]).float().mean() > 0.99  # but for ties


def test_the_right_file_is_in_order(trained: Trained, capsys: pytest.CaptureFixture[str]):
    assert main(["--check", str(trained.folder), "--verifier", str(trained.path)]) == 0
    said = capsys.readouterr().out
    assert f"{AUX}=[2, 4, 6]: " in said and "in order, nothing found" in said
    assert "rope_theta=10000.0: the verifier's" in said


@pytest.mark.parametrize("by", [-1, 1])
def test_ids_off_by_one_end_with_1(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: int
):
    ids = [n + by for n in IDS]

    def shift(config: dict) -> None:
        config[AUX] = ids
        config["eagle_config"][AUX] = [n - 1 for n in ids]

    folder = copy_with(trained, tmp_path / "shifted", shift)
    assert main(["--check", str(folder)]) == 0  # the folder alone shows nothing
    assert main(["--check", str(folder), "--verifier", str(trained.path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"config.json: {AUX}={ids}: the verifier's streams [2, 4, 6] are")
    assert last.endswith("ids off by one")
