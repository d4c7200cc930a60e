"""Answers are the verifier's own, whatever the batch, and survive being killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import data.regenerate as stage
from conf.schema import ConfigError, Device, Precision, RunConfig
from data.dialects import RowRefused, read_row
from data.records import Conversation, Tokenised, Turn
from data.regenerate import regenerate
from data.render import ChatTemplate
from data.talks import asks_of, seed_of
from data.template import encode, encode_prompt
from models.verifier import Verifier

ROOT = Path(__file__).resolve().parents[2]
NEW = 24
WORDS = ["cat", "a longer prompt than most", "hi", "what is this?", "0123456789 " * 4, "zz", "OK!"]


def ids_and_mask(conversation, tokenizer, kwargs, last=False) -> tuple[list[int], list[bool]]:
    found = encode(conversation, ChatTemplate(tokenizer, kwargs), last)
    return found.input_ids, found.loss_mask


def write_prompts(path: Path, prompts: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return str(path)


def single(word: str, number: int) -> dict:
    turns = [{"role": "user", "content": word}]
    return {"id": f"p{number}", "task": "words", "conversations": turns}


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    """Greedy answers to WORDS by the tiny verifier in fp32."""
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier.path = str(tiny_verifier)
    cfg.verifier.dtype = Precision.float32
    cfg.regenerate.prompts = [
        write_prompts(tmp_path / "prompts.jsonl", [single(w, i) for i, w in enumerate(WORDS)])
    ]
    cfg.regenerate.output = str(tmp_path / "answers.jsonl")
    cfg.regenerate.max_new_tokens = NEW
    cfg.regenerate.batch_size = 3
    return cfg


def rows(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def made(cfg: RunConfig, **changes: object) -> list[dict]:
    """Answers written to a file of their own, with other regenerate knobs."""
    name = "-".join(f"{key}={value}" for key, value in changes.items())
    output = str(Path(cfg.regenerate.output).with_name(f"{name}.jsonl"))
    return rows(
        regenerate(replace(cfg, regenerate=replace(cfg.regenerate, **changes, output=output)))
    )  # pyright: ignore


def library_greedy(folder: str, turns: list[dict], ends: list[int]) -> list[int]:
    """The library's own greedy generate, one prompt at a time."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    prompt = ids["input_ids"]
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=ends,
        pad_token_id=2,
    )
    return out[0, prompt.shape[1] :].tolist()


def test_batched_greedy_is_the_librarys_greedy(cfg: RunConfig):
    answers = made(cfg)
    assert [row["id"] for row in answers] == [f"p{i}#0" for i in range(len(WORDS))]
    for row, word in zip(answers, WORDS, strict=True):
        want = library_greedy(cfg.verifier.path, [{"role": "user", "content": word}], [2])
        assert row["answer_ids"] == want
        assert row["greedy"] and row["task"] == "words" and row["temperature"] == 0
        assert row["conversations"][0] == {"role": "user", "content": word}
        assert [turn["role"] for turn in row["conversations"]] == ["user", "assistant"]
        assert row["cut"] == (want[-1] != 2)


def test_several_end_tokens_and_the_cut_mark(cfg: RunConfig, tmp_path: Path, tiny_verifier: Path):
    """Make end tokens of two that the answers hold: each ends some, and is kept as the last id."""
    plain = made(cfg)
    ends = sorted({row["answer_ids"][5] for row in plain[:2]} | {2})
    folder = tmp_path / "other"
    folder.mkdir()
    for file in tiny_verifier.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = json.loads((folder / "generation_config.json").read_text())
    settings["eos_token_id"] = ends
    (folder / "generation_config.json").write_text(json.dumps(settings))
    cfg.verifier.path = str(folder)
    answers = made(cfg, batch_size=7)
    assert len(ends) >= 2 and any(row["cut"] is False for row in answers)
    for row, before in zip(answers, plain, strict=True):
        first = next((i for i, t in enumerate(before["answer_ids"]) if t in ends), None)
        assert row["cut"] == (first is None)
        assert row["answer_ids"] == before["answer_ids"][: None if first is None else first + 1]
        assert len(row["answer_ids"]) <= NEW


