"""The page holds what the samples hold, marks what the masks mark, and no sample becomes markup."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from conf.schema import ConfigError, RunConfig, VerifierSection
from data import preview
from data.prepare import prepare
from data.preview_page import FIRST, OUTSIDE, SPECIAL, SUPERVISED, PageWriter, whole_pieces
from data.records import TokenizedSample
from models.verifier import load_tokenizer

ALL = torch.ones(128, dtype=torch.bool)


class Page(HTMLParser):
    """A page as a browser takes it apart: tags, and what stands in scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and len(self.scripts) <= 2:
            self.scripts[-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def tokenizer(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory):
    section = VerifierSection(path=str(tiny_verifier))
    return load_tokenizer(section, tmp_path_factory.mktemp("cache"))


def sample_of(text: str, tokenizer, mask: list[bool] | None = None, name="x") -> TokenizedSample:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    flags = torch.tensor(mask) if mask else torch.ones(len(ids), dtype=torch.bool)
    return TokenizedSample(name, ids, flags, False, False)


@pytest.mark.parametrize(
    "hostile",
    [
        "</script><img src=x onerror=alert(1)>",
        "<!--<script>",
        '"}]}</SCRIPT ><svg onload=alert(1)>',
        "&lt;b&gt; \\u003c/script\\u003e",
        "@DATA@",
    ],
)
def test_a_sample_stays_text(tokenizer, hostile):
    page = PageWriter(tokenizer, ALL)
    harmless = Page(page.page([sample_of("hello", tokenizer, name="x")], ["all well"]))
    text = page.page([sample_of(hostile, tokenizer, name=hostile)], [hostile])
    parsed = Page(text)
    assert parsed.tags == harmless.tags
    assert parsed.attributes == harmless.attributes
    assert len(parsed.scripts) == 2
    assert parsed.scripts[1] == harmless.scripts[1]
    (sample,) = parsed.data["samples"]
    assert "".join(piece[0] for piece in sample["pieces"]) == hostile
    assert sample["id"] == hostile
    assert parsed.data["summary"] == [hostile]


def test_the_escaping_is_what_keeps_it_text(tokenizer):
    """The negative control: the same data unescaped closes the script and opens an image."""
    hostile = "</script><img src=x onerror=alert(1)>"
    text = PageWriter(tokenizer, ALL).page([sample_of("x", tokenizer, name=hostile)], [])
    unescaped = Page(text.replace("\\u003c", "<").replace("\\u003e", ">"))
    assert "img" in unescaped.tags
    assert "img" not in Page(text).tags


def test_the_page_needs_nothing_from_elsewhere(tokenizer):
    text = PageWriter(tokenizer, ALL).page([sample_of("x", tokenizer)], [])
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href"} & set(page.attributes)
    assert "default-src 'none'" in text
    assert not [word for word in ("http://", "https://", "url(", "@import") if word in text]
    assert not [
        word for word in ("innerHTML", "outerHTML", "eval(", "document.write") if word in text
    ]


def test_pieces_carry_the_mask_and_the_draft_vocabulary(tokenizer):
    text = "<|im_start|>ab<|im_end|>c<|im_end|>"
    mask = [False, True, True, True, False, True]
    known = ALL.clone()
    known[tokenizer.convert_tokens_to_ids("b")] = False
    page = PageWriter(tokenizer, known)
    sample = page.sample(sample_of(text, tokenizer, mask))
    assert [piece[1] for piece in sample.pieces] == [
        SPECIAL,
        SUPERVISED | FIRST,
        SUPERVISED | OUTSIDE,
        SUPERVISED | SPECIAL,
        0,
        SUPERVISED | FIRST | SPECIAL,
    ]
    assert (sample.tokens, sample.supervised, sample.answers) == (6, 4, 2)
    assert [number for piece in sample.pieces for number in piece[2]] == tokenizer(
        text, add_special_tokens=False
    )["input_ids"]


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Drops the space before the first word it decodes, as many do; bytes for what it lacks."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    core.train_from_iterator(["the user and the answer"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("text", ["the user and the answer", "the 🙂 user 🙂🙂", "é the"])
def test_texts_of_the_pieces_joined_are_the_whole_text(text):
    tokenizer = metaspace_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = whole_pieces(ids, tokenizer)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    assert [number for piece in pieces for number in piece.ids] == ids
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_broken():
    tokenizer = metaspace_tokenizer()
    ids = tokenizer("the 🙂", add_special_tokens=False)["input_ids"][:-1]
    pieces = whole_pieces(ids, tokenizer)
    assert [number for piece in pieces for number in piece.ids] == ids
    assert pieces[-1].text.endswith("\ufffd")


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    config = RunConfig()
    config.verifier.path = str(tiny_verifier)
    config.run.cache = str(tmp_path / "cache")
    config.data.path = [str(tmp_path / "a.jsonl")]
    config.draft.vocab_size = 16
    with Path(config.data.path[0]).open("w") as file:
        for i in range(230):
            turns = [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "ab" * (i % 9 + 1)},
            ]
            file.write(json.dumps({"id": f"p{i}", "messages": turns}) + "\n")
        file.write('{"id": "bad"}\n')
    return config


def test_two_hundred_samples_on_a_page_of_the_default_place(cfg, capsys):
    preview.main(cfg)
    out = capsys.readouterr().out
    path = prepare(cfg).folder / "preview.html"
    assert str(path) in out
    data = Page(path.read_text()).data
    names = [sample["id"] for sample in data["samples"]]
    assert len(names) == len(set(names)) == 200
    assert {sample["held_out"] for sample in data["samples"]} == {True, False}
    assert any("skipped 1: no turns" in line for line in data["summary"])
    assert all(line in out for line in data["summary"])
    assert not list(path.parent.glob("*.tmp"))


def test_a_held_out_sample_is_always_there(cfg, tmp_path):
    cfg.preview.samples = 2
    cfg.preview.page = str(tmp_path / "pages" / "look.html")
    preview.main(cfg)
    data = Page(Path(cfg.preview.page).read_text()).data
    assert sorted(sample["held_out"] for sample in data["samples"]) == [False, True]


def test_a_page_that_cannot_be_written_names_the_knob(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    cfg.preview.page = str(tmp_path / "file" / "page.html")
    with pytest.raises(ConfigError, match=r"preview\.page=.*file/page\.html: cannot be written"):
        preview.main(cfg)


def test_greedy_samples_say_so(tokenizer):
    sample = replace(sample_of("x", tokenizer), greedy=True)
    assert PageWriter(tokenizer, ALL).sample(sample).greedy
