"""The prepare stage: split, counts, fingerprint, and its errors."""

import json
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError, RunConfig
from data.corpus import count_labels, load_prepared, read_facts
from data.prepare import base_id, find_prepared, place, prepare, split
from data.records import PreparedData
from models.verifier import load_tokenizer


def row(name: str, *contents: str, **keys) -> dict:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"id": name, "messages": turns, **keys}


def rows(count: int) -> list[dict]:
    return [row(f"p{i}", f"question {i}", f"answer {i}") for i in range(count)]


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    """A configuration of the tiny verifier; ``save`` writes what data.path names."""
    config = RunConfig()
    config.verifier.path = str(tiny_verifier)
    config.run.cache = str(tmp_path / "cache")
    config.data.path = [str(tmp_path / "a.jsonl")]
    config.data.valid_share = 0.2
    return config


def save(cfg: RunConfig, found: list) -> None:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in found]
    Path(cfg.data.path[0]).write_text("\n".join(lines) + "\n")


def held(prepared: PreparedData) -> dict[str, bool]:
    return {sample.id: sample.held_out for sample in prepared.samples}


def test_samples_hold_what_the_rows_say(cfg, capsys):
    save(cfg, [row("a", "q", "ab", greedy=True), row("b", "r", "cd", "s", "e"), row("c", "q")])
    prepared = prepare(cfg)
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    first, second = prepared.samples
    assert (first.id, first.greedy, second.id, second.greedy) == ("a", True, "b", False)
    assert first.input_ids.dtype == torch.int64
    assert first.loss_mask.dtype == torch.bool
    supervised = [tokenizer.decode(s.input_ids[s.loss_mask]) for s in prepared.samples]
    assert supervised == ["ab<|im_end|>", "cd<|im_end|>e<|im_end|>"]
    rows_seen = prepared.skipped
    assert (rows_seen.rows_in, rows_seen.rows_out) == (3, 2)
    assert rows_seen.reasons == {"no answer": 1}
    out = capsys.readouterr().out
    assert "3 rows in, 2 samples out (1 held out)" in out
    assert "skipped 1: no answer (first: a.jsonl:3)" in out


def test_labels_are_counted_in_training_answers_without_their_first_token(cfg):
    save(cfg, [row("a", "q", "xyx"), row("b", "q", "zzz"), row("b#1", "q", "xx", "r", "x")])
    prepared = prepare(cfg)
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    expected = torch.zeros(128, dtype=torch.int64)
    for sample in prepared.samples:
        if not sample.held_out:
            text = tokenizer.decode(sample.input_ids[sample.loss_mask])
            for answer in text.split("<|im_end|>")[:-1]:
                for letter in answer[1:]:
                    expected[tokenizer.convert_tokens_to_ids(letter)] += 1
                expected[tokenizer.eos_token_id] += 1
    assert torch.equal(prepared.token_counts, expected)
    assert expected.sum() > 0


def test_count_labels_by_hand():
    tokens = torch.tensor([3, 4, 5, 6, 3, 4, 4, 5])
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1])
    everything = torch.ones(8, dtype=torch.bool)
    assert count_labels(mask, tokens, everything, 7).tolist() == [0, 0, 0, 0, 1, 2, 0]
    second = torch.tensor([False] * 4 + [True] * 4)
    assert count_labels(mask, tokens, second, 7).tolist() == [0, 0, 0, 0, 1, 1, 0]


