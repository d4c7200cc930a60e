"""The prepare stage: split, counts, fingerprint, and its errors."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from conf.schema import ConfigError, RunConfig
from data.corpus import FACTS, TENSORS, load_prepared, read_facts
from data.prepare import CHUNK_BYTES, find_prepared, prepare, some_rows
from data.records import PreparedData
from data.rows import Row
from data.sources import DataFile
from data.split import base_id
from models.verifier import load_facts, load_tokenizer
from models.vocab import DraftVocab, draft_vocab_size


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
    save(cfg, [row("a", "q", "xyx"), row("b", "q", "zzz"), row("b#1", "r", "xx", "r", "x")])
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
    assert prepared.held_out_counts.sum() == sum(
        int(sample.loss_mask.sum()) - 1 for sample in prepared.samples if sample.held_out
    )


def test_all_answers_of_a_prompt_fall_on_one_side(cfg):
    found = [row(f"p{i}#{k}", f"question {i}", f"answer {k}") for k in range(3) for i in range(40)]
    save(cfg, found)
    prepared = prepare(cfg)
    sides: dict[str, set[bool]] = {}
    for name, side in held(prepared).items():
        sides.setdefault(base_id(name), set()).add(side)
    assert all(len(side) == 1 for side in sides.values())
    assert 2 <= sum(True in side for side in sides.values()) <= 16
    assert read_facts(prepared.folder).moved == 0


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
    assert "first: a.jsonl:4)" in capsys.readouterr().out


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


def test_cut_answers_have_no_end_label_and_can_be_left_out(cfg):
    save(cfg, [row("a", "q", "ab", cut=True), row("b", "q", "ab"), *rows(3)])
    kept = prepare(cfg)
    assert kept.samples[0].input_ids.tolist() == kept.samples[1].input_ids.tolist()[:-1]
    cfg.data.drop_cut = True
    left = prepare(cfg)
    assert [s.id for s in left.samples] == [s.id for s in kept.samples][1:]
    assert left.skipped.reasons == {"answer cut by its length limit (data.drop_cut)": 1}
    assert left.skipped.rows_in == left.skipped.rows_out + 1


def test_answers_that_a_template_does_not_show_again_are_counted(cfg):
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ab, cd = (tokenizer.convert_tokens_to_ids([*word]) for word in ("ab", "cd"))
    whole = row("a", "q", "ab", "r", "cd", answer_ids=[[*ab, end], [*cd, end]])
    other = row("b", "q", "ab", "r", "cd", answer_ids=[[*ab, 1], [*cd, end]])  # ends in its own way
    save(cfg, [whole, other, *rows(3)])
    prepared = prepare(cfg)
    assert [int(s.loss_mask.sum()) for s in prepared.samples[:2]] == [6, 3]
    assert prepared.skipped.changed == {
        "history rewritten by the template: only the answers after it are supervised": 1
    }


def test_answers_made_with_other_template_arguments_are_refused(cfg):
    save(cfg, rows(4))
    meta = Path(cfg.data.path[0] + ".meta.json")
    meta.write_text(json.dumps({"settings": {"data.template_kwargs": {"enable_thinking": False}}}))
    with pytest.raises(ConfigError) as error:
        prepare(cfg)
    assert str(error.value).startswith("data.template_kwargs={}: the answers in ")
    assert 'made with {"enable_thinking": false}; set' in str(error.value)
    cfg.data.template_kwargs = {"enable_thinking": False}
    prepare(cfg)


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
    with pytest.raises(ConfigError, match=r"data\.path=.*all 2 samples are answers to one prompt"):
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
    facts = json.loads((folder / "samples.json").read_text())
    for change, words in (
        ({"rows": {**facts["rows"], "rows_out": 3}}, r"is no prepared data .* delete it"),
        ({"format": 99}, "format 99"),
    ):
        (folder / "samples.json").write_text(json.dumps({**facts, **change}))
        with pytest.raises(ConfigError, match=words):
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

    for step in (
        "data.columns.Columns.add",
        "data.corpus.write_tensors",
        "data.corpus.write_atomically",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(step, full)
            with pytest.raises(ConfigError, match=r"run\.cache=.*No space left"):
                prepare(cfg)
        assert not list(Path(cfg.run.cache).iterdir())


# rows that are token ids


def test_token_ids_bypass_the_template(cfg):
    """Two answers that touch the border of their rows, a cut, and ids that are nobody's."""
    save(
        cfg,
        [
            {"id": "a", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]},
            {"id": "b", "input_ids": [9, 10, 11], "loss_mask": [1, 1, 0]},
            {"id": "cut", "input_ids": [*range(3, 15)], "labels": [-100] * 5 + [*range(8, 15)]},
            {"id": "late", "input_ids": [3] * 12, "loss_mask": [0] * 10 + [1] * 2},
            {"id": "beyond", "input_ids": [5, 128], "loss_mask": [0, 1]},
            {"id": "huge", "input_ids": [5, 1 << 70], "loss_mask": [0, 1]},
        ],
    )
    cfg.data.max_length = 8
    prepared = prepare(cfg)
    first, second, third = prepared.samples
    assert first.input_ids.tolist() == [5, 6, 7, 8]
    assert first.loss_mask.tolist() == [False, True, True, True]
    assert second.loss_mask.tolist() == [True, True, False]
    assert third.input_ids.tolist() == [*range(3, 11)]
    assert third.loss_mask.tolist() == [False] * 5 + [True] * 3
    assert prepared.skipped.reasons == {
        "no answer within data.max_length": 1,
        "token id outside the verifier's embedding": 2,
    }
    assert prepared.skipped.changed == {"longer than data.max_length: cut there": 1}
    labels = prepared.token_counts + prepared.held_out_counts
    assert labels.nonzero().flatten().tolist() == [7, 8, 9, 10]  # 9 is third's, not second's first
    assert labels.sum() == 2 + 1 + 2