def load(cfg: RunConfig) -> Verifier:
    cache = Path(cfg.run.cache)
    return Verifier.load(cfg.verifier, cache, torch.device("cpu"), torch.float32)


def test_sampled_answers_do_not_depend_on_the_batch(
    cfg: RunConfig, capsys: pytest.CaptureFixture[str]
):
    made_by = {
        size: made(cfg, samples=2, temperature=1.5, top_p=0.9, batch_size=size) for size in (1, 4)
    }
    assert made_by[1] == made_by[4]
    ids = [row["id"] for row in made_by[1]]
    wanted = [f"p{i}#{k}" for i in range(len(WORDS)) for k in range(3)]
    assert ids == [name for name in wanted if name in ids]
    if missing := [name for name in wanted if name not in ids]:  # ended before the first word
        counted = f"{len(missing)} x an answer without text (first: {missing[0]})"
        assert capsys.readouterr().out.count(counted) == 2
    sampled = [row for row in made_by[1] if not row["greedy"]]
    assert all(row["temperature"] == 1.5 for row in sampled)
    assert len({tuple(row["answer_ids"]) for row in sampled}) == len(sampled)
    greedy = [row for row in made_by[1] if row["greedy"]]
    assert greedy == made(cfg)
    cfg.run.seed = 1
    other = made(cfg, samples=2, temperature=1.5, top_p=0.9, batch_size=5)
    said = {row["id"]: row["answer_ids"] for row in other}
    both = [row for row in made_by[1] if row["id"] in said]
    assert len(both) > len(WORDS)
    assert all((row["answer_ids"] == said[row["id"]]) == row["greedy"] for row in both)


def test_greedy_may_be_left_out(cfg: RunConfig):
    assert [row["id"] for row in made(cfg, greedy=False, samples=1)][:2] == ["p0#1", "p1#1"]


def test_every_user_turn_is_answered_with_the_own_answers_before_it(cfg: RunConfig, tmp_path: Path):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "and another"},
    ]
    rows_in = [{"id": "talk", "messages": turns}, single("cat", 0)]
    cfg.regenerate.prompts = [write_prompts(tmp_path / "talk.jsonl", rows_in)]
    verifier = load(cfg)
    # The tiny verifier never ends by itself: let it end on what it says fifth.
    prompt = [turns[0], turns[1]]
    first = library_greedy(cfg.verifier.path, prompt, [2])
    ends = sorted({2, first[4]})

    def own(text: list[dict]) -> tuple[str, list[int]]:
        ids = library_greedy(cfg.verifier.path, text, ends)
        spoken = ids[:-1] if ids[-1] in ends else ids  # what ends an answer is no part of it
        return verifier.tokenizer.decode(spoken, skip_special_tokens=True), ids  # pyright: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "end_ids", lambda _: ends)
        talk, short = made(cfg)
    said = [{"role": "assistant", "content": own(prompt)[0]}]
    second = [*prompt, *said, {"role": "user", "content": "two\n\nthree"}]
    text, ids = own(second)
    assert talk["conversations"] == [*second, {"role": "assistant", "content": text}]
    assert talk["answer_ids"] == [own(prompt)[1], ids]
    assert short["id"] == "p0#0" and len(short["conversations"]) == 2


def test_training_reads_what_was_read_and_written(cfg: RunConfig, tmp_path: Path):
    """Of two turns, sampled until some first answers end: their ids, each after its own prompt."""
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}] * 2
    cfg.regenerate.prompts = [write_prompts(tmp_path / "t.jsonl", [{"id": "t", "messages": turns}])]
    found = made(cfg, greedy=False, samples=24, temperature=4.0, top_p=1.0, max_new_tokens=60)
    tokenizer = load(cfg).tokenizer
    whole = 0
    for row in found:
        talk = read_row(row, "here").conversation
        ids, mask = ids_and_mask(talk, tokenizer, {})
        prompts = [encode_prompt(talk.turns[:i], tokenizer, {}) for i in (1, 3)]
        answers = [list(answer) for answer in talk.answer_ids]
        assert len(answers) == len(talk.turns) // 2
        assert ids == prompts[len(answers) - 1] + answers[-1]
        if len(answers) == 2 and ids[: len(prompts[0] + answers[0])] == prompts[0] + answers[0]:
            assert sum(mask) == sum(map(len, answers))
            assert all(mask[len(prompts[0]) : len(prompts[0] + answers[0])])
            whole += 1
        else:  # one answer, or the first holds a special token, which its text lacks
            assert sum(mask) == len(answers[-1])
    assert whole


