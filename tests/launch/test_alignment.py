"""Layer ids off by one and another rotary base, which no folder shows, are found by acceptance.

A text is made for each head: at most rows the next token is the head's own guess under the right
wiring, at the others a random one. That is what a trained head meets, without the training.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.schema import FULL, DraftSection, Precision, VerifierSection
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from eval.wiring import GUESSES, Verdict, Wiring
from launch import alignment
from launch.alignment import (
    TALKS,
    TURNS,
    load_beside,
    misaligned,
    names_in,
    own_texts,
    rewired,
    try_all,
)
from launch.export import main
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.layout import Layout
from models.export.speculators import SPECULATORS
from models.export.vllm import VLLM
from models.export.write import export
from models.kernels import CPU_FLASH
from models.verifier import Verifier
from models.vocab import DraftVocab
from train.ttt import unroll_own

AUX = "eagle_aux_hidden_state_layer_ids"
IDS, TEXTS, TOKENS, PROMPT = [2, 4, 6], 12, 48, 6
RIGHT = 0.6  # of the rows
THETA = 50.0  # of the text's head: short texts, in which a base must show


def random_head(config: DraftConfig) -> Eagle3Draft:
    generator = torch.Generator().manual_seed(5)
    draft = Eagle3Draft(config).eval().requires_grad_(False)
    for name, parameter in draft.named_parameters():
        if "norm" not in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    vocab = DraftVocab.from_counts(torch.ones(config.vocab_size), config.draft_vocab_size)
    draft.d2t.copy_(vocab.d2t)
    draft.t2d.copy_(vocab.t2d)
    return draft


def aux_of(verifier: Verifier, ids: Tensor, layers: Sequence[int]) -> Tensor:
    """ids [B, T] -> [B, T, A*D] of ``layers``, by the library's own account of its streams."""
    states = verifier.model(input_ids=ids, output_hidden_states=True).hidden_states
    return torch.cat([states[n] for n in layers], -1)


@torch.no_grad()
def texts_for(draft: Eagle3Draft, verifier: Verifier) -> list[TokenizedSample]:
    generator = torch.Generator().manual_seed(8)
    vocab = draft.config.vocab_size
    ids = torch.randint(0, vocab, (TEXTS, TOKENS), generator=generator)
    follows = torch.rand(TEXTS, TOKENS, generator=generator) < RIGHT
    mask = torch.arange(TOKENS) >= PROMPT
    nothing = torch.empty(0)
    for end in range(PROMPT, TOKENS):  # x[end] from row end - 2, which has seen x[..end-1]
        aux = aux_of(verifier, ids[:, :end], draft.config.aux_layers)
        samples = [
            CachedSample(
                one, nothing, nothing, nothing, sample=TokenizedSample("", row, mask[:end], 1, 1)
            )
            for one, row in zip(aux, ids[:, :end], strict=True)
        ]
        pack = CachedPack.of(samples)
        last = torch.zeros(TEXTS, end, dtype=torch.bool)
        last[:, end - 2] = True
        needed = last.flatten()[None]
        batch = batch_of(pack, Chains.build(~needed & needed, needed, pack.starts))
        guesses = unroll_own(draft, batch, CPU_FLASH, 1).view(TEXTS, end)[:, end - 2]
        ids[:, end] = torch.where(follows[:, end], guesses, ids[:, end])
    return [TokenizedSample(f"{i}", row, mask, True, True) for i, row in enumerate(ids)]


@dataclass
class Bench:
    verifier: Verifier
    head: Eagle3Draft
    texts: list[TokenizedSample]

    def verdict(self, **changes: object) -> Verdict:
        """Of the head, its file changed so."""
        own = Wiring(self.head.config.aux_layers, self.head.config.rope)
        filed = rewired(self.head, replace(own, **changes))
        verifier = load_beside(Path(self.verifier.facts.path), filed.config, torch.float32)
        verifier.facts = replace(verifier.facts, rope=self.head.config.rope)
        return misaligned(filed, verifier, self.texts, names_in(VLLM))


@pytest.fixture(scope="module")
def bench(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    cache = tmp_path_factory.mktemp("cache")
    section = VerifierSection(
        path=str(tiny_verifier), dtype=Precision.float32, aux_layers=list(IDS)
    )
    verifier = Verifier.load(section, cache, torch.device("cpu"), torch.float32)
    config = DraftConfig.of(DraftSection(vocab_size=FULL), verifier.facts)
    table = {"rope_type": "default", "rope_theta": THETA}
    head = random_head(replace(config, rope=table))
    return Bench(verifier, head, texts_for(head, verifier))


def test_the_text_is_right_for_its_head_alone(bench: Bench):
    """What the other tests stand on: the share of right rows is the one that was asked for."""
    own = Wiring(IDS, bench.head.config.rope)
    found = try_all(bench.head, bench.verifier, bench.texts, [own])[0]
    assert found.rows == TEXTS * (TOKENS - PROMPT - GUESSES)
    assert found.first == pytest.approx(RIGHT, abs=0.05)


def test_right_ids_and_base_are_no_finding(bench: Bench):
    verdict = bench.verdict()
    assert verdict.findings == []
    assert any("accepted more often than every neighbour" in note for note in verdict.notes)
    assert any(
        "config.json: rope_parameters.rope_theta=50.0: the verifier's" in note
        for note in verdict.notes
    )


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 3, 5], "ids off by one"),
        ([2, 4, 7], "one id off by one"),
    ],
)
def test_ids_off_by_one_are_found(bench: Bench, ids: list[int], words: str):
    findings = bench.verdict(aux_layers=ids).findings
    assert len(findings) == 1
    assert f"config.json: eagle_aux_hidden_state_layer_ids={ids}: " in findings[0]
    assert "the verifier's streams [2, 4, 6] are accepted" in findings[0]
    assert findings[0].endswith(f": {words}")


