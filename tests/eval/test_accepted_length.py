"""User report B88: accepted length may not fall unnoticed.

Verifier and head are made from seeds. The head's layer is random and its last matrix is solved for,
by least squares on the verifier's greedy texts, so that it is often right and depends on everything
that it is fed. tests/golden/accepted_length.json has what the loop counted when this was written;
a change that is meant to move it says so and writes the new figures.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conf.schema import FULL, DraftSection, HeadInit, Precision, VerifierSection
from conf.shapes import parse_shape
from eval.acceptance import Counters, total
from eval.decode import DecodeSettings, decode
from eval.sides import TargetDecoder
from models.eagle3 import DraftConfig, Eagle3Draft
from models.memory import DraftCache
from models.verifier import Verifier, VerifierStates, load_ends
from models.vocab import DraftVocab

GOLDEN = Path(__file__).parents[1] / "golden" / "accepted_length.json"
V = 48


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> VerifierSection:
    """A verifier that looks at its last token most, and at those before it, too."""
    folder = tmp_path_factory.mktemp("seeded")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=V,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.06,
            tie_word_embeddings=False,
            **sizes,
        )
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(10)
    model.save_pretrained(folder)
    for path in (*tiny_verifier.glob("token*"), *tiny_verifier.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    return VerifierSection(str(folder), Precision.float32, aux_layers=[1, 2, 4])


@pytest.fixture(scope="module")
def verifier(section: VerifierSection) -> Verifier:
    return Verifier.load(section, Path(section.path), torch.device("cpu"), torch.float32)


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (4 + i % 9,), generator=draw).tolist() for i in range(count)]


@pytest.fixture(scope="module")
def head(verifier: Verifier, section: VerifierSection) -> Eagle3Draft:
    """Fitted on other texts than those that are counted."""
    config = DraftConfig.of(DraftSection(vocab_size=FULL), verifier.facts)
    draft = Eagle3Draft(config)
    ends = load_ends(section, Path(section.path), torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        draft.initialise(ends, DraftVocab.from_counts(torch.ones(V), V), HeadInit.verifier)
        with torch.no_grad():
            draft.fc.weight.normal_(std=0.4)  # the states have as much to say as the tokens
            for matrix in draft.midlayer.parameters():
                if matrix.dim() == 2:
                    matrix.normal_(std=0.1)
    draft = draft.eval().requires_grad_(False)
    draft.lm_head.weight.copy_(solved(verifier, draft))
    return draft


@torch.inference_mode()
def solved(verifier: Verifier, draft: Eagle3Draft) -> Tensor:
    """[V, D]: the ridge regression of the verifier's logits on what the head reads, in float64."""
    settings = DecodeSettings(max_new_tokens=40, eos_ids=[])
    read, wanted = [], []
    texts = prompts(60, seed=2)
    for ids, one in zip(texts, decode(verifier, None, texts, settings).generations, strict=True):
        text = torch.tensor([[*ids, *one.tokens]])
        rows, states = text.shape[1] - 1, verifier.states(text)
        share, fused = draft.share_of(text[:, 1:]), draft.fuse(states.aux[:, :-1])
        output = draft(share, fused, torch.arange(rows)[None], [DraftCache(rows)])
        read.append(output.normed[0].double())
        wanted.append(verifier.logits_from(states.last)[0, 1:].double())
    x, y = torch.cat(read), torch.cat(wanted)
    ridge = 0.01 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()


def accepted_length(verifier: Verifier, draft: Eagle3Draft, name: str) -> float:
    shape = parse_shape(name, "shape")
    settings = DecodeSettings(max_new_tokens=40, eos_ids=[], shape=shape)
    found = decode(verifier, draft, prompts(12, seed=3), settings).generations
    counted = [Counters.of(one.rounds, len(one.tokens), shape.depth) for one in found]
    return total(counted).tau


def test_accepted_length_is_the_golden_one(verifier: Verifier, head: Eagle3Draft):
    golden: dict[str, float] = json.loads(GOLDEN.read_text())
    found = {name: accepted_length(verifier, head, name) for name in golden}
    assert found == pytest.approx(golden, rel=0.02)
    assert min(found.values()) > 1.5  # a head that guesses


def states_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' states in another order."""
    fuse = Eagle3Draft.fuse

    def swapped(self: Eagle3Draft, aux: Tensor) -> Tensor:
        return fuse(self, torch.cat(aux.chunk(3, -1)[::-1], -1))

    monkeypatch.setattr(Eagle3Draft, "fuse", swapped)


def states_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of accepted tokens are those of the tokens before."""
    commit = TargetDecoder.commit

    def late(self: TargetDecoder, path: Tensor, accepted: list[int], line: bool) -> VerifierStates:
        kept = commit(self, path, accepted, line)
        return VerifierStates(kept.aux.roll(1, 1), kept.last.roll(1, 1))

    monkeypatch.setattr(TargetDecoder, "commit", late)


def states_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a tree's first nodes, whichever stood."""

    def first(self: TargetDecoder, path: Tensor, accepted: list[int], line: bool) -> VerifierStates:
        self.cache.commit(path, accepted, line)
        return self.states[:, : max(accepted) + 1]

    monkeypatch.setattr(TargetDecoder, "commit", first)


@pytest.mark.parametrize("fault", [states_swapped, states_one_late, states_of_other_nodes])
def test_a_fault_that_leaves_the_text_alone_moves_it(
    verifier: Verifier, head: Eagle3Draft, monkeypatch, fault: Callable
):
    """The controls: greedy text stays the verifier's, so that nothing else would tell."""
    golden: dict[str, float] = json.loads(GOLDEN.read_text())
    fault(monkeypatch)
    if fault is states_of_other_nodes:
        del golden["3"]  # a chain's first nodes are the right ones
    for name, tau in golden.items():
        assert accepted_length(verifier, head, name) < 0.98 * tau, name
