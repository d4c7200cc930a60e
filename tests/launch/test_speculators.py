"""The speculators library loads its profile of our heads and computes our logits.

EYRIE_SPECULATORS_PYTHON names an interpreter that has it (tests/bench/peer_envs.sh makes one).
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from pairwise import COVER, Combination
from serving import random_prompts, tiny, write

from conf.choices import ExportFormat
from models.eagle3 import DraftConfig, Eagle3Draft
from models.memory import DraftCache
from models.verifier import Verifier
from models.vocab import DraftVocab

PROBE = Path(__file__).with_name("speculators_probe.py")
PYTHON = os.environ.get("EYRIE_SPECULATORS_PYTHON", "")
ROWS = [row for row in COVER if row.format is ExportFormat.speculators]
STEPS = 3  # of the unroll, as in the probe
LENGTH = 12
TOLERANCE = 1e-5  # absolute, float32, of logits that reach 1 and more


@torch.no_grad()
def our_logits(draft: Eagle3Draft, given: dict[str, Tensor]) -> Tensor:
    """[STEPS, T, Vd]; NaN where a row would be fed past the end. Each row as a chain in decoding:
    the keys of the rows before it, then its own of every step."""
    tokens, fused = given["tokens"], draft.fuse(given["aux"])
    positions = torch.arange(len(tokens))
    found = torch.full((STEPS, len(tokens), draft.config.draft_vocab_size), torch.nan)
    for t in range(len(tokens)):
        caches = [DraftCache(len(tokens) + STEPS) for _ in draft.stack]
        if t:
            share = draft.share_of(tokens[None, :t], asks=False)
            draft.remember(share, fused[None, :t], positions[None, :t], caches)
        hidden = fused[None, t : t + 1]
        for k in range(min(STEPS, len(tokens) - t)):
            share = draft.share_of(tokens[None, t + k : t + k + 1])
            output = draft(share, hidden, positions[None, t + k : t + k + 1], caches)
            hidden, found[k, t] = output.hidden, draft.logits(output.normed[0, 0])
    return found


def scattered(row: Combination, verifier: Verifier) -> Eagle3Draft:
    """All weights random, so that none can get lost without a difference."""
    draft = Eagle3Draft(DraftConfig.of(row.section, verifier.facts)).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.1 if parameter.dim() > 1 else 1 + noise * 0.3)
    draft.embed_tokens.weight.copy_(verifier.embedding)
    counts = torch.randint(0, 1000, (draft.config.vocab_size,), generator=generator)
    vocab = DraftVocab.from_counts(counts, draft.config.draft_vocab_size)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft.eval()


@dataclass(frozen=True)
class Head:
    name: str
    draft: Eagle3Draft
    folder: Path
    given: dict[str, Tensor]  # the verifier's states and the tokens ahead of them


@pytest.fixture(scope="module")
def heads(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Head]:
    """Of every combination in speculators' format, given to the library in one process."""
    if not PYTHON:
        pytest.skip("EYRIE_SPECULATORS_PYTHON names no interpreter that has speculators")
    root = tmp_path_factory.mktemp("speculators")
    made = []
    for row in ROWS:
        verifier = tiny(row, root, tiny_verifier)
        draft = scattered(row, verifier)
        folder = write(draft, verifier, root / "heads" / row.name, ExportFormat.speculators)
        ids = random_prompts()[0][: LENGTH + 1]
        aux = verifier.states(torch.tensor([ids[:-1]])).aux[0]
        given = {"aux": aux.contiguous(), "tokens": torch.tensor(ids[1:])}
        save_file(given, root / f"{row.name}.safetensors")
        made.append(Head(row.name, draft, folder, given))
    folders = [head.folder for head in made]
    run = subprocess.run(
        [PYTHON, PROBE, root, *folders],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return made


def test_the_library_computes_our_logits(heads: list[Head]):
    for head in heads:
        theirs = load_file(head.folder.parents[1] / f"{head.name}-logits.safetensors")
        ours = our_logits(head.draft, head.given)
        assert ours.shape == theirs["logits"].shape
        asked = ~ours.isnan()
        assert float((ours - theirs["logits"])[asked].abs().max()) <= TOLERANCE, head.name
        assert float(ours[asked].abs().max()) > 1
        size = head.draft.config.draft_vocab_size
        if size < head.draft.config.vocab_size:
            assert torch.equal(theirs["ids"], head.draft.to_target_ids(torch.arange(size)))
        else:
            assert "ids" not in theirs


def test_another_switch_would_show(heads: list[Head]):
    """The same weights, run with the residual taken elsewhere, are further away than that."""
    for head in heads:
        theirs = load_file(head.folder.parents[1] / f"{head.name}-logits.safetensors")
        head.draft.midlayer.normed = not head.draft.midlayer.normed
        ours = our_logits(head.draft, head.given)
        head.draft.midlayer.normed = not head.draft.midlayer.normed
        asked = ~ours.isnan()
        assert float((ours - theirs["logits"])[asked].abs().max()) > 100 * TOLERANCE
