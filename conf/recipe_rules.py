"""Rules on how a draft is trained: what of its recipe the other choices leave no effect to."""

from collections.abc import Iterator

from conf.schema import DraftFamily, Feed, OptimKind, RunConfig, StepWeights


def recipe(cfg: RunConfig) -> Iterator[str]:
    """ttt.feed and ttt.weights are about chains, which eagle3 alone is trained on; and which
    optimizer goes with which sharding."""
    family = cfg.draft.family
    for knob, value, default in (
        ("ttt.feed", cfg.ttt.feed, Feed.data),
        ("ttt.weights", cfg.ttt.weights, StepWeights.decay),
    ):
        if value is not default and family is not DraftFamily.eagle3:
            yield (
                f"{knob}={value.value}: has an effect for draft.family=eagle3 alone, and this is "
                f"{family.value}; set {knob}={default.value}"
            )
    if (average := cfg.optim.average) is not None:
        if not 0 < average < 1:
            yield (
                f"optim.average={average}: must be above 0 and below 1; try optim.average=0.99, or "
                "null for none"
            )
        if cfg.engine.zero_stage == 3:
            yield (
                f"optim.average={average}: needs whole weights, and engine.zero_stage=3 splits "
                "them; take engine.zero_stage=1, or optim.average=null"
            )
    if cfg.optim.kind is OptimKind.muon and cfg.engine.zero_stage:
        yield (
            f"optim.kind=muon: needs whole matrices, and engine.zero_stage={cfg.engine.zero_stage} "
            "flattens and splits them; take engine.zero_stage=0, or optim.kind=adamw"
        )
