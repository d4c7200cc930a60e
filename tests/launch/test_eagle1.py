"""EAGLE-1 heads trained here, exported, and served by real vLLM: same tokens, counts and states."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from compared import TOLERANCE, apart, counted_apart
from learnt import N_DRAFT, NEW_TOKENS, SETTINGS, cached, own_counters
from pairwise import Family
from serving import encode, load, random_prompts, random_verifier
from vllm_process import Request, VllmProcess, with_head

from conf.schema import DraftSection, Precision, Supervise, VerifierSection
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack
from eval.acceptance import Counters
from eval.decode import decode
from models.eagle1 import Eagle1Config, Eagle1Draft
from models.export.card import CardFacts, DataFacts
from models.export.check import check
from models.export.eagle1 import EAGLE1
from models.export.layout import WEIGHTS
from models.export.read_eagle1 import read_eagle1
from models.export.write import export
from models.kernels import CPU_FLASH
from models.memory import DraftCache
from models.verifier import Verifier
from train.families.eagle1 import FeatureRegression

TEXTS = [
    "Write a short Python function that adds two numbers.",
    "Answer with JSON only: a red bicycle with the keys name, color and price.",
    "Write a short Python function that multiplies three numbers.",
    "List three animals that live in the sea.",
]


@dataclass(frozen=True)
class Case:
    """A head, in its folder, and what our own loop makes of it once it is read back from there."""

    verifier: Verifier
    draft: Eagle1Draft
    prompts: list[list[int]]
    folder: Path
    counters: Counters


@pytest.fixture(scope="module")
def vllm(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    process = VllmProcess(vllm_python, tmp_path_factory.mktemp("vllm"))
    yield process
    process.close()


def overfit(verifier: Verifier, prompts: list[list[int]], steps: int) -> Eagle1Draft:
    """A head that knows the verifier's own answers to the first half of ``prompts``."""
    learnt = prompts[: len(prompts) // 2]
    answers = [decode(verifier, None, [ids], SETTINGS).generations[0].tokens for ids in learnt]
    pack = CachedPack.of([cached(verifier, *pair) for pair in zip(learnt, answers, strict=True)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = Eagle1Draft(Eagle1Config.of(DraftSection(), verifier.facts))
        draft.initialise(verifier.ends)
        norm = draft.layer.post_attention_layernorm.weight.data
        norm += 0.2 * torch.randn_like(norm)  # one that got lost then shows
    mask = torch.cat([one.loss_mask for one in pack.samples])
    chains = Chains.of(mask, pack.starts, 1, Supervise.span)
    batch, module = batch_of(pack, chains), FeatureRegression(draft, CPU_FLASH)
    weights = torch.full((len(learnt),), 1 / chains.counts[0])
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        module(replace(batch, draw=step), weights).loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return draft.eval().requires_grad_(False)


def served(
    vllm: VllmProcess, verifier: Verifier, prompts: list[list[int]], folder: Path, steps: int
) -> Case:
    """Train, write, read back, and let vLLM begin."""
    path = verifier.facts.path
    vllm.ask(Request(f"plain-{folder.name}", path, prompts, NEW_TOKENS))
    card = CardFacts(path, path, "float32", None, DataFacts("answers learnt by heart"))
    export(
        overfit(verifier, prompts, steps), verifier.facts, folder, card, Precision.float32, EAGLE1
    )
    assert check(folder, Path(path)) == []
    ask(vllm, folder.name, path, prompts, folder)
    draft = read_eagle1(folder, verifier.ends)
    return Case(verifier, draft, prompts, folder, own_counters(verifier, draft, prompts))


def ask(vllm: VllmProcess, name: str, path: str, prompts: list[list[int]], head: Path) -> None:
    beside = with_head(head, N_DRAFT, "eagle")
    vllm.ask(Request(name, path, prompts, NEW_TOKENS, beside, watch=True))


@torch.no_grad()
def first_guess(case: Case) -> dict[str, Tensor]:
    """Our own prefill of the first prompt: what vLLM's hooks record, by the same names."""
    verifier, draft, ids = case.verifier, case.draft, case.prompts[0]
    states = verifier.states(torch.tensor([ids]))
    token = verifier.logits_from(states.last[:, -1]).argmax(-1)
    shifted = torch.cat([torch.tensor([ids[1:]]), token[None]], 1)
    positions, memory = torch.arange(len(ids))[None], DraftCache(len(ids))
    pair = torch.cat([verifier.embedding[shifted[0]], states.last[0]], -1)
    output = draft(draft.share_of(shifted), draft.fuse(states.aux), positions, [memory])
    return {
        "input_ids": shifted[0],
        "positions": positions[0],
        "fc_input": pair,
        "fc_output": draft.fc(pair),
        "logits": draft.logits(output.normed[0, -1:]),
    }


def partings(vllm: VllmProcess, case: Case, name: str) -> list[str]:
    """Where vLLM, with the head served as ``name``, and our own code part ways."""
    plain, found = vllm.answer(f"plain-{case.folder.name}"), vllm.answer(name)
    said = [] if found.tokens == plain.tokens else ["tokens: differ"]
    said += counted_apart(case.counters, found)
    states, ours = vllm.states(name), first_guess(case)
    for key, value in ours.items():
        theirs = states[key][: len(value)]
        if value.dtype is torch.int64 and not torch.equal(theirs.long(), value):
            said.append(f"{key}: {theirs.tolist()}, ours {value.tolist()}")
        elif value.dtype is not torch.int64 and apart(value, theirs) > TOLERANCE:
            said.append(f"{key}: {apart(value, theirs):.3g} apart")
    return said


def refuse_one_sided(case: Case) -> None:
    """Equal counts say nothing where all guesses stand, or none."""
    counters = case.counters
    assert 0.1 < counters.survival_by_depth[0] < 0.95, counters
    assert 0 < counters.accepted_by_depth[-1] < counters.accepted_by_depth[0], counters


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", list(Family))
def test_a_head_is_served_as_it_was_trained(
    vllm: VllmProcess, tiny_verifier: Path, tmp_path: Path, family: Family
):
    place = tmp_path / "verifier"
    shutil.copytree(tiny_verifier, place)
    random_verifier(family, tied=False).save_pretrained(place)
    verifier = load(VerifierSection(path=str(place), aux_layers=[-1]), tmp_path)
    case = served(vllm, verifier, random_prompts(), tmp_path / family.value, steps=80)
    refuse_one_sided(case)
    spoilt = spoil(case, tmp_path / f"{family.value}-spoilt")
    ask(vllm, spoilt.name, str(place), case.prompts, spoilt)
    assert partings(vllm, case, case.folder.name) == []
    assert any(one.startswith("fc_output") for one in partings(vllm, case, spoilt.name))


def spoil(case: Case, folder: Path) -> Path:
    """The same head with fc's two halves exchanged, as [state ; embedding]: it loads."""
    shutil.copytree(case.folder, folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_head_of_a_real_verifier_is_served_as_it_was_trained(
    vllm: VllmProcess, smollm2: Path, tmp_path: Path
):
    verifier = load(VerifierSection(path=str(smollm2), aux_layers=[-1]), tmp_path)
    prompts = [encode(verifier, text) for text in TEXTS]
    case = served(vllm, verifier, prompts, tmp_path / "real", steps=40)
    refuse_one_sided(case)
    assert partings(vllm, case, "real") == []
