"""A head overfitted here, exported, and served by real vLLM: same tokens, same counts, same states.

Two of four prompts are learnt by heart, so that drafts are accepted in part; the other two are
new to the head. vLLM computes on one core while the head is trained on another.
"""

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conf.schema import (
    FULL,
    DraftSection,
    HeadInit,
    LossKind,
    Precision,
    TTTSection,
    VerifierSection,
)
from conf.shapes import chain
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from data.states import states_of
from eval.acceptance import Counters, total
from eval.decode import DecodeSettings, decode
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.check import check
from models.export.write import export
from models.kernels import CPU_FLASH
from models.memory import DraftCache
from models.verifier import Verifier, VerifierEnds
from models.vocab import DraftVocab, draft_vocab_size
from train.loss import Distillation
from train.ttt import TrainingTimeTest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # about a minute on two idle cores

ROOT = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("vllm_probe.py")
N_DRAFT = 4
NEW_TOKENS = 40
STEPS = 30
TOLERANCE = 1e-2  # absolute, float32; neighbouring layers differ by 20 and more
PROMPTS = [
    "Write a short Python function that adds two numbers.",
    "Answer with JSON only: a red bicycle with the keys name, color and price.",
    "Write a short Python function that multiplies three numbers.",
    "List three animals that live in the sea.",
]
LEARNT = 2  # the first so many
HEADS = [
    pytest.param(DraftSection(vocab_size=1024, fc_norm=True), id="the demo's flags"),
    pytest.param(
        DraftSection(
            vocab_size=FULL, norm_before_fc=True, norm_before_residual=True, norm_output=True
        ),
        id="the other flags and the whole vocabulary",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        DraftSection(vocab_size=1024, fc_norm=True, qk_norm=True),
        id="Qwen3's draft class",
        marks=pytest.mark.slow,
    ),
]


@dataclass(frozen=True)
class Served:
    """What vLLM and our own code made of the same prompts with the same head."""

    folder: Path  # of vLLM's answers
    prompts: list[list[int]]
    verifier: Verifier
    draft: Eagle3Draft
    counters: Counters  # of our own loop

    def answer(self, run: str) -> dict:
        return json.loads((self.folder / f"{run}.json").read_text())

    def states(self, run: str) -> dict[str, Tensor]:
        return load_file(self.folder / f"{run}.safetensors")


