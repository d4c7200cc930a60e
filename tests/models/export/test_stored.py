"""Tensors of published heads: names, maps, shapes and what may be absent."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError
from models.export.read import read_head, read_vocabulary
from models.memory import DraftCache

CHOSEN = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def run(draft, seed: int = 0) -> torch.Tensor:
    """Scores of the whole vocabulary and what is fed back, on random states."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(1, 9, 144, generator=generator)
    tokens = torch.randint(0, 128, (1, 9), generator=generator)
    share, positions = draft.share_of(tokens), torch.arange(9)[None]
    output = draft(share, draft.fuse(aux), positions, [DraftCache(9) for _ in draft.stack])
    logits = draft.logits(output.normed)
    ids = draft.to_target_ids(torch.arange(logits.shape[-1]))
    spread = torch.full((*logits.shape[:-1], 128), -9e9).index_copy(-1, ids, logits)
    return torch.cat([spread.flatten(), output.hidden.flatten()])


def same_head(one, other) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("layers", [1, 2])
def test_both_files_and_both_spellings_give_the_head(
    make_head, publish, read_back, pickled, prefix, layers
):
    """User report B34: maps and rows are those of the file, bit for bit."""
    draft = make_head(layers=layers)
    files = publish(draft)
    files.tensors = {n.replace("midlayer.", prefix): t for n, t in files.tensors.items()}
    back = read_back(files.write(pickled), draft)
    assert back.config == draft.config and same_head(back, draft)
    assert torch.equal(run(back), run(draft))
    assert not any(parameter.requires_grad for parameter in back.parameters())


def test_tied_words_in_the_config_leave_the_head_alone(make_head, publish, read_back):
    """User report B40: a head smaller than the vocabulary is its own, whatever the config ties."""
    draft = make_head()
    files = publish(draft)
    files.config["tie_word_embeddings"] = True
    back = read_back(files.write(), draft)
    assert torch.equal(back.lm_head.weight, draft.lm_head.weight)
    assert back.lm_head.weight.shape[0] == 40


def test_membership_is_computed_where_it_is_absent(make_head, publish, read_back):
    draft = make_head()
    files = publish(draft)
    del files.tensors["t2d"]
    files.tensors["d2t"] = files.tensors["d2t"].int()  # TensorRT-LLM's
    assert same_head(read_back(files.write(), draft), draft)


def test_maps_in_a_pickle_or_a_file_are_the_vocabulary(make_head, publish):
    draft = make_head()
    for pickled in (False, True):
        vocab = read_vocabulary(publish(draft).write(pickled), draft.config)
        assert torch.equal(vocab.d2t, draft.d2t) and torch.equal(vocab.t2d, draft.t2d)


@pytest.mark.parametrize("maps", ["none", "both"])
def test_a_whole_vocabulary_needs_no_maps(make_head, publish, read_back, maps):
    draft = make_head(draft_vocab_size=128)
    files = publish(draft)  # "both" is what SpecForge writes: no offset, every token
    if maps == "none":
        del files.tensors["d2t"], files.tensors["t2d"], files.config["draft_vocab_size"]
    assert same_head(read_back(files.write(), draft), draft)


def test_a_whole_vocabulary_may_share_the_verifiers_head(
    make_head, publish, facts_of, ends_of, capsys
):
    draft = make_head(draft_vocab_size=128)
    files, ends = publish(draft), ends_of(draft)
    del files.tensors["lm_head.weight"]
    back = read_head(files.write(), facts_of(draft.config), ends)
    assert torch.equal(back.lm_head.weight, ends.head)
    assert "lm_head.weight is not in the file: the verifier's head is taken" in (
        capsys.readouterr().out
    )
    pruned = make_head()
    files = publish(pruned)
    del files.tensors["lm_head.weight"]
    with pytest.raises(ConfigError, match=r"lm_head\.weight missing"):
        read_head(files.write(), facts_of(pruned.config), ends)


def test_an_order_of_its_own_is_sorted_with_the_rows(make_head, publish, read_back, capsys):
    draft = make_head()
    files = publish(draft)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    ids = draft.d2t + torch.arange(40)
    files.tensors["d2t"] = ids[order] - torch.arange(40)
    files.tensors["lm_head.weight"] = draft.lm_head.weight[order].clone()
    back = read_back(files.write(), draft)
    assert same_head(back, draft) and torch.equal(run(back), run(draft))
    assert "d2t is not ascending" in capsys.readouterr().out


