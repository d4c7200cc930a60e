"""The recipes that the acceptance bench compares: each is the base with one switch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recipe:
    """What one training is told, beyond the fixed data and the budget."""

    name: str
    group: str  # the table it stands in
    overrides: list[str] = field(default_factory=list)
    layers: str = "2,15,27"
    kind: str = "greedy"  # of the training answers
    samples: int | None = None  # only the first so many

    @property
    def words(self) -> list[str]:
        """The arguments of acceptance_eyrie.py."""
        words = ["--kind", self.kind, "--layers", self.layers]
        words += ["--samples", str(self.samples)] if self.samples else []
        return [*words, *self.overrides]


FIRST, BASE = "first", "base"
# The first demo's recipe, and the one that this bench found; what a variant says besides wins.
BEFORE = [
    "ttt.depth=5",
    "draft.fit_rows=null",
    "draft.head_init=verifier",
    "draft.norm_output=false",
]
WORDS = [
    "ttt.depth=2",
    "draft.fit_rows=16384",
    "draft.head_init=frozen",
    "draft.norm_output=true",
]


def variants(group: str, *variants: str) -> list[Recipe]:
    """One recipe a variant: the base with overrides, separated by blanks; they are its name."""
    return [Recipe(words.replace(" ", "_"), group, [*WORDS, *words.split()]) for words in variants]


def other_layers(*layers: int) -> Recipe:
    joined = ",".join(map(str, layers))
    return Recipe(f"verifier.aux_layers={joined}", "verifier layers", WORDS, joined)


WIDER = "optim.micro_batch_tokens=1024 optim.lr=2e-3"
RECIPES = [
    Recipe(FIRST, "base", BEFORE),
    Recipe(BASE, "base", WORDS),
    Recipe(f"{FIRST}_whole", "whole cache, as the peers have it", BEFORE, kind="whole"),
    Recipe(f"{BASE}_whole", "whole cache, as the peers have it", WORDS, kind="whole"),
    *variants("unroll depth", *(f"ttt.depth={k}" for k in (1, 3, 4, 5, 7, 10))),
    *variants("learning rate", "optim.lr=5e-4", "optim.lr=1.5e-3", "optim.lr=2e-3"),
    *variants("end of the schedule", "optim.min_lr_share=0", "optim.average=0.99"),
    *variants(
        "optimizer",
        "optim.kind=muon engine.zero_stage=0 optim.micro_batch_tokens=1024",
        "optim.betas=[0.9,0.99]",
        "optim.clip=100",
    ),
    *variants(
        "size of an update",
        "optim.micro_batch_tokens=128",
        "optim.micro_batch_tokens=512",
        WIDER,
    ),
    *variants(
        "weight of a step",
        "ttt.decay=1.0",
        "ttt.decay=0.5",
        "ttt.weights=reached",
        "ttt.weights=missed",
    ),
    *variants(
        "draft vocabulary",
        "draft.vocab_size=2048",
        "draft.vocab_size=1024",
        "draft.vocab_size=8192",
    ),
    *variants("loss", "loss=ce", "loss=tv", "loss=lk", "loss=mix"),
    *variants(
        "start",
        "draft.fit_rows=null",
        "draft.fit_rows=4096",
        "draft.fit_rows=null draft.layer_init=verifier",
        "draft.fit_rows=null draft.head_init=random",
        "draft.head_init=verifier",
    ),
    *variants(
        "norms",
        "draft.fc_norm=false",
        "draft.norm_output=false",
        "draft.norm_before_residual=true",
        "draft.qk_norm=true",
        "draft.fc_norm=false draft.norm_before_fc=true",
    ),
    *variants("width of the MLP", "draft.intermediate_size=768", "draft.intermediate_size=3072"),
    *variants("draft layers", "draft.layers=2"),
    *variants("what is supervised", "ttt.supervise=any"),
    *variants("tokens fed to later steps", "ttt.feed=own"),
    *variants("normalisation", "loss.normalise=sequence"),
    other_layers(15, 21, 27),
    other_layers(2, 15, 30),
    other_layers(15, 27, 30),
    other_layers(2, 9, 15, 21, 27),
    Recipe("sampled", "training answers", WORDS, kind="sampled"),
    Recipe("foreign", "training answers", WORDS, kind="foreign"),
    Recipe("greedy_600", "training answers", WORDS, samples=600),
    Recipe("greedy_100", "training answers", WORDS, samples=100),
]