def test_an_end_token_that_is_not_special_is_no_part_of_the_text(cfg: RunConfig):
    (plain, *_) = made(cfg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "end_ids", lambda _: [plain["answer_ids"][5]])
        (ended, *_) = made(cfg, batch_size=2)
    at = plain["answer_ids"].index(plain["answer_ids"][5])
    assert ended["answer_ids"] == plain["answer_ids"][: at + 1] and not ended["cut"]
    text = plain["conversations"][1]["content"]
    assert ended["conversations"][1]["content"] == text[: len(ended["conversations"][1]["content"])]
    assert len(ended["conversations"][1]["content"]) == at
    conversation = read_row(ended, "here").conversation
    assert ids_and_mask(conversation, load(cfg).tokenizer, {})[0][-at - 1 :] == ended["answer_ids"]


def test_rows_with_tools_are_skipped(cfg: RunConfig, tmp_path: Path):
    turns = (Turn("user", "q"), Turn("tool", "5"), Turn("user", "r"))
    for row in (Conversation("a", turns), Conversation("a", turns[:1], tools='[{"name": "f"}]')):
        with pytest.raises(RowRefused, match="nobody is there to run them"):
            asks_of(row)
    with pytest.raises(RowRefused, match="no user turn"):
        asks_of(Conversation("a", (), tokenised=Tokenised((1,), (True,))))


def test_a_cut_answer_ends_the_conversation(cfg: RunConfig, tmp_path: Path):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}] * 2
    rows_in = [{"id": "talk", "messages": turns}]
    cfg.regenerate.prompts = [write_prompts(tmp_path / "talk.jsonl", rows_in)]
    (talk,) = made(cfg, max_new_tokens=2)
    assert talk["cut"] and len(talk["conversations"]) == 2 and len(talk["answer_ids"]) == 2


KILLED = """
import os, signal, sys
import data.regenerate as stage
from conf.schema import Device, Precision, RunConfig
from data.answer_file import AnswerFile

cfg = RunConfig()
cfg.run.cache, cfg.run.device = sys.argv[1], Device.cpu
cfg.verifier.path, cfg.verifier.dtype = sys.argv[2], Precision.bfloat16
r = cfg.regenerate
r.prompts, r.output = [sys.argv[3]], sys.argv[4]
r.max_new_tokens, r.batch_size, r.samples = 24, 3, 1
append, calls = AnswerFile.append, []

def append_and_die(self, rows):
    append(self, rows)
    calls.append(1)
    if len(calls) == 2:
        with self.partial.open("ab") as file:
            file.write(b'{"id": "p0#0", "torn')
        os.kill(os.getpid(), signal.SIGKILL)

AnswerFile.append = append_and_die
stage.main(cfg)
"""


