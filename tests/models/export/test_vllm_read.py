"""A head that went out and came back is the same head."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.memory import DraftCache

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def run(draft, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(1, 9, 144, generator=generator)
    tokens = torch.randint(0, 128, (1, 9), generator=generator)
    share, positions = draft.share_of(tokens), torch.arange(9)[None]
    output = draft(share, draft.fuse(aux), positions, [DraftCache(9) for _ in draft.stack])
    return torch.cat([draft.logits(output.normed).flatten(), output.hidden.flatten()])


@pytest.mark.parametrize("number", range(32))
def test_round_trip_keeps_every_flag_and_every_bit(make_head, export_head, read_back, number):
    flags = {flag: bool(number >> i & 1) for i, flag in enumerate(FLAGS)}
    draft = make_head(**flags)
    back = read_back(export_head(draft), draft)
    assert back.config == draft.config
    assert {flag: getattr(back.config, flag) for flag in FLAGS} == flags
    theirs = draft.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in back.state_dict().items())
    assert torch.equal(run(back), run(draft))


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 128},
        {"aux_layers": [3, 6]},
        {
            "rope": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
        # the widths of Gemma-3-270M
        {"hidden_size": 640, "head_dim": 256, "num_heads": 4, "num_kv_heads": 1},
    ],
    ids=["full vocabulary", "two aux layers", "llama3 rope", "wide heads"],
)
def test_round_trip_of_other_shapes(make_head, export_head, read_back, changes):
    draft = make_head(**changes)
    back = read_back(export_head(draft), draft)
    assert back.config == draft.config
    ids = torch.arange(draft.config.draft_vocab_size)
    if draft.config.draft_vocab_size < 128:
        assert torch.equal(back.to_target_ids(ids), draft.to_target_ids(ids))
    else:
        assert torch.equal(back.to_target_ids(ids), ids)
    assert torch.equal(back.lm_head.weight, draft.lm_head.weight)


def test_the_other_spelling_is_read(make_head, export_head, read_back):
    draft = make_head()
    path = export_head(draft) / "model.safetensors"
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    back = read_back(path.parent, draft)
    assert torch.equal(run(back), run(draft))
