"""What the knobs of the draft must satisfy among themselves."""

from collections.abc import Iterator

from conf.schema import MOST_LAYERS, DraftFamily, HeadInit, LayerInit, RunConfig
from conf.unheeded import spelled

TAKEN = [  # by knob: the values that leave draft.fit_rows its place, and what the others do
    ("family", [DraftFamily.eagle3], "there is no linear start"),
    (
        "head_init",
        [HeadInit.verifier, HeadInit.frozen],
        "a fit is for the verifier's head, not one",
    ),
    ("layer_init", [LayerInit.random], "two starts want the same attention"),
]


def draft(cfg: RunConfig) -> Iterator[str]:
    if cfg.draft.fc_norm and cfg.draft.norm_before_fc:
        yield (
            "draft.norm_before_fc=true: excludes draft.fc_norm=true, engines read one of the two; "
            "set one of them to false"
        )
    headed = cfg.draft.family is not DraftFamily.model  # whose head has no start of its own
    if headed and cfg.draft.init is not None and cfg.draft.head_init is HeadInit.random:
        yield (
            "draft.head_init=random: draft.init brings the head's rows; take "
            "draft.head_init=verifier, which begins with those, or draft.init=null"
        )


def decoder_layers(cfg: RunConfig) -> Iterator[str]:
    """How many there are, and what they start from."""
    draft = cfg.draft
    if not 1 <= draft.layers <= MOST_LAYERS:
        yield f"draft.layers={draft.layers}: must be in 1..{MOST_LAYERS}; try draft.layers=1"
    if draft.layer_init is not LayerInit.verifier:
        return
    if draft.family is not DraftFamily.eagle3:
        yield (
            f"draft.layer_init=verifier: has no effect with draft.family={draft.family.value}; "
            "take draft.layer_init=random, or draft.family=eagle3"
        )
    if draft.init is not None:
        yield (
            "draft.layer_init=verifier: draft.init brings the weights of the layers; take "
            "draft.layer_init=random, or draft.init=null"
        )


def linear_start(cfg: RunConfig) -> Iterator[str]:
    """draft.fit_rows: what it fits must be there, and nothing else may claim its place."""
    rows = cfg.draft.fit_rows
    if rows is None:
        return
    knob = f"draft.fit_rows={rows}"
    if rows < 1:
        yield f"{knob}: must be at least 1; try draft.fit_rows=16384, or null for a random start"
    for name, plain, why in TAKEN:
        value = getattr(cfg.draft, name)
        if value not in plain:
            wanted = spelled(plain[0])
            yield (
                f"{knob}: {why} with draft.{name}={spelled(value)}; set draft.{name}={wanted}, or "
                "draft.fit_rows=null"
            )