def test_all_answers_of_a_prompt_fall_on_one_side(cfg):
    found = [row(f"p{i}#{k}", f"question {i}", f"answer {k}") for k in range(3) for i in range(40)]
    save(cfg, found)
    prepared = prepare(cfg)
    sides: dict[str, set[bool]] = {}
    for name, side in held(prepared).items():
        sides.setdefault(base_id(name), set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
    assert 2 <= sum(True in side for side in sides.values()) <= 16
    assert read_facts(prepared.folder)["overlap"] == 0


def test_split_depends_on_the_id_alone():
    names = [f"p{i}" for i in range(2000)]
    flags = split(names, 0.05)
    assert 60 <= sum(flags) <= 140
    assert split(names[::-1], 0.05) == flags[::-1]
    assert split([f"{name}#7" for name in names], 0.05) == flags
    assert [place(name) < 0.05 for name in names] == flags
    assert base_id("a#1#2") == "a#1"
    assert base_id("json-001") == "json-001"


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.9999])
def test_one_is_held_out_and_one_is_not(share):
    assert 0 < sum(split(["a", "b", "c"], share)) < 3
    assert split(["a", "a#1"], share) == [False, False]


def test_the_same_input_gives_the_same_bytes(cfg, tmp_path):
    save(cfg, rows(12))
    first = prepare(cfg)
    cfg.run.cache = str(tmp_path / "other")
    second = prepare(cfg)
    assert first.fingerprint == second.fingerprint
    for name in ("samples.safetensors", "samples.json"):
        assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert list(first.folder.parent.iterdir()) == [first.folder]


def test_a_second_run_finds_it_done(cfg, capsys):
    save(cfg, rows(4))
    with pytest.raises(ConfigError, match=r"run python -m data\.prepare"):
        find_prepared(cfg)
    first = prepare(cfg)
    capsys.readouterr()
    again = prepare(cfg)
    assert capsys.readouterr().out.startswith("prepare: nothing to do")
    assert held(again) == held(first) == held(find_prepared(cfg))
    assert torch.equal(again.token_counts, first.token_counts)


def test_fingerprint_follows_its_inputs_and_nothing_else(cfg, tiny_verifier, tmp_path):
    save(cfg, rows(4))
    seen = {prepare(cfg).fingerprint}

    def changes() -> bool:
        before = len(seen)
        seen.add(prepare(cfg).fingerprint)
        return len(seen) > before

    cfg.draft.vocab_size, cfg.ttt.depth, cfg.optim.lr = 64, 3, 1.0
    assert not changes()
    cfg.data.path = [str(tmp_path / "." / "a.jsonl")]
    assert not changes()
    cfg.data.max_length = 512
    assert changes()
    cfg.data.template_kwargs = {"enable_thinking": False}
    assert changes()
    save(cfg, rows(5))
    assert changes()
    other = tmp_path / "verifier"
    other.mkdir()
    for file in tiny_verifier.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    cfg.verifier.path = str(other)
    assert not changes()
    template = other / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n", "assistant\n "))
    assert changes()


def test_long_samples_are_cut_and_counted(cfg, capsys):
    save(cfg, [*rows(2), row("long", "q", "x" * 300), row("late", "q" * 300, "a")])
    cfg.data.max_length = 100
    prepared = prepare(cfg)
    lengths = {sample.id: sample.input_ids.numel() for sample in prepared.samples}
    assert lengths["long"] == 100
    assert "late" not in lengths
    assert prepared.skipped.reasons == {"no answer within data.max_length": 1}
    assert prepared.skipped.changed == {"longer than data.max_length: cut there": 1}
    assert "first: late" in capsys.readouterr().out


def test_duplicates_and_overlap_are_reported(cfg, capsys):
    cfg.data.valid_share = 0.5
    save(cfg, [row(f"p{i}", "same question", "same answer") for i in range(10)])
    facts = read_facts(prepare(cfg).folder)
    assert facts["duplicates"] == 9
    assert facts["overlap"] == sum(facts["held_out"]) > 0
    assert f"duplicates 9; held-out prompts in training {facts['overlap']}" in (
        capsys.readouterr().out
    )


def test_last_turn_only(cfg):
    save(cfg, [row("a", "q", "b", "r", "cd"), row("b", "q", "b", "r", "cd")])
    whole = sum(int(s.loss_mask.sum()) for s in prepare(cfg).samples)
    cfg.data.last_turn_only = True
    last = sum(int(s.loss_mask.sum()) for s in prepare(cfg).samples)
    assert (whole, last) == (10, 6)


