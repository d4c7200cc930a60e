"""Which heads are served by real vLLM: few combinations that hold every pair of their values."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import Enum
from itertools import combinations, product

from conf.choices import ExportFormat
from conf.schema import FULL, DraftSection

PRUNED = 96  # tokens of a draft vocabulary, of VOCAB
VOCAB = 256
LAYERS = 8
AUX = {3: None, 5: [1, 2, 4, 5, 7]}  # None: the default, [2, 4, 5]


class Family(Enum):
    """A verifier that vLLM captures states from."""

    llama = "llama"
    qwen3 = "qwen3"


class Norms(Enum):
    """Switches of the draft that are on together, as words."""

    none = ""
    norm_before_residual = "norm_before_residual"
    norm_before_fc = "norm_before_fc"
    fc_norm = "fc_norm"
    norm_output = "norm_output"
    three = "norm_before_residual norm_before_fc norm_output"


@dataclass(frozen=True)
class Combination:
    format: ExportFormat
    norms: Norms
    qk_norm: bool  # the draft is Qwen3-shaped
    aux: int  # layers
    pruned: bool  # draft vocabulary
    family: Family
    tied: bool  # the verifier's head is its embedding
    layers: int  # of the draft

    @property
    def name(self) -> str:
        words = [self.format.value, self.norms.name]
        words += ["qk_norm"] if self.qk_norm else []
        words += [f"{self.layers}layers"] if self.layers > 1 else []
        words += [f"{self.aux}aux", "pruned" if self.pruned else "full", self.verifier]
        return "-".join(words)

    @property
    def verifier(self) -> str:
        return self.family.value + ("-tied" if self.tied else "")

    @property
    def section(self) -> DraftSection:
        switches = dict.fromkeys(self.norms.value.split(), True)
        size = PRUNED if self.pruned else FULL
        return DraftSection(vocab_size=size, qk_norm=self.qk_norm, layers=self.layers, **switches)


AXES = {
    "format": (ExportFormat.vllm, ExportFormat.speculators),
    "norms": tuple(Norms),
    "qk_norm": (False, True),
    "aux": tuple(AUX),
    "pruned": (True, False),
    "family": tuple(Family),
    "tied": (False, True),
    "layers": (1, 2),
}
assert list(AXES) == [field.name for field in fields(Combination)]


def pairs(one: Combination) -> set[tuple]:
    """Two axes and the values it has there, for every two axes."""
    return set(combinations(zip(AXES, astuple(one), strict=True), 2))


def cover(choices: Sequence[Combination]) -> list[Combination]:
    """Few of ``choices`` that hold every pair any of them holds: always the one with most left."""
    left = set().union(*map(pairs, choices))
    taken: list[Combination] = []
    while left:
        best = max(choices, key=lambda one: len(pairs(one) & left))
        taken.append(best)
        left -= pairs(best)
    return taken


COVER = cover([Combination(*values) for values in product(*AXES.values())])