# ---- the embedding -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["absent", "equal", "rounded", "random"])
def test_the_embedding_is_the_verifiers(make_head, publish, read_back, capsys, kind):
    """User report B64: a random table in the file is not used, and is said."""
    draft = make_head(norm_output=True)
    files = publish(draft)
    files.config |= dict.fromkeys(CHOSEN, False) | {"norm_output": True}
    table = draft.embed_tokens.weight.detach()
    stored = {
        "equal": table.clone(),
        "rounded": table.bfloat16(),
        "random": torch.randn_like(table),
    }
    if kind in stored:
        files.tensors["embed_tokens.weight"] = stored[kind]
    back = read_back(files.write(), draft)
    assert torch.equal(back.embed_tokens.weight, table)
    said = capsys.readouterr().out
    assert ("is not the verifier's" in said) == (kind == "random")
    assert kind == "random" or not said


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_three_precisions_come_as_the_verifiers(make_head, publish, read_back, dtype):
    draft = make_head().to(dtype).float()
    files = publish(draft)
    for name in ("fc.weight", "norm.weight", "lm_head.weight"):  # the others stay float32
        files.tensors[name] = files.tensors[name].to(dtype)
    back = read_back(files.write(), draft)
    assert {p.dtype for p in back.parameters()} == {torch.float32}
    assert same_head(back, draft)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_norms_are_there_when_their_flag_is(make_head, publish, read_back, flag):
    """User report B65, both ways: an engine would run without, or drop them, and say nothing."""
    draft = make_head(**{flag: True})
    files = publish(draft)
    with pytest.raises(ConfigError, match=f"unknown, config.json does not set {flag}=true"):
        read_back(files.write(), draft)
    files.config[flag] = True
    assert same_head(read_back(files.write(), draft), draft)
    plain = publish(make_head())
    plain.config[flag] = True
    with pytest.raises(ConfigError, match=r"norm.*weight missing, which config\.json asks for"):
        read_back(plain.write(), draft)


def test_sglangs_names_of_the_norms(make_head, publish, read_back):
    draft = make_head(fc_norm=True)
    files = publish(draft)
    files.config["use_aux_norm"] = True
    for i, name in enumerate(("low", "mid", "high")):
        files.tensors[f"aux_norm_{name}.weight"] = files.tensors.pop(f"fc_norm.{i}.weight")
    assert same_head(read_back(files.write(), draft), draft)


def test_every_tensor_is_missed_and_every_shape_is_held(make_head, publish, read_back):
    draft = make_head(norm_before_fc=True)
    whole = publish(draft)
    whole.config["norm_before_fc"] = True
    for name in sorted(whole.tensors.keys() - {"t2d"}):
        files = publish(draft)
        files.config = whole.config
        tensor = files.tensors.pop(name)
        with pytest.raises(ConfigError, match=f"{name} missing"):
            read_back(files.write(), draft)
        files.tensors[name] = torch.cat([tensor, tensor[:1]])
        with pytest.raises(ConfigError, match=rf"{name}: .*shape \(\d+"):
            read_back(files.write(), draft)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("fc.bias", torch.zeros(48), "a bias, and a draft here has none"),
        ("midlayer.self_attn.q_proj.bias", torch.zeros(128), "a bias"),
        ("mask_hidden", torch.zeros(1, 144), "parallel drafting"),
        ("layers.1.hidden_norm.weight", torch.zeros(48), "unknown, config.json names fewer layers"),
        ("additional_layers.0.hidden_norm.weight", torch.zeros(48), "SGLang spells it so"),
        ("model.norm.weight", torch.zeros(48), "unknown"),
        ("midlayer.self_attn.q_norm.weight", torch.zeros(32), "without norms of query and key"),
        ("fc_norm.0.weight", torch.zeros(48), "does not set fc_norm=true"),
        ("blocks.0.layers.0.weight", torch.zeros(48, 48), "a Medusa head"),
        ("fc.weight_scale", torch.zeros(1, dtype=torch.float64), "quantised or damaged"),
        ("norm.weight", torch.zeros(48, dtype=torch.int8), "quantised or damaged"),
        ("fc.weight", torch.full((48, 144), float("nan")), "not finite"),
    ],
)
def test_other_tensors_are_refused_by_name(make_head, publish, read_back, name, tensor, words):
    draft = make_head()
    files = publish(draft)
    files.tensors[name] = tensor
    with pytest.raises(ConfigError, match=words) as refused:
        read_back(files.write(), draft)
    assert name in str(refused.value)


