"""Export, import and export again: the same bytes, for every flag and every format."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conf.schema import Precision
from models.eagle3 import Eagle3Draft
from models.export.dialect import described
from models.export.vllm import export

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SHAPES = [{}, {"draft_vocab_size": 128}, {"rope": LLAMA3}, {"aux_layers": [1, 3, 5, 6, 8]}]
# A format is one line: what writes a folder in it.
FORMATS: dict[str, Callable] = {
    "vllm": lambda draft, facts, folder, card, dtype: export(draft, facts, folder, card, dtype),
}


def cases() -> list[tuple[int, dict, Precision]]:
    """Every combination of flags, the shapes and both precisions in turn."""
    kinds = list(Precision)
    return [(bits, SHAPES[bits % 4], kinds[(bits >> 2) % 2]) for bits in range(16)]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("bits", "shape", "dtype"), cases())
def test_out_and_in_and_out_again(
    make_head,
    facts_of,
    read_back,
    plain_card,
    tmp_path: Path,
    capsys,
    format_name,
    bits,
    shape,
    dtype,
):
    """User reports B34, B40, B46, B47, B49, B64, B65: nothing is lost on the way."""
    flags = {flag: bool(bits >> i & 1) for i, flag in enumerate(FLAGS)}
    draft: Eagle3Draft = make_head(**flags, **shape)
    facts, write = facts_of(draft.config), FORMATS[format_name]
    first, second = tmp_path / "one" / "head", tmp_path / "two" / "head"
    write(draft, facts, first, plain_card, dtype)
    capsys.readouterr()
    back = read_back(first, draft)
    assert back.config == draft.config
    assert described(first, facts).assumed == [] and not capsys.readouterr().out
    write(back, facts, second, plain_card, dtype)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    if dtype is Precision.float32:
        theirs = back.state_dict()
        assert all(torch.equal(tensor, theirs[n]) for n, tensor in draft.state_dict().items())
