"""Medusa heads trained here, exported, and served by real vLLM: same tokens, same counts."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from compared import counted_apart
from learnt import N_DRAFT, NEW_TOKENS, SETTINGS, cached, own_counters
from pairwise import PRUNED, Family
from serving import load, random_prompts, random_verifier
from vllm_process import Request, VllmProcess, with_head

from conf.schema import FULL, DraftSection, HeadInit, LossKind, Precision, VerifierSection
from conf.schema import TTTSection as TTT
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack
from eval.acceptance import Counters
from eval.decode import decode
from models.export.card import CardFacts, DataFacts
from models.export.layout import WEIGHTS
from models.export.medusa import read_medusa
from models.export.medusa_check import check_medusa
from models.export.medusa_write import export_medusa
from models.medusa import MedusaConfig, MedusaDraft
from models.verifier import Verifier
from models.vocab import DraftVocab, draft_vocab_size
from train.families.medusa import MedusaTraining
from train.loss import Distillation

SECTIONS = {  # name -> what is trained: rows of their own or the verifier's, all tokens or some
    "own-pruned": DraftSection(vocab_size=PRUNED),
    "shared-pruned": DraftSection(vocab_size=PRUNED, head_init=HeadInit.frozen),
    "own-full": DraftSection(vocab_size=FULL, layers=2),
}


@dataclass(frozen=True)
class Case:
    """Heads in their folder, and what our own loop makes of them once read back from there."""

    folder: Path
    draft: MedusaDraft
    counters: Counters


def overfit(verifier: Verifier, prompts: list[list[int]], section: DraftSection) -> MedusaDraft:
    """Heads that know the verifier's own answers to the first half of ``prompts``."""
    learnt = prompts[: len(prompts) // 2]
    answers = [decode(verifier, None, [ids], SETTINGS).generations[0].tokens for ids in learnt]
    pack = CachedPack.of([cached(verifier, *pair) for pair in zip(learnt, answers, strict=True)])
    tokens = torch.tensor([token for ids in answers for token in ids])
    counts = torch.bincount(tokens, minlength=verifier.facts.vocab_size)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size(section, len(counts)))
    draft = MedusaDraft(MedusaConfig.of(section, verifier.facts, N_DRAFT))
    draft.initialise(verifier.ends, vocab, section.head_init)
    rows = verifier.ends.head[vocab.target_ids]
    loss = Distillation(LossKind.ce, rows, verifier.model.config)
    module = MedusaTraining(draft, loss, TTT(depth=N_DRAFT))
    mask = torch.cat([one.loss_mask for one in pack.samples])
    chains = Chains.of(mask, pack.starts, N_DRAFT, TTT().supervise)
    batch = batch_of(pack, chains)
    weights = torch.full((len(learnt),), 1 / chains.counts[0])
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(30):
        optimizer.zero_grad()
        module(batch, weights).loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


def served(vllm: VllmProcess, verifier: Verifier, name: str, folder: Path) -> Case:
    """Train, write, read back, and let vLLM begin."""
    path, prompts = verifier.facts.path, random_prompts()
    card = CardFacts(path, path, "float32", None, DataFacts("answers learnt by heart"))
    heads = overfit(verifier, prompts, SECTIONS[name])
    export_medusa(heads, verifier.facts, folder, card, Precision.float32)
    assert check_medusa(folder, Path(path)) == []
    ask(vllm, name, path, folder)
    draft = read_medusa(folder, verifier.facts, verifier.ends)
    return Case(folder, draft, own_counters(verifier, draft, prompts))


def ask(vllm: VllmProcess, name: str, path: str, folder: Path) -> None:
    beside = with_head(folder, N_DRAFT, "medusa")
    vllm.ask(Request(name, path, random_prompts(), NEW_TOKENS, beside))


def spoil(case: Case, folder: Path) -> Path:
    """The same heads one place further on: head k where head k+1 belongs. It loads."""
    shutil.copytree(case.folder, folder)
    tensors = load_file(folder / WEIGHTS)
    moved = {
        name: tensors[name.replace(f".{k}.", f".{(k + 1) % N_DRAFT}.", 1)]
        for k in range(N_DRAFT)
        for name in tensors
        if name.startswith((f"blocks.{k}.", f"lm_heads.{k}."))
    }
    save_file({**tensors, **moved}, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    process = VllmProcess(vllm_python, tmp_path_factory.mktemp("vllm"))
    yield process
    process.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_heads_are_served_as_they_were_trained(
    vllm: VllmProcess, tiny_verifier: Path, tmp_path: Path
):
    place = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, place)
    random_verifier(Family.llama, tied=False).save_pretrained(place)
    verifier = load(VerifierSection(path=str(place)), tmp_path)
    vllm.ask(Request("plain", str(place), random_prompts(), NEW_TOKENS))
    cases = {name: served(vllm, verifier, name, tmp_path / name) for name in SECTIONS}
    ask(vllm, "spoilt", str(place), spoil(cases["own-full"], tmp_path / "spoilt"))
    plain = vllm.answer("plain")
    for name, case in cases.items():
        found, counters = vllm.answer(name), case.counters
        assert 0.1 < counters.survival_by_depth[0] < 0.95, (name, counters)  # else they say nothing
        assert counters.accepted_by_depth[-1] > 0, (name, counters)
        assert found.tokens == plain.tokens, name
        assert list(counted_apart(counters, found)) == [], name
    spoilt = vllm.answer("spoilt")
    assert spoilt.tokens == plain.tokens  # whatever is guessed
    assert list(counted_apart(cases["own-full"].counters, spoilt)) != []
