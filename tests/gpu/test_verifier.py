"""The verifier's states in bf16, by the library's attention kernels, against fp32 on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.utils.import_utils import is_flash_attn_2_available

from conf.choices import Attention
from conf.schema import VerifierSection
from models.verifier import Verifier, VerifierStates

LENGTHS = (40, 7, 23)  # of the texts in a right-padded batch
# Norm of the difference over the norm. Eight layers round each stream a few dozen times to bf16;
# 0.9e-2 was seen on a CPU, and two other tokens before a row move its states by more than 1.
BOUND = 2e-2


def texts() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (len(LENGTHS), max(LENGTHS)), generator=generator)
    for row, length in enumerate(LENGTHS):
        ids[row, length:] = 0
    return ids


def loaded(path: Path, attention: Attention, device: str, dtype: torch.dtype) -> Verifier:
    section = VerifierSection(path=str(path), attention=attention)
    return Verifier.load(section, path.parent / "cache", torch.device(device), dtype)


def states_of(verifier: Verifier, ids: Tensor) -> VerifierStates:
    """[tokens, ...] of the rows that are no padding, in fp64 on the CPU."""
    states = verifier.states(ids.to(verifier.device))
    rows = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return VerifierStates(states.aux.cpu().double()[rows], states.last.cpu().double()[rows])


def apart(found: VerifierStates, wanted: VerifierStates) -> float:
    pairs = ((found.aux, wanted.aux), (found.last, wanted.last))
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.fixture(scope="module")
def wanted(tiny_verifier: Path) -> VerifierStates:
    return states_of(loaded(tiny_verifier, Attention.sdpa, "cpu", torch.float32), texts())


@pytest.mark.gpu("verifier", seconds=20)
@pytest.mark.parametrize("attention", [Attention.sdpa, Attention.flash_attention_2])
def test_states_on_the_gpu_are_those_of_the_cpu(tiny_verifier, wanted, attention):
    if attention is Attention.flash_attention_2 and not is_flash_attn_2_available():
        pytest.skip("flash-attn is not installed")
    verifier = loaded(tiny_verifier, attention, "cuda", torch.bfloat16)
    assert apart(states_of(verifier, texts()), wanted) <= BOUND


def test_the_bound_lets_bf16_pass_and_catches_tokens_that_are_not_seen(tiny_verifier, wanted):
    rounded = loaded(tiny_verifier, Attention.sdpa, "cpu", torch.bfloat16)
    assert apart(states_of(rounded, texts()), wanted) <= BOUND
    changed = texts()
    changed[:, :2] = 5  # attention reads two other tokens; rows after them are compared alone
    found = states_of(rounded, changed)
    later = torch.cat([torch.arange(length) >= 2 for length in LENGTHS])
    both = [replace(one, aux=one.aux[later], last=one.last[later]) for one in (found, wanted)]
    assert apart(*both) > BOUND
