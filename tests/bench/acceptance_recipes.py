"""The recipes that the acceptance bench compares: each is the base with one thing changed."""

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


def changed(group: str, *variants: str) -> list[Recipe]:
    """One recipe a variant: overrides separated by blanks, its name as well."""
    return [Recipe(words.replace(" ", "_"), group, words.split()) for words in variants]


SHORT = "ttt.depth=2 optim.micro_batch_tokens=512"
BASE = Recipe("base", "base")
ABLATIONS = [
    BASE,
    *changed("learning rate", "optim.lr=2e-3", "optim.lr=4e-3", "optim.lr=5e-4"),
    *changed("unroll depth", *(f"ttt.depth={k}" for k in (3, 1, 7, 10, 2))),
    *changed(
        "optimizer",
        "ttt.depth=2 optim.micro_batch_tokens=1024 optim.kind=muon engine.zero_stage=0",
        "ttt.depth=2 optim.micro_batch_tokens=1024 optim.lr=2e-3",
        "ttt.depth=2 optim.min_lr_share=0",
    ),
    *changed(
        "size of an update",
        "optim.micro_batch_tokens=128",
        "optim.micro_batch_tokens=512",
        "optim.micro_batch_tokens=1024 optim.lr=2e-3",
    ),
    *changed(
        "weight of a step",
        "ttt.decay=1.0",
        "ttt.decay=0.6",
        "ttt.weights=reached",
        "ttt.weights=missed",
    ),
    *changed(
        "draft vocabulary",
        "draft.vocab_size=2048",
        "draft.vocab_size=1024",
        "draft.vocab_size=8192",
    ),
    *changed("loss", "loss=ce", "loss=tv", "loss=lk", "loss=mix"),
    *changed("start of the head", "draft.head_init=random", "draft.head_init=frozen"),
    *changed("start of the layer", "draft.layer_init=verifier"),
    *changed(
        "norms",
        "draft.fc_norm=false",
        "draft.norm_output=true",
        "draft.qk_norm=true",
        "draft.norm_before_residual=true",
        "draft.fc_norm=false draft.norm_before_fc=true",
    ),
    *changed("width of the MLP", "draft.intermediate_size=768", "draft.intermediate_size=3072"),
    *changed("what is supervised", "ttt.supervise=any"),
    *changed("tokens fed to later steps", "ttt.feed=own"),
    *changed("normalisation", "loss.normalise=sequence"),
    Recipe("aux_15_21_27", "verifier layers", layers="15,21,27"),
    Recipe("aux_2_15_30", "verifier layers", layers="2,15,30"),
    Recipe("aux_2_9_15_21_27", "verifier layers", layers="2,9,15,21,27"),
    *changed("draft layers", "draft.layers=2"),
    Recipe("sampled", "training answers", kind="sampled"),
    Recipe("foreign", "training answers", kind="foreign"),
    *changed(
        "combinations",
        SHORT,
        f"{SHORT} optim.lr=2e-3",
        f"{SHORT} draft.vocab_size=2048",
        f"{SHORT} loss=lk",
        f"{SHORT} loss=ce",
        f"{SHORT} draft.layer_init=verifier",
        f"{SHORT} draft.intermediate_size=768",
        f"{SHORT} draft.norm_output=true",
        f"{SHORT} optim.clip=100",
    ),
    Recipe("greedy_600", "training answers", samples=600),
    Recipe("greedy_100", "training answers", samples=100),
]
