"""Export, import and export again: the same bytes, for every flag and every format."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError, Precision
from models.eagle3 import Eagle3Draft
from models.export.dialect import described
from models.export.engines import LAYOUTS
from models.export.layout import NORM_FLAGS, Layout
from models.export.write import export

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
FLAGS = (*NORM_FLAGS, "qk_norm")
SHAPES = [{}, {"draft_vocab_size": 128}, {"rope": LLAMA3}, {"aux_layers": [1, 3, 5, 6, 7]}]


@dataclass(frozen=True)
class Case:
    """A head and the precision it is written in."""

    bits: int  # a bit a flag
    shape: dict
    dtype: Precision

    @property
    def changes(self) -> dict:
        return {flag: bool(self.bits >> i & 1) for i, flag in enumerate(FLAGS)} | self.shape


# Every combination of flags, the shapes and both precisions in turn.
CASES = [Case(bits, SHAPES[bits % 4], list(Precision)[(bits >> 2) % 2]) for bits in range(32)]
CASES += [
    Case(0, {"layers": 2}, Precision.float32),
    Case(0b11001, {"layers": 3}, Precision.bfloat16),
]


@pytest.fixture(params=LAYOUTS.values(), ids=lambda layout: layout.format.value)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture
def write(layout: Layout, facts_of, plain_card, tmp_path: Path) -> Callable[..., Path]:
    """write(draft, name, dtype) -> a folder of that name."""

    def folder(draft: Eagle3Draft, name: str, dtype: Precision) -> Path:
        made = tmp_path / name / "head"
        return export(draft, facts_of(draft.config), made, plain_card, dtype, layout)

    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.bits:05b} {case.shape}")
def test_out_and_in_and_out_again(make_head, facts_of, read_back, write, layout, case: Case):
    """User reports B34, B40, B46, B47, B49, B64, B65: nothing is lost on the way."""
    draft = make_head(**case.changes)
    if list(layout.refusals(draft.config)):
        with pytest.raises(ConfigError, match="another engine"):
            write(draft, "one", case.dtype)
        return
    first = write(draft, "one", case.dtype)
    assert described(first, facts_of(draft.config)).assumed == []  # every key is explicit
    back = read_back(first, draft)
    assert back.config == draft.config
    second = write(back, "two", case.dtype)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    theirs = back.state_dict()
    exact = case.dtype is Precision.float32
    for name, tensor in draft.state_dict().items():
        written = tensor if exact or not tensor.is_floating_point() else tensor.bfloat16().float()
        assert torch.equal(tensor if name == "embed_tokens.weight" else written, theirs[name]), name