def test_answer_ids_are_kept_token_by_token(cfg):
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "<|im_end|>"])
    save(cfg, [row("a", "q", "ab", answer_ids=ids), row("b", "q", "ab"), *rows(3)])
    first, second = prepare(cfg).samples[:2]
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.loss_mask, second.loss_mask)


def test_max_samples(cfg):
    save(cfg, ["{broken", *rows(9)])
    cfg.data.max_samples = 4
    prepared = prepare(cfg)
    assert [sample.id for sample in prepared.samples] == ["p0", "p1", "p2", "p3"]
    assert prepared.skipped.rows_in == 5


# errors


def test_data_without_a_usable_row(cfg):
    save(cfg, [row("a", "q"), "{broken", {}])
    with pytest.raises(ConfigError) as error:
        prepare(cfg)
    text = str(error.value)
    assert text.startswith(f"data.path={cfg.data.path[0]}: no usable row (1 x no answer")
    assert "1 x no turns" in text
    assert "\n" not in text
    save(cfg, [""])
    with pytest.raises(ConfigError, match="the file is empty"):
        prepare(cfg)
    assert not list(Path(cfg.run.cache).glob("*"))


def test_one_conversation_cannot_be_split(cfg):
    save(cfg, [row("a#0", "q", "x"), row("a#1", "q", "y")])
    with pytest.raises(ConfigError, match=r"data\.path=.*all 2 samples answer one prompt"):
        prepare(cfg)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", "leaves out an answer"),
        ("{{ raise_exception('never') }}", "refused by the chat template"),
    ],
)
def test_template_without_a_supervised_token(cfg, tiny_verifier, tmp_path, template, reason):
    other = tmp_path / "verifier"
    other.mkdir()
    for file in tiny_verifier.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_text(template)
    cfg.verifier.path = str(other)
    save(cfg, rows(3))
    with pytest.raises(ConfigError) as error:
        prepare(cfg)
    text = str(error.value)
    assert text.startswith(f"verifier.path={other}: its chat template {other}/chat_template.jinja")
    assert "yields no supervised token in 3 rows (3 x " in text
    assert reason in text


def test_tokenizer_beyond_the_embedding(cfg, tiny_verifier, tmp_path):
    other = tmp_path / "verifier"
    other.mkdir()
    for file in tiny_verifier.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**facts, "vocab_size": 60}))
    cfg.verifier.path = str(other)
    save(cfg, rows(3))
    with pytest.raises(ConfigError, match=r"embedding has 60 rows"):
        prepare(cfg)


def test_damaged_folder_is_named(cfg):
    save(cfg, rows(4))
    folder = prepare(cfg).folder
    facts = read_facts(folder)
    (folder / "samples.json").write_text(json.dumps({**facts, "ids": facts["ids"][1:]}))
    with pytest.raises(ConfigError, match=r"is no prepared data .* delete it"):
        load_prepared(folder)
    (folder / "samples.json").write_text(json.dumps({**facts, "format": 99}))
    with pytest.raises(ConfigError, match="format 99"):
        load_prepared(folder)
    (folder / "samples.json").write_text("{")
    with pytest.raises(ConfigError, match="is no prepared data"):
        load_prepared(folder)
    (folder / "samples.json").write_text(json.dumps(facts))
    whole = (folder / "samples.safetensors").read_bytes()
    (folder / "samples.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="is no prepared data"):
        load_prepared(folder)


def test_full_disk_leaves_nothing_behind(cfg, monkeypatch):
    save(cfg, rows(4))

    def full(*_arguments) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.corpus.save_file", full)
    with pytest.raises(ConfigError, match=r"run\.cache=.*No space left"):
        prepare(cfg)
    assert not list(Path(cfg.run.cache).iterdir())
