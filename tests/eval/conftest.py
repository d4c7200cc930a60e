"""A loaded tiny verifier, and drafts whose guesses follow a script."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.schema import FULL, DraftSection, HeadInit, Precision, VerifierSection
from eval.decode import DecodeSettings, decode_plain
from models.eagle3 import DraftConfig, DraftOutput, Eagle3Draft
from models.verifier import Verifier, load_ends
from models.vocab import DraftVocab

Script = Callable[[int, int, int], bool]  # (round, root's index, depth) -> is the guess right?


class ScriptedDraft(Eagle3Draft):
    """A real head with a real cache whose logits name the next token of ``text``, or a wrong one.

    ``text`` is prompt, answer and enough beyond it; ``script`` decides which guesses are right.
    """

    text: list[int]
    script: Script
    limit: int

    def follow(self, text: list[int], script: Script) -> "ScriptedDraft":
        self.text, self.script = text, script
        self.round, self.depth = -1, 0
        return self

    def fuse(self, aux: Tensor) -> Tensor:
        self.depth = -1  # the forward that follows starts a round, or is prefill
        return super().fuse(aux)

    def forward(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memory, known: bool = False
    ) -> DraftOutput:
        self.row = int(positions[0, -1])
        assert self.row < self.config.max_positions, "a draft position beyond its limit"
        self.depth += 1
        return super().forward(share, hidden, positions, memory, known)

    def logits(self, normed: Tensor) -> Tensor:
        if self.depth == 0:
            self.round += 1
        at = self.row + 2
        token = self.text[at] if at < len(self.text) else 0
        if not self.script(self.round, self.row - self.depth + 1, self.depth):
            token = (token + 1) % self.config.vocab_size
        scores = torch.zeros(*normed.shape[:-1], self.config.draft_vocab_size)
        scores[..., token] = 10.0
        return scores


@pytest.fixture(scope="session")
def section(tiny_verifier: Path) -> VerifierSection:
    return VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)


@pytest.fixture(scope="session")
def verifier(section: VerifierSection, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    cache = tmp_path_factory.mktemp("cache")
    return Verifier.load(section, cache, torch.device("cpu"), torch.float32)


@pytest.fixture
def make_draft(verifier: Verifier, section: VerifierSection, tmp_path: Path):
    """Build a random head: make_draft(vocab_size=..., max_positions=..., scripted=True)."""

    def make(
        vocab_size: int | str = FULL, max_positions: int | None = None, scripted: bool = False
    ) -> Eagle3Draft:
        options = DraftSection(vocab_size=vocab_size, max_positions=max_positions)
        config = DraftConfig.of(options, verifier.facts)
        counts = torch.arange(verifier.facts.vocab_size) % 5
        torch.manual_seed(1)
        draft = ScriptedDraft(config) if scripted else Eagle3Draft(config)
        ends = load_ends(section, tmp_path, torch.float32)
        draft.initialise(
            ends, DraftVocab.from_counts(counts, config.draft_vocab_size), HeadInit.verifier
        )
        return draft.eval().requires_grad_(False)

    return make


@pytest.fixture
def follow(verifier: Verifier, make_draft):
    """follow(prompt, settings, script) -> a scripted draft for that prompt's greedy text."""

    def build(prompt: list[int], settings: DecodeSettings, script: Script) -> ScriptedDraft:
        draft = make_draft(scripted=True)
        return draft.follow(greedy_text(verifier, prompt, settings), script)

    return build


def greedy_text(verifier: Verifier, prompt: list[int], settings: DecodeSettings) -> list[int]:
    """Prompt, greedy answer and n_draft tokens beyond its end."""
    plain = decode_plain(verifier, prompt, replace(settings, n_draft=0), tail=settings.n_draft)
    return [*prompt, *plain.tokens, *plain.tail]