def test_an_eagle_1_head_is_called_by_its_name(make_head, publish, read_back):
    draft = make_head()
    files = publish(draft)
    for name in ("hidden_norm", "input_layernorm"):
        del files.tensors[f"midlayer.{name}.weight"]
    files.tensors["fc.weight"] = torch.zeros(48, 96)
    with pytest.raises(ConfigError, match=r"fc\.weight: of shape \(48, 96\), an EAGLE-1 head"):
        read_back(files.write(), draft)


def test_a_stored_rotary_table_is_left_out(make_head, publish, read_back):
    draft = make_head()
    files = publish(draft)
    files.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)
    assert same_head(read_back(files.write(), draft), draft)


def test_a_tensor_in_both_spellings_is_refused(make_head, publish, read_back):
    draft = make_head()
    files = publish(draft)
    files.tensors["layers.0.hidden_norm.weight"] = torch.ones(48)
    with pytest.raises(ConfigError, match="there twice"):
        read_back(files.write(), draft)


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(40)


def repeated(d2t: torch.Tensor) -> torch.Tensor:
    return torch.cat([d2t[:5], d2t[4:5] - 1, d2t[6:]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (absolute, r"offsets.*these are absolute ids"),
        (repeated, "distinct ids below 128"),
        (lambda d2t: d2t - 100, "offsets"),
        (lambda d2t: d2t + 100, "offsets"),
        (lambda d2t: d2t.float(), "must be integers"),
        (lambda d2t: d2t[:-1], "must be integers"),
        (lambda d2t: d2t * 0, "t2d: marks other tokens"),
    ],
)
def test_impossible_offsets_are_refused(make_head, publish, read_back, change, words):
    """User report B34: d2t holds offsets."""
    draft = make_head()
    files = publish(draft)
    files.tensors["d2t"] = change(files.tensors["d2t"])
    with pytest.raises(ConfigError, match=words):
        read_back(files.write(), draft)


def test_a_membership_of_another_length_is_refused(make_head, publish, read_back):
    draft = make_head()
    files = publish(draft)
    files.tensors["t2d"] = files.tensors["t2d"][:-1].clone()
    with pytest.raises(ConfigError, match=r"t2d: of shape \(127,\), must be \(128,\)"):
        read_back(files.write(), draft)


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


def test_a_pickle_runs_nothing(make_head, publish, read_back, tmp_path):
    draft, marker = make_head(), tmp_path / "ran"
    files = publish(draft)
    files.tensors["norm.weight"] = Evil(marker)
    with pytest.raises(ConfigError, match=r"asks to run \S+, which was refused"):
        read_back(files.write(pickled=True), draft)
    assert not marker.exists()
    path = files.folder / "pytorch_model.bin"
    for content, words in ((b"x", "cannot be read"), (pickle.dumps([1]), "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_back(files.folder, draft)
    torch.save([1], path)
    with pytest.raises(ConfigError, match="more than tensors by name"):
        read_back(files.folder, draft)
    path.unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        read_back(files.folder, draft)
    (files.folder / "model.safetensors").write_text("x")
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        read_back(files.folder, draft)


def test_heads_of_other_verifiers_are_refused_by_name(make_head, publish, facts_of, ends_of):

    draft = make_head()
    folder, facts = publish(draft).write(), facts_of(draft.config)
    with pytest.raises(ConfigError, match=r"for 128 tokens of width 48, .* has 256 of width 48"):
        read_head(folder, replace(facts, vocab_size=256), ends_of(draft))
    with pytest.raises(ConfigError, match=r"set verifier\.aux_layers=\[2,4,5\]"):
        read_head(folder, replace(facts, aux_layers=[1, 2, 3]), ends_of(draft))