def test_token_ids_without_a_prompt_are_not_of_one_prompt(cfg):
    found = [{"id": f"r{i}", "input_ids": [5, i, 6], "loss_mask": [1, 1, 1]} for i in range(30)]
    save(cfg, found)
    prepared = prepare(cfg)
    assert 1 <= prepared.samples.held_out.sum() <= 15
    assert len(prepared.samples.prompts.unique()) == 30


# worker processes


def mixed_rows() -> list:
    """Samples, refusals, changes and notes of every kind, over several chunks."""
    return [
        *rows(7),
        "{broken",
        row("none", "q"),
        row("same", "question 0", "answer 0"),
        row("long", "q", "x" * 300),
        row("beyond", "q" * 300, "x"),
        row("greedy", "a question", "an answer", greedy=True),
        {"id": "odd", "messages": [{"role": "Oracle", "content": "x"}]},
        {
            "id": "ok",
            "conversations": [{"from": "human", "value": "q"}, {"from": "M", "value": "a"}],
        },
        row("é\ud800", "named with half a pair", "x"),
        *[row(f"late{i}", f"late {i}", "x" * i, "y", "z") for i in range(1, 9)],
    ]


@pytest.mark.timeout(180)  # a pool that hangs is the bug that users of others report
def test_the_same_bytes_with_any_number_of_workers(cfg, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.prepare.CHUNK_ROWS", 3)
    cfg.data.max_length = 100
    save(cfg, mixed_rows())
    folders, said = [], []
    for workers in (1, 2, 4):
        cfg.data.workers, cfg.run.cache = workers, str(tmp_path / f"cache-{workers}")
        folders.append(prepare(cfg).folder)
        said.append(capsys.readouterr().out.replace(cfg.run.cache, ""))
    for name in ("samples.safetensors", "samples.json"):
        assert len({(folder / name).read_bytes() for folder in folders}) == 1
    assert len(set(said)) == 1  # each note once, whoever met it
    assert said[0].count("unknown role") >= 2
    rows_seen = load_prepared(folders[1]).skipped
    assert rows_seen.rows_in == rows_seen.rows_out + sum(rows_seen.reasons.values()) == 24


def test_decoded_rows_are_cut_into_chunks_of_bounded_size():
    """Tables and hub data sets give values, not text: a long row is a chunk of its own."""
    long = "x" * CHUNK_BYTES
    turns = [{"role": "user", "content": long}, {"role": "assistant", "content": "a"}]
    for value in ({"messages": turns}, {"input_ids": [7] * (CHUNK_BYTES // 8)}):
        size = Row("a", value=value).size
        assert CHUNK_BYTES <= size < 1.01 * CHUNK_BYTES
    rows = [Row("a", value={"messages": turns}) for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.read_rows", lambda _: rows)
        cut = list(some_rows([DataFile.alone(Path("a.parquet"))]))
    assert [len(some) for some in cut] == [1] * 5
    assert Row("a", value={"messages": [{"role": "user", "content": "q"}]}).size < 100


def test_max_samples_with_workers(cfg, tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.CHUNK_ROWS", 4)
    save(cfg, [*rows(6), "{broken", *rows(30)[6:], "{broken"])
    cfg.data.max_samples = 9
    found = []
    for workers in (1, 2):
        cfg.data.workers, cfg.run.cache = workers, str(tmp_path / f"cache-{workers}")
        found.append(prepare(cfg))
    assert [sample.id for sample in found[1].samples] == [f"p{i}" for i in range(9)]
    assert found[0].skipped == found[1].skipped
    assert found[1].skipped.rows_in == 10


# what is in the folder


def test_samples_are_a_sequence(cfg):
    save(cfg, rows(9))
    samples = prepare(cfg).samples
    assert len(samples) == 9
    assert [sample.id for sample in samples[2:5]] == ["p2", "p3", "p4"]
    assert samples[-1].id == "p8" and samples[7:99:1][-1].id == "p8" and samples[5:5] == []
    with pytest.raises(IndexError):
        samples[9]
    assert samples.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    assert samples.held_out.tolist() == [sample.held_out for sample in samples]


def test_a_second_run_says_what_the_first_said(cfg, capsys):
    save(cfg, [*rows(6), "{broken", row("none", "q")])
    prepare(cfg)
    first = capsys.readouterr().out.splitlines()
    prepare(cfg)
    second = capsys.readouterr().out.splitlines()
    assert second[0].startswith("prepare: nothing to do")
    assert second[1:] == first
    assert "  skipped 1: unparsable JSON (first: a.jsonl:7)" in second


def test_every_row_is_accounted_for(cfg):
    save(cfg, mixed_rows())
    facts = read_facts(prepare(cfg).folder)
    assert facts.rows.rows_in == 24 == sum(source.rows_in for source in facts.sources)
    assert facts.rows.rows_in == facts.rows.rows_out + sum(facts.rows.reasons.values())
    assert set(facts.rows.first) == set(facts.rows.reasons)


def test_copies_are_counted_and_left_out_on_request(cfg, capsys):
    found = [*rows(5), row("again", "question 0", "answer 0"), row("more", "question 0", "else")]
    save(cfg, found)
    prepared = prepare(cfg)
    assert len(prepared.samples) == 7
    assert read_facts(prepared.folder).duplicates == 1
    assert "duplicates 1;" in capsys.readouterr().out
    cfg.data.dedupe = True
    prepared = prepare(cfg)
    assert [sample.id for sample in prepared.samples] == ["p0", "p1", "p2", "p3", "p4", "more"]
    alone = prepared.samples[5]
    assert alone.input_ids.numel() == alone.loss_mask.numel()
    assert prepared.skipped.reasons == {"exact copy of an earlier sample (data.dedupe)": 1}
    assert prepared.skipped.rows_in == 7
    assert "(first: again)" in capsys.readouterr().out
    labels = sum(int(s.loss_mask.sum()) - 1 for s in prepared.samples)
    assert labels == prepared.token_counts.sum() + prepared.held_out_counts.sum()


def test_a_copy_lies_where_its_original_lies(cfg):
    cfg.data.valid_share = 0.5
    save(cfg, [*rows(30), *[row(f"copy{i}", f"question {i}", f"answer {i}") for i in range(30)]])
    prepared = prepare(cfg)
    flags = prepared.samples.held_out
    assert torch.equal(flags[:30], flags[30:])
    assert 0 < flags.sum() < 60
    assert read_facts(prepared.folder).moved > 0


def test_weights_take_a_share_of_each_source(cfg, tmp_path, capsys):
    save(cfg, rows(60))
    other = tmp_path / "b.jsonl"
    other.write_text(Path(cfg.data.path[0]).read_text().replace('"p', '"r').replace("n ", "n z"))
    cfg.data.path.append(str(other))
    everything = prepare(cfg).samples
    cfg.data.weights = [1.0, 0.5]
    capsys.readouterr()
    prepared = prepare(cfg)
    first, second = read_facts(prepared.folder).sources
    assert (first.rows_in, first.samples, second.rows_in) == (60, 60, 60)
    assert 15 <= second.samples <= 45
    assert prepared.skipped.reasons == {"left out by data.weights": 60 - second.samples}
    out = capsys.readouterr().out
    assert f"{other}, weight 0.5: 60 rows in, {second.samples} samples out with" in out
    chosen = {sample.id for sample in prepared.samples}
    assert chosen < {sample.id for sample in everything}
    cfg.data.path.reverse()
    cfg.data.weights = [0.5, 1.0]
    assert {sample.id for sample in prepare(cfg).samples} == chosen
    assert first.tokens + second.tokens == prepared.samples.tokens.numel()
    assert first.supervised + second.supervised == prepared.samples.mask.sum()


def test_prompts_of_the_evaluation_are_looked_for(cfg, tmp_path, capsys):
    save(cfg, rows(20))
    trained = [name for name, out in held(prepare(cfg)).items() if not out]
    asked = [row(name, f"question {name[1:]}") for name in [*trained[:3], "p777", "p888"]]
    asked[0]["messages"] += [{"role": "user", "content": "and then?"}]  # the first turn counts
    asked += [{"id": "x"}, {"turns": [f"question {trained[3][1:]}", "and then?"]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in asked))
    cfg.eval.prompts = [str(file)]
    capsys.readouterr()
    prepare(cfg)
    expected = "eval.prompts: 4 of 6 are training prompts (1 rows not compared)"
    assert expected in capsys.readouterr().out
    text = file.rename(tmp_path / "prompts.txt")  # the evaluation takes any name
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    cfg.eval.prompts = [str(text), str(empty)]
    prepare(cfg)
    expected = "4 of 6 are training prompts (1 rows and 1 files not compared)"
    assert expected in capsys.readouterr().out


# tokenizers and vocabularies


def changed_verifier(tiny_verifier: Path, folder: Path, tokens: list[str], size: int) -> Path:
    """The tiny verifier with more tokens, and an embedding of another size by its config."""
    folder.mkdir()
    for file in tiny_verifier.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "vocab_size": size}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)
    return folder


def test_an_added_token_beyond_the_embedding_is_named(cfg, tiny_verifier, tmp_path):
    other = changed_verifier(tiny_verifier, tmp_path / "other", ["<|first|>", "<|second|>"], 129)
    cfg.verifier.path = str(other)
    save(cfg, ["{never read"])
    with pytest.raises(ConfigError, match=r"'<\|second\|>' as token 129 .* has 129 rows"):
        prepare(cfg)


def test_padded_embedding_rows_are_no_error(cfg, tiny_verifier, tmp_path):
    cfg.verifier.path = str(changed_verifier(tiny_verifier, tmp_path / "other", ["<|a|>"], 192))
    save(cfg, rows(4))
    prepared = prepare(cfg)
    assert prepared.token_counts.numel() == 192 and prepared.token_counts[128:].sum() == 0


def test_a_placeholder_beyond_the_embedding_costs_its_rows_alone(cfg, tiny_verifier, tmp_path):
    """Gemma 3's text models carry an image token that their embedding lacks."""
    other = changed_verifier(tiny_verifier, tmp_path / "other", [], 128)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {"image_token": "<image_soft_token>"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    cfg.verifier.path = str(other)
    save(cfg, [*rows(4), row("image", "what is <image_soft_token>", "x")])
    prepared = prepare(cfg)
    assert len(prepared.samples) == 4
    assert prepared.skipped.reasons == {"token id outside the verifier's embedding": 1}


def test_pad_equal_to_end_of_turn_stays_supervised(cfg):
    tokenizer = load_tokenizer(cfg.verifier, Path(cfg.run.cache))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    save(cfg, rows(3))
    for sample in prepare(cfg).samples:
        assert sample.input_ids[-1] == tokenizer.pad_token_id and sample.loss_mask[-1]


def test_two_sizes_give_two_maps_of_one_prepared_set(cfg, capsys):
    """B32 and B33: the map follows from the counts and the size asked for, and is always full."""
    save(cfg, [row(f"p{i}", f"question {i}", "ab" * (i + 1)) for i in range(20)])
    prepared = prepare(cfg)
    seen = int((prepared.token_counts > 0).sum())
    assert seen < 8
    facts = load_facts(cfg.verifier, Path(cfg.run.cache))
    maps = []
    for size in (80, 40):
        cfg.draft.vocab_size = size
        asked = draft_vocab_size(cfg.draft, facts.vocab_size)
        maps.append(DraftVocab.from_counts(prepare(cfg).token_counts, asked).target_ids)
        said = capsys.readouterr().out
        assert f"draft vocabulary: {size} of 128 tokens cover 100.0% of the training" in said
        assert f"{size - seen} of them never seen there" in said
    for ids, size in zip(maps, (80, 40), strict=True):
        assert len(ids) == size and torch.equal(ids, ids.unique())  # ascending, none twice
    assert set(maps[1].tolist()) < set(maps[0].tolist())
    cfg.draft.vocab_size = "full"
    assert draft_vocab_size(cfg.draft, facts.vocab_size) == 128


def test_any_damage_to_prepared_data_is_found(cfg):
    """One bit of every part of the file, and facts that lack an entry: one sentence each."""
    save(cfg, rows(6))
    folder = prepare(cfg).folder
    path = folder / TENSORS
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match="is no prepared data"):
            load_prepared(folder)
    path.write_bytes(whole)
    facts = json.loads((folder / FACTS).read_text())
    for name in facts:
        (folder / FACTS).write_text(json.dumps({k: v for k, v in facts.items() if k != name}))
        with pytest.raises(ConfigError, match=f"is no prepared data.*{name}"):
            load_prepared(folder)


def test_answers_beyond_the_length_are_no_fault_of_the_template(cfg):
    save(cfg, rows(6))
    cfg.data.max_length = 4
    with pytest.raises(ConfigError, match=r"data\.max_length=4: no answer begins .* raise it"):
        prepare(cfg)
