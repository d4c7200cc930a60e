"""Heads overfitted here, exported, and served by real vLLM: same tokens, same counts, same states.

A pairwise cover of formats, switches and verifiers on tiny random verifiers, and a small real one.
"""

import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent))  # the modules beside this one

from compared import Case
from learnt import moved
from pairwise import AXES, COVER
from serving import Serving
from vllm_process import VllmProcess

from conf.choices import ExportFormat
from conf.schema import DraftSection
from models.export.layout import WEIGHTS

QUICK = 3  # combinations in the normal suite: both formats and both draft classes are among them
DEMO = DraftSection(vocab_size=1024, fc_norm=True, norm_output=True)  # the demo's switches
PROMPTS = [
    "Write a short Python function that adds two numbers.",
    "Answer with JSON only: a red bicycle with the keys name, color and price.",
    "Write a short Python function that multiplies three numbers.",
    "List three animals that live in the sea.",
]


@pytest.fixture(scope="module")
def serving(
    vllm_python: Path, tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    process = VllmProcess(vllm_python, tmp_path_factory.mktemp("vllm"))
    yield Serving(process, tmp_path_factory.mktemp("served"), tiny_verifier)
    process.close()


def refuse_one_sided(case: Case) -> None:
    """Equal counts say nothing where all guesses stand, or none."""
    counters = case.counters
    assert 0.1 < counters.survival_by_depth[0] < 0.95, (case.name, counters)
    assert 0 < counters.accepted_by_depth[-1] < counters.accepted_by_depth[0], (case.name, counters)


def test_the_cover_holds_every_pair_of_values():
    missing = [
        (one, a, other, b)
        for one, other in combinations(AXES, 2)
        for a, b in product(AXES[one], AXES[other])
        if not any(getattr(row, one) == a and getattr(row, other) == b for row in COVER)
    ]
    assert not missing
    most = sorted(len(values) for values in AXES.values())[-2:]
    assert len(COVER) <= most[0] * most[1] + 1  # the fewest there can be, or one more
    quick = COVER[:QUICK]
    assert {row.format for row in quick} == set(AXES["format"])
    assert {row.qk_norm for row in quick} == set(AXES["qk_norm"])


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(COVER[:QUICK], id="quick"),
        pytest.param(COVER[QUICK:], id="rest", marks=pytest.mark.slow),
    ],
)
def test_every_combination_is_served_as_it_was_trained(serving: Serving, rows: list):
    cases = [serving.combination(row) for row in rows]
    for case in cases:
        refuse_one_sided(case)
    found = {case.name: serving.partings(case.name, case) for case in cases}
    assert {name: partings for name, partings in found.items() if partings} == {}


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_head_of_a_real_verifier_is_served_as_it_was_trained(serving: Serving, smollm2: Path):
    case = serving.real(smollm2, PROMPTS, DEMO)
    refuse_one_sided(case)
    assert serving.partings(case.name, case) == []


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_what_vllm_would_not_notice_is_seen(serving: Serving):
    """Layer ids off by one and absolute vocabulary ids load, and keep every token right."""
    row = COVER[0]
    assert row.pruned and row.format is ExportFormat.vllm
    case = serving.combination(row)
    shifted = serving.exported("shifted", case, row.format, moved(case.draft, -1))
    serving.ask("shifted", case, shifted, row.format)
    absolute = serving.exported("absolute", case, row.format)
    make_absolute(absolute / WEIGHTS, case.draft.config.vocab_size)
    serving.ask("absolute", case, absolute, row.format)
    assert kinds(serving.partings(case.name, case)) == set()
    assert kinds(serving.partings("shifted", case)) >= {"fc_input", "fc_output", "logits"}
    assert kinds(serving.partings("absolute", case)) == {"accepted", "logits"}


def kinds(partings: list[str]) -> set[str]:
    return {sentence.split(":")[0] for sentence in partings}


def make_absolute(weights: Path, total: int) -> None:
    """Verifier ids in place of offsets, lowered where vLLM would reach beyond the vocabulary."""
    tensors = load_file(weights)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = ids.clamp_max(total - len(ids))
    save_file(tensors, weights, metadata={"format": "pt"})
