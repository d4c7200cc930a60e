"""The speculators library loads its profile of our heads and computes our logits.

EYRIE_SPECULATORS_PYTHON names an interpreter that has it (tests/bench/peer_envs.sh makes one).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from pairwise import COVER, Combination
from serving import Serving

from conf.choices import ExportFormat
from models.eagle3 import Eagle3Draft
from models.memory import DraftCache

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
        cache = DraftCache(len(tokens) + STEPS)
        if t:
            share = draft.share_of(tokens[None, :t], asks=False)
            draft.remember(share, fused[None, :t], positions[None, :t], cache)
        hidden = fused[None, t : t + 1]
        for k in range(min(STEPS, len(tokens) - t)):
            share = draft.share_of(tokens[None, t + k : t + k + 1])
            output = draft(share, hidden, positions[None, t + k : t + k + 1], cache)
            hidden, found[k, t] = output.hidden, draft.logits(output.normed[0, 0])
    return found


def scattered(draft: Eagle3Draft) -> Eagle3Draft:
    """All weights random, so that none can get lost without a difference."""
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        wide = parameter.dim() > 1
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.1 if wide else 1 + noise * 0.3)
    return draft


def test_speculators_computes_our_logits(serving_without_vllm: Serving, tmp_path: Path):
    ...