def test_another_base_is_found(bench: Bench):
    findings = bench.verdict(rope={"rope_type": "default", "rope_theta": 10000.0}).findings
    assert len(findings) == 1
    assert findings[0].startswith("config.json: rope_parameters.rope_theta=10000.0: guesses are")
    assert "the verifier's 50.0 (0." in findings[0]


def test_both_at_once_are_both_found(bench: Bench):
    rope = {"rope_type": "default", "rope_theta": 200.0}
    findings = bench.verdict(aux_layers=[3, 5, 7], rope=rope).findings
    assert [("layer_ids" in one, "rope_theta" in one) for one in findings] == [
        (True, False),
        (False, True),
    ]


def test_an_indifferent_head_is_not_decided(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """It reads no stream and asks no key: neither ids nor base change a guess."""
    state = {name: tensor.clone() for name, tensor in bench.head.state_dict().items()}
    for name in ("fc.weight", "midlayer.self_attn.q_proj.weight"):
        state[name].zero_()
    deaf = Eagle3Draft(bench.head.config)
    deaf.load_state_dict(state)
    monkeypatch.setattr(bench, "head", deaf.eval().requires_grad_(False))
    rope = {"rope_type": "default", "rope_theta": 200.0}
    verdict = bench.verdict(aux_layers=[3, 5, 7], rope=rope)
    assert verdict.findings == []
    assert any("layer_ids=[3, 5, 7]: not decided, no" in note for note in verdict.notes)
    assert any("rope_theta=200.0: not decided" in note for note in verdict.notes)


def test_a_rewired_head_shares_its_weights(bench: Bench):
    other = rewired(bench.head, Wiring([1, 3, 5], {"rope_type": "default", "rope_theta": 9.0}))
    assert other.config.aux_layers == [1, 3, 5] and other.config.rope["rope_theta"] == 9.0
    assert bench.head.config.aux_layers == IDS
    ours, theirs = bench.head.state_dict(), other.state_dict()
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)


# ---- by the command, on a folder ----------------------------------------------------------------


def folder_with(
    bench: Bench, place: Path, change: Callable[[dict], object], kind: Layout = VLLM
) -> Path:
    """The head's export with a config.json that is consistent, and wrong."""
    path = bench.verifier.facts.path
    card = CardFacts(path, path, "float32", None, DataFacts("texts of its own"))
    folder = export(bench.head, bench.verifier.facts, place, card, Precision.float32, kind)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def given_texts(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """The head's texts in place of the verifier's answers, which it has not learnt.

    In float32: a random head's guesses do not outlast rounding.
    """
    monkeypatch.setattr(alignment, "own_texts", lambda verifier: bench.texts)
    exact = partial(load_beside, dtype=torch.float32)
    monkeypatch.setattr(alignment, "load_beside", exact)


def off_by_one(config: dict) -> None:
    for holder, ids in ((config, [1, 3, 5]), (config.get("eagle_config", {}), [0, 2, 4])):
        if AUX in holder:
            holder[AUX] = ids


@pytest.mark.usefixtures("given_texts")
def test_the_command_ends_with_1_and_names_field_and_base(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The tiny verifier's base is 10,000, and the head's texts are for another one."""
    folder = folder_with(bench, tmp_path / "head", off_by_one, SPECULATORS)
    words = ["--check", str(folder), "--verifier", bench.verifier.facts.path]
    assert main(words[:2]) == 0  # the folder alone shows nothing
    assert main(words) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(
        f"config.json: {AUX}=[1, 3, 5]: the verifier's streams [2, 4, 6] are accepted more often"
    )
    table = SPECULATORS.keys["rope"]
    base = f"config.json: {table}.rope_theta=50.0: not the verifier's 10000.0, with"
    assert any(line.startswith(base) for line in said)


@pytest.mark.usefixtures("given_texts")
def test_a_right_folder_is_in_order_for_every_engine_and_tried_once(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = folder_with(bench, tmp_path / "head", lambda config: None)
    verifier = bench.verifier.facts.path
    words = ["--check", str(folder), "--verifier", verifier, "--to", "vllm", "sglang"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("in order for") == 2 and said.count("the file's") == 1


@pytest.mark.usefixtures("given_texts")
def test_a_head_that_cannot_be_run_is_not_tried(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = folder_with(bench, tmp_path / "head", lambda config: config.pop("hidden_size"))
    assert main(["--check", str(folder), "--verifier", bench.verifier.facts.path]) == 1
    said = capsys.readouterr().out
    assert "hidden_size missing" in said and "rotary base were not tried: " in said


def test_the_texts_are_the_verifiers_own(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Token for token what a forward without a cache finds likeliest, in every turn."""
    rows = [{"task": "t", "turns": [f"{i}, and then?"]} for i in range(TALKS * TURNS)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(alignment, "PROMPTS", prompts)
    monkeypatch.setattr(alignment, "NEW_TOKENS", 16)
    texts = own_texts(bench.verifier)
    assert len(texts) == TALKS
    for text in texts:
        places = text.loss_mask.nonzero().flatten()
        assert int((text.loss_mask.int().diff() == 1).sum()) == TURNS
        logits = bench.verifier.model(text.input_ids[None]).logits[0, places - 1]
        likeliest = logits.argmax(-1) == text.input_ids[places]
        assert likeliest.float().mean() > 0.99  # but for ties of rounding
