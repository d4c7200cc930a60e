"""A loaded tiny verifier, and drafts whose guesses follow a script."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.schema import FULL, DraftSection, HeadInit, Precision, VerifierSection
from eval.decode import DecodeSettings, decode
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
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories, known: bool = False
    ) -> DraftOutput:
        self.row = int(positions[0, -1])
        assert self.row < self.config.max_positions, "a draft position beyond its limit"
        self.depth += 1
        return super().forward(share, hidden, positions, memories, known)

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


class BigramDraft(Eagle3Draft):
    """A real head with a real cache, whose guesses depend on the token before alone.

    Good for batches and trees: ``first`` and ``second`` [V] are its two likeliest tokens.
    """

    first: Tensor
    second: Tensor

    def know(self, texts: list[list[int]]) -> "BigramDraft":
        """The last two successors of each token in ``texts``: often right, not always."""
        self.first = torch.zeros(self.config.vocab_size, dtype=torch.long)
        self.second = torch.ones(self.config.vocab_size, dtype=torch.long)
        for text in texts:
            for token, following in pairwise(text):
                if int(self.first[token]) != following:
                    self.second[token] = self.first[token]
                    self.first[token] = following
        return self

    def share_of(self, tokens: Tensor, asks: bool = True) -> Tensor:
        self.tokens = tokens
        return super().share_of(tokens, asks)

    def forward(
        self, share: Tensor, hidden: Tensor, positions: Tensor, memories, known: bool = False
    ) -> DraftOutput:
        output = super().forward(share, hidden, positions, memories, known)
        normed = output.normed.clone()
        normed[..., 0] = self.tokens
        return DraftOutput(output.hidden, normed)

    def logits(self, normed: Tensor) -> Tensor:
        token = normed[..., 0].long()
        scores = super().logits(normed).clamp(-1, 1)
        for known, score in ((self.second, 3.0), (self.first, 4.0)):  # another token, if pruned
            scores = scores.scatter(-1, self.to_draft_ids(known[token])[..., None], score)
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
    """Build a random head: make_draft(vocab_size=..., max_positions=..., kind=ScriptedDraft,
    qk_norm=..., layers=...)."""

    def make(
        vocab_size: int | str = FULL,
        max_positions: int | None = None,
        kind: type[Eagle3Draft] = Eagle3Draft,
        qk_norm: bool = False,
        layers: int = 1,
    ) -> Eagle3Draft:
        options = DraftSection(
            vocab_size=vocab_size, max_positions=max_positions, qk_norm=qk_norm, layers=layers
        )
        config = DraftConfig.of(options, verifier.facts)
        counts = torch.arange(verifier.facts.vocab_size) % 5
        torch.manual_seed(1)
        draft = kind(config)
        ends = load_ends(section, tmp_path, torch.float32)
        draft.initialise(
            ends, DraftVocab.from_counts(counts, config.draft_vocab_size), HeadInit.verifier
        )
        return draft.eval().requires_grad_(False)

    return make


@pytest.fixture
def follow(verifier: Verifier, make_draft):
    """follow(prompt, settings, script, layers=...) -> a scripted draft for that prompt's greedy
    text."""

    def build(
        prompt: list[int], settings: DecodeSettings, script: Script, layers: int = 1
    ) -> ScriptedDraft:
        draft = make_draft(kind=ScriptedDraft, layers=layers)
        return draft.follow(greedy_text(verifier, prompt, settings), script)

    return build


def greedy_text(verifier: Verifier, prompt: list[int], settings: DecodeSettings) -> list[int]:
    """Prompt, greedy answer and as many tokens beyond its end as a round is deep."""
    tail = settings.shape.depth if settings.shape else 0
    plain = decode(verifier, None, [prompt], settings, tail=tail).generations[0]
    return [*prompt, *plain.tokens, *plain.tail]


@pytest.fixture
def scripted(make_draft):
    """scripted(max_positions=...) -> a head whose guesses follow a script, once it has one."""
    return lambda **options: make_draft(kind=ScriptedDraft, **options)


@pytest.fixture
def bigrams(verifier: Verifier, make_draft):
    """bigrams(prompts, settings) -> a draft that knows pairs of those prompts' greedy texts."""

    def build(prompts: list[list[int]], settings: DecodeSettings, **options) -> BigramDraft:
        draft = make_draft(kind=BigramDraft, **options)
        return draft.know([greedy_text(verifier, ids, settings) for ids in prompts])

    return build
