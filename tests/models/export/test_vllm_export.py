"""The written folder: exact tensors, exact keys, exact bits; whole or not there at all."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from conf.schema import ConfigError, Precision
from models.export.check import check
from models.export.write import export
from models.rope import Rope, settled

PLAIN = {
    "fc.weight": (48, 144),
    "midlayer.input_layernorm.weight": (48,),
    "midlayer.hidden_norm.weight": (48,),
    "midlayer.self_attn.q_proj.weight": (128, 96),
    "midlayer.self_attn.k_proj.weight": (32, 96),
    "midlayer.self_attn.v_proj.weight": (32, 96),
    "midlayer.self_attn.o_proj.weight": (48, 128),
    "midlayer.post_attention_layernorm.weight": (48,),
    "midlayer.mlp.gate_proj.weight": (96, 48),
    "midlayer.mlp.up_proj.weight": (96, 48),
    "midlayer.mlp.down_proj.weight": (48, 96),
    "norm.weight": (48,),
    "lm_head.weight": (40, 48),
    "d2t": (40,),
    "t2d": (128,),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


SECOND = {  # of a layer after the first, which reads no embedding
    name.replace("midlayer.", "layers.1."): (shape[0], 48) if ".self_attn.q" in name else shape
    for name, shape in PLAIN.items()
    if name.startswith("midlayer.") and "hidden_norm" not in name
}
SECOND |= {f"layers.1.self_attn.{name}_proj.weight": (32, 48) for name in "kv"}


def config_in(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({}, {}),
        ({"norm_before_fc": True}, {"input_norm.weight": (144,)}),
        ({"fc_norm": True}, {f"fc_norm.{i}.weight": (48,) for i in range(3)}),
        ({"norm_output": True, "norm_before_residual": True}, {}),
        ({"qk_norm": True}, {f"midlayer.self_attn.{n}_norm.weight": (32,) for n in "qk"}),
        ({"layers": 2}, SECOND),
        (
            {"layers": 2, "qk_norm": True},
            SECOND
            | {
                f"{layer}.self_attn.{n}_norm.weight": (32,)
                for layer in ("midlayer", "layers.1")
                for n in "qk"
            },
        ),
    ],
)
def test_the_tensor_set_is_exact(make_head, export_head, changes, extra):
    folder = export_head(make_head(**changes))
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == PLAIN | extra
    assert {t.dtype for n, t in stored.items() if n not in ("d2t", "t2d")} == {torch.float32}
    assert stored["d2t"].dtype is torch.int64
    assert stored["t2d"].dtype is torch.bool
    assert check(folder) == []


def test_tensors_are_bit_equal_to_the_head(make_head, export_head):
    draft = make_head(fc_norm=True)
    stored = load_file(export_head(draft) / "model.safetensors")
    state = draft.state_dict()
    assert set(state) - set(stored) == {"embed_tokens.weight"}
    assert all(torch.equal(stored[name], state[name]) for name in stored)


def test_d2t_holds_offsets_to_ascending_ids(make_head, export_head):
    draft = make_head()
    stored = load_file(export_head(draft) / "model.safetensors")
    targets = stored["d2t"] + torch.arange(40)
    assert torch.equal(targets, draft.to_target_ids(torch.arange(40)))
    assert torch.equal(targets, stored["t2d"].nonzero().flatten())


def test_a_full_vocabulary_has_no_maps_but_its_own_head(make_head, export_head):
    folder = export_head(make_head(draft_vocab_size=128))
    stored = load_file(folder / "model.safetensors")
    assert not {"d2t", "t2d"} & set(stored)
    assert tuple(stored["lm_head.weight"].shape) == (128, 48)
    assert config_in(folder)["draft_vocab_size"] == config_in(folder)["vocab_size"] == 128
    assert check(folder) == []


def test_bfloat16_is_written_as_such_and_named_in_the_config(make_head, export_head):
    draft = make_head()
    folder = export_head(draft, Precision.bfloat16)
    stored = load_file(folder / "model.safetensors")
    assert stored["lm_head.weight"].dtype is torch.bfloat16
    assert torch.equal(stored["lm_head.weight"], draft.lm_head.weight.bfloat16())
    assert stored["d2t"].dtype is torch.int64
    assert config_in(folder)["torch_dtype"] == "bfloat16"


def test_the_file_says_pt_and_others_may_read_it(make_head, export_head):
    path = export_head(make_head()) / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert path.stat().st_mode & 0o044 == 0o044


def test_every_flag_and_both_spellings_are_in_the_config(make_head, export_head):
    config = config_in(export_head(make_head(norm_before_fc=True)))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": 32,
        "vocab_size": 128,
        "draft_vocab_size": 40,
        "target_hidden_size": 48,
        "num_aux_hidden_states": 3,
        "norm_before_residual": False,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": False,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "norm_before_fc": True,
        },
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
    }
    assert {key: config[key] for key in expected} == expected
    assert not [key for key in config if "quant" in key]


def test_qk_norm_is_the_qwen3_draft_class_and_nothing_else_changes(make_head, export_head):
    plain = config_in(export_head(make_head()))
    config = config_in(export_head(make_head(qk_norm=True)))  # replaces the other class's folder
    changed = {key: config[key] for key in config if config[key] != plain.get(key)}
    assert config.keys() - plain.keys() == {"use_sliding_window", "sliding_window"}
    assert changed == {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": False,
    }
    export_head(make_head())  # and the other way round


def table_at(config: LlamaConfig, position: int) -> torch.Tensor:
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor([[position]]))
    return torch.cat([cos, sin])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
        LLAMA3,
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + i / 4 for i in range(16)],
            "original_max_position_embeddings": 4096,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_tables_equal_the_verifiers_in_both_spellings(make_head, export_head, rope):
    limit = 131072
    verifier = LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        head_dim=32,
        max_position_embeddings=limit,
        rope_parameters=dict(rope),
    )
    settled_rope = settled(Rope(32, limit, rope))
    folder = export_head(make_head(rope=settled_rope, max_positions=limit))
    whole = config_in(folder)
    older = {k: v for k, v in whole.items() if k != "rope_parameters"}
    newer = {k: v for k, v in whole.items() if k not in ("rope_theta", "rope_scaling")}
    for config in (whole, older, newer):
        read = LlamaConfig(**{k: v for k, v in config.items() if k != "torch_dtype"})
        for position in (10_000, 100_000):
            assert torch.equal(table_at(read, position), table_at(verifier, position))


def test_a_head_of_another_verifier_is_refused(make_head, facts_of, plain_card, tmp_path):
    draft = make_head()
    for change in ({"hidden_size": 64}, {"vocab_size": 256}, {"aux_layers": [1, 2, 3]}):
        facts = replace(facts_of(draft.config), **change)
        with pytest.raises(ConfigError, match=next(iter(change))):
            export(draft, facts, tmp_path / "out", plain_card)
    assert not (tmp_path / "out").exists()


def test_a_lower_position_limit_warns(make_head, facts_of, plain_card, tmp_path, capsys):
    draft = make_head(max_positions=256)
    facts = replace(facts_of(draft.config), max_positions=512)
    export(draft, facts, tmp_path / "out", plain_card)
    assert "position limit 256" in capsys.readouterr().out


def test_a_broken_head_leaves_nothing_behind(make_head, export_head, tmp_path):
    draft = make_head()
    draft.lm_head.weight[3, 4] = float("nan")
    with pytest.raises(ConfigError, match=r"lm_head\.weight: 1 of 1920 values are not finite"):
        export_head(draft)
    assert list(tmp_path.iterdir()) == []


def test_an_older_export_is_replaced_and_other_folders_are_not(make_head, export_head, tmp_path):
    folder = export_head(make_head())
    (folder / "stray.txt").write_text("from an older export")
    export_head(make_head(fc_norm=True))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "eyrie.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vllm"]
    (folder / "eyrie.json").unlink()  # a head that somebody fetched
    with pytest.raises(ConfigError, match="holds something else"):
        export_head(make_head())


def test_a_failed_export_keeps_the_older_one(make_head, export_head):
    folder = export_head(make_head())
    before = (folder / "model.safetensors").read_bytes()
    draft = make_head(fc_norm=True)
    draft.fc.weight.fill_(float("inf"))
    with pytest.raises(ConfigError):
        export_head(draft)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_full_disk_is_one_sentence_and_keeps_the_older_export(
    make_head, export_head, monkeypatch, tmp_path
):
    folder = export_head(make_head())
    before = (folder / "model.safetensors").read_bytes()

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("models.export.write.save_file", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left"):
        export_head(make_head(fc_norm=True))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


def test_what_a_killed_export_left_is_cleared(make_head, export_head, tmp_path):
    for name in (".vllm.tmp", ".vllm.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    folder = export_head(make_head())
    export_head(make_head())
    assert check(folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["vllm"]


def test_a_pipe_or_a_device_is_never_replaced(make_head, facts_of, plain_card, tmp_path):
    """As root, --out /dev/null took the device's place."""
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.touch()
    draft = make_head()
    for place in (pipe, file):
        with pytest.raises(ConfigError, match="is no folder; give a folder"):
            export(draft, facts_of(draft.config), place, plain_card)
    assert pipe.is_fifo() and file.is_file()
    assert sorted(tmp_path.iterdir()) == [file, pipe]
