"""Knobs that are set though the family of the draft has no use for them."""

from collections.abc import Iterable, Iterator

from conf.schema import RunConfig

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")


def unheeded(cfg: RunConfig, only: Iterable[tuple[str, object]]) -> Iterator[str]:
    """``only``: knobs, as ttt.feed, and the value of each that says nothing."""
    for knob, plain in only:
        section, name = knob.split(".")
        value = getattr(getattr(cfg, section), name)
        if value != plain:
            yield (
                f"{knob}={spelled(value)}: has no effect with "
                f"draft.family={cfg.draft.family.value}; set {knob}={spelled(plain)}"
            )


def spelled(value: object) -> str:
    """As a command line has it."""
    plain = getattr(value, "value", value)
    if plain is None:
        return "null"
    return str(plain).lower() if isinstance(plain, bool) else str(plain)