@pytest.fixture(scope="module", params=HEADS)
def served(
    request: pytest.FixtureRequest,
    vllm_python: Path,
    smollm2: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    folder = tmp_path_factory.mktemp("vllm")
    section = VerifierSection(path=str(smollm2), dtype=Precision.float32)
    verifier = Verifier.load(section, folder, torch.device("cpu"), torch.float32)
    prompts = [encode(verifier, text) for text in PROMPTS]
    task = {"verifier": str(smollm2), "prompts": prompts}
    task |= {"max_tokens": NEW_TOKENS, "n_draft": N_DRAFT}
    (folder / "request.json").write_text(json.dumps(task))
    with (folder / "log.txt").open("w") as log:
        probe = subprocess.Popen(
            [vllm_python, PROBE, folder],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert probe.stdin is not None
        try:
            ask(probe.stdin, "plain", None)
            draft = overfit(verifier, prompts[:LEARNT], request.param)
            ask(probe.stdin, "head", export_with(draft, verifier, folder / "head", shift=0))
            ask(probe.stdin, "shifted", export_with(draft, verifier, folder / "off", shift=-1))
            probe.stdin.close()
            counters = own_counters(verifier, draft, prompts)
            assert probe.wait(timeout=600) == 0, (folder / "log.txt").read_text()[-3000:]
        finally:
            probe.kill()
            probe.wait()
    return Served(folder, prompts, verifier, draft, counters)


def ask(probe: IO[str], name: str, head: Path | None) -> None:
    probe.write(json.dumps({"name": name, "head": head and str(head)}) + "\n")
    probe.flush()


def encode(verifier: Verifier, text: str) -> list[int]:
    turn = [{"role": "user", "content": text}]
    return list(
        verifier.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    )


# No end of sequence: vLLM ignores it too, so that both loops end at the same token.
SETTINGS = DecodeSettings(max_new_tokens=NEW_TOKENS, eos_ids=[], shape=chain(N_DRAFT))


def overfit(verifier: Verifier, prompts: list[list[int]], section: DraftSection) -> Eagle3Draft:
    """A head that knows the verifier's own answers to ``prompts`` by heart, more or less."""
    answers = [decode(verifier, None, [ids], SETTINGS).generations[0].tokens for ids in prompts]
    samples = [cached(verifier, *pair) for pair in zip(prompts, answers, strict=True)]
    tokens = torch.tensor([token for ids in answers for token in ids])
    counts = torch.bincount(tokens, minlength=verifier.facts.vocab_size)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size(section, len(counts)))
    torch.manual_seed(0)
    draft = Eagle3Draft(DraftConfig.of(section, verifier.facts))
    config = verifier.model.config
    ends = VerifierEnds(verifier.backbone.embed_tokens.weight, verifier.head.weight, config)
    draft.initialise(ends, vocab, HeadInit.verifier)
    if section.qk_norm:  # away from 1, so that a lost or swapped weight shows
        for norm in (draft.midlayer.self_attn.q_norm, draft.midlayer.self_attn.k_norm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    rows = ends.head[vocab.target_ids]
    ttt = TTTSection(depth=N_DRAFT)
    module = TrainingTimeTest(draft, Distillation(LossKind.kl, rows, config), ttt, CPU_FLASH)
    mask = torch.cat([one.sample.loss_mask for one in samples])
    chains = Chains.of(mask, CachedPack.of(samples).starts, ttt.depth, ttt.supervise)
    batch = batch_of(CachedPack.of(samples), chains)
    weights = torch.full((len(prompts),), 1 / chains.counts[0])
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(batch, weights).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return draft.eval().requires_grad_(False)


def cached(verifier: Verifier, prompt: list[int], answer: list[int]) -> CachedSample:
    """What the cache would hold of one prompt and its answer."""
    ids = torch.tensor(prompt + answer)
    mask = torch.arange(len(ids)) >= len(prompt)
    sample = TokenizedSample("", ids, mask, greedy=True, held_out=False)
    return CachedSample(sample=sample, **vars(states_of(verifier, [sample], verifier.dtype)[0]))


def export_with(draft: Eagle3Draft, verifier: Verifier, folder: Path, shift: int) -> Path:
    """Export in float32, with every aux layer id moved by ``shift``."""
    moved = [n + shift for n in draft.config.aux_layers]
    head = Eagle3Draft(replace(draft.config, aux_layers=moved))
    head.load_state_dict(draft.state_dict())
    facts = replace(verifier.facts, aux_layers=moved)
    path = verifier.facts.path
    card = CardFacts(path, path, "float32", None, DataFacts("two answers, by heart"))
    export(head, facts, folder, card, Precision.float32)
    assert check(folder, Path(path)) == []
    return folder


def own_counters(verifier: Verifier, draft: Eagle3Draft, prompts: list[list[int]]) -> Counters:
    found = []
    for ids in prompts:
        made = decode(verifier, draft, [ids], SETTINGS).generations[0]
        found.append(Counters.of(made.rounds, len(made.tokens), N_DRAFT))
    return total(found)


@torch.no_grad()
def first_guess(served: Served) -> dict[str, Tensor]:
    """Our own prefill of the first prompt: what vLLM's hooks recorded, by the same names."""
    ids = served.prompts[0]
    states = served.verifier.states(torch.tensor([ids]))
    token = served.verifier.logits_from(states.last[:, -1]).argmax(-1)
    shifted = torch.cat([torch.tensor([ids[1:]]), token[None]], 1)
    positions = torch.arange(len(ids))[None]
    draft, inputs = served.draft, []
    hook = draft.fc.register_forward_pre_hook(lambda _module, args: inputs.append(args[0][0]))
    fused = draft.fuse(states.aux)
    hook.remove()
    normed = draft(draft.share_of(shifted), fused, positions, DraftCache(len(ids))).normed
    spread = torch.full((draft.config.vocab_size,), float("-inf"))
    own_ids = torch.arange(draft.config.draft_vocab_size)
    spread[draft.to_target_ids(own_ids)] = draft.logits(normed[0, -1])
    return {
        "aux": states.aux[0],
        "fc_input": inputs[0],
        "fc_output": fused[0],
        "logits": spread[None],
        "input_ids": shifted[0],
        "positions": positions[0],
    }


def apart(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; entries of -inf on both sides are equal."""
    rows = theirs[: len(ours)]  # vLLM pads its buffers
    return float(torch.where(ours == rows, 0.0, (ours - rows).abs()).max())


def test_the_draft_changes_no_token(served: Served):
    plain, head = served.answer("plain"), served.answer("head")
    assert [len(tokens) for tokens in plain["tokens"]] == [NEW_TOKENS] * len(PROMPTS)
    assert head["tokens"] == plain["tokens"]
    assert plain["counters"] == {}


def test_accepted_counts_are_those_of_our_loop(served: Served):
    theirs = served.answer("head")["counters"]
    ours = served.counters
    by_position = theirs["accepted_tokens_per_pos"]
    shown = f"ours {ours.accepted_by_depth} of {ours.rounds}, vLLM {by_position}, {theirs}"
    assert len(by_position) == len(ours.accepted_by_depth) == N_DRAFT
    pairs = zip(ours.accepted_by_depth, by_position, strict=True)
    assert all(abs(a - b) <= 1 for a, b in pairs), shown
    assert abs(theirs["drafts"][0] - ours.rounds) <= 1, shown
    # neither everything nor nothing is accepted, so equal counts say something
    assert 0.2 < by_position[0] / theirs["drafts"][0] < 0.98, shown
    assert by_position[-1] > 0, shown


def test_states_and_first_logits_are_ours(served: Served):
    theirs, ours = served.states("head"), first_guess(served)
    rows = len(served.prompts[0])
    assert torch.equal(theirs["input_ids"][:rows].long(), ours["input_ids"])
    assert torch.equal(theirs["positions"][:rows].long(), ours["positions"])
    for name in ("fc_input", "fc_output", "logits"):
        assert apart(ours[name], theirs[name]) <= TOLERANCE, name


def test_layer_ids_off_by_one_are_seen(served: Served):
    """Such a head loads, keeps every token right and accepts drafts: only the states tell."""
    theirs, ours = served.states("shifted"), first_guess(served)
    assert served.answer("shifted")["tokens"] == served.answer("plain")["tokens"]
    assert apart(ours["fc_input"], theirs["fc_input"]) > 10 * TOLERANCE
    assert apart(ours["logits"], theirs["logits"]) > 10 * TOLERANCE