def test_kill_and_rerun_gives_the_bytes_of_an_uninterrupted_run(
    cfg: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """In bfloat16, where another batch would round otherwise: batches are the same ones again."""

    cfg.verifier.dtype, cfg.regenerate.samples = Precision.bfloat16, 1
    whole = regenerate(cfg).read_bytes()
    halted = tmp_path / "halted.jsonl"
    cfg.regenerate.output = str(halted)
    words = [str(tmp_path / "cache"), cfg.verifier.path, cfg.regenerate.prompts[0], str(halted)]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert not halted.exists() and Path(f"{halted}.partial.jsonl").exists()
    capsys.readouterr()
    assert regenerate(cfg).read_bytes() == whole
    assert "continues, 6 of 14 are there" in capsys.readouterr().out
    assert not [*tmp_path.glob("halted.jsonl.partial*"), *tmp_path.glob(".*.tmp")]
    written = halted.stat().st_mtime_ns
    regenerate(cfg)
    assert "is finished with these settings" in capsys.readouterr().out
    assert halted.stat().st_mtime_ns == written


def test_continues_with_another_batch_size(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch):
    whole = made(cfg)

    def dies(*_: object) -> Iterator[object]:
        yield from real(*_)  # pyright: ignore
        raise KeyboardInterrupt

    real = stage.generate
    monkeypatch.setattr(stage, "generate", dies)
    with pytest.raises(KeyboardInterrupt):
        regenerate(cfg)
    monkeypatch.setattr(stage, "generate", real)
    cfg.regenerate.batch_size = 2
    assert rows(regenerate(cfg)) == whole


def test_other_settings_are_refused_with_both_values(cfg: RunConfig):
    before = regenerate(cfg).read_bytes()
    cfg.regenerate.max_new_tokens = 7
    with pytest.raises(ConfigError, match=r"max_new_tokens=24, and now .*max_new_tokens=7; take"):
        regenerate(cfg)
    cfg.regenerate.max_new_tokens = NEW
    cfg.regenerate.samples = 1
    with pytest.raises(ConfigError, match=r"was made with regenerate\.samples=0, and now"):
        regenerate(cfg)
    assert Path(cfg.regenerate.output).read_bytes() == before
    cfg.regenerate.samples = 0
    cfg.regenerate.temperature = 0.1  # of no weight without samples
    assert regenerate(cfg).read_bytes() == before
    cfg.regenerate.max_new_tokens = 7
    Path(cfg.regenerate.output).unlink()  # the way out that the message names
    assert {len(row["answer_ids"]) for row in rows(regenerate(cfg))} == {7}


def test_bad_rows_are_skipped_and_counted(
    cfg: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "mixed.jsonl"
    long = single("x" * 3000, 7)  # the tiny verifier has 2048 positions
    good = [single("cat", 0), single("dog", 1), single("again", 1), long]
    path.write_text("".join(json.dumps(row) + "\n" for row in good) + "{broken\n[]\n")
    cfg.regenerate.prompts = [str(path)]
    assert [row["id"] for row in made(cfg)] == ["p0#0", "p1#0"]
    said = capsys.readouterr().out
    for reason in ("id used before", "no room for an answer", "unparsable", "not a JSON object"):
        assert f"1 x {reason}" in said or f"1 x prompt leaves {reason}" in said


def test_files_of_one_name_keep_their_prompts(cfg: RunConfig, tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        turns = [{"role": "user", "content": folder}]
        write_prompts(tmp_path / folder / "0.jsonl", [{"messages": turns}])
    cfg.regenerate.prompts = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [row["id"] for row in made(cfg)] == ["0.jsonl:1#0", "0.jsonl@2:1#0"]


def test_one_reason_of_prompts_and_of_answers_is_added_up():
    assert stage.total({"a": 1, "b": 2}, {"a": 3}, {}) == {"a": 4, "b": 2}


def test_no_usable_prompt_is_one_sentence(cfg: RunConfig, tmp_path: Path):
    cfg.regenerate.prompts = []
    with pytest.raises(ConfigError, match=r"regenerate\.prompts=\[\]: is empty"):
        regenerate(cfg)
    cfg.regenerate.prompts = [write_prompts(tmp_path / "none.jsonl", [{"id": "a", "messages": []}])]
    with pytest.raises(ConfigError, match="hold no usable prompt"):
        regenerate(cfg)


def test_seeds_differ_by_run_answer_and_turn():
    seeds = {seed_of(s, name, t) for s in (0, 1) for name in ("a#1", "a#2") for t in (0, 1)}
    assert len(seeds) == 8 and all(0 <= seed < 2**32 for seed in seeds)


def test_the_command_takes_its_threads_from_the_engine_section(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    set_to: list[int | None] = []
    monkeypatch.setattr(stage, "use_threads", set_to.append)
    monkeypatch.setattr(stage, "regenerate", lambda _cfg: Path("answers.jsonl"))
    cfg.engine.threads = 3
    stage.main(cfg)
    assert set_to == [3]
