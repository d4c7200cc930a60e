"""Which settings a run folder belongs to: what shaped its head must stay, the rest may change."""

from typing import Any

from conf.compose import load_saved
from conf.runtime import plain, run_dir
from conf.schema import ConfigError, RunConfig

SHAPING = ("verifier", "draft", "data", "capture", "ttt", "loss", "optim", "engine")
# Knobs of those sections that a rerun may change: how fast and whether, not what.
FREE = (
    "data.workers",
    "verifier.attention",
    "capture.tensor_parallel",
    "capture.batch_tokens",
    "capture.chunk_tokens",
    "capture.missing",
    "capture.shard_mib",
    "capture.stage_gib",
    "capture.store",
    "capture.tolerance",
    "capture.vllm_python",
    "capture.mode",
    "capture.min_agreement",
    "capture.verify",
    "engine.attention",
    "engine.compile",
    "engine.recompute",
    "engine.threads",
    "engine.timeout_minutes",
)
MADE = ("best", "checkpoints", "stages.json")  # any of these: a stage of the run has succeeded


def refuse_other_settings(cfg: RunConfig) -> None:
    """Raise ConfigError when the run folder of ``cfg`` was made with other shaping settings.

    A folder in which no stage has succeeded belongs to nobody: a mistyped knob can be mended.
    """
    folder = run_dir(cfg)
    saved_file = folder / "config.yaml"
    if not saved_file.is_file() or not any((folder / name).exists() for name in MADE):
        return
    saved = load_saved(saved_file)
    for knob, ours, theirs in differences(cfg, saved):
        raise ConfigError(
            f"{knob}={ours}: run.name={cfg.run.name} was made with {knob}={theirs}; use that "
            "value or another run.name"
        )


def differences(cfg: RunConfig, saved: RunConfig) -> list[tuple[str, Any, Any]]:
    """(knob, value now, value then) of every shaping knob that differs."""
    single = (
        ("run.seed", cfg.run.seed, saved.run.seed),
        ("eval.valid_depth", cfg.eval.valid_depth, saved.eval.valid_depth),
        ("log.valid_every", cfg.log.valid_every, saved.log.valid_every),
    )
    found: list[tuple[str, Any, Any]] = [one for one in single if one[1] != one[2]]
    for section in SHAPING:
        ours, theirs = flat(plain(getattr(cfg, section))), flat(plain(getattr(saved, section)))
        for knob in sorted(ours.keys() | theirs.keys()):
            name = f"{section}.{knob}"
            if ours.get(knob) != theirs.get(knob) and name not in FREE:
                found.append((name, ours.get(knob), theirs.get(knob)))
    return found


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested free-form settings with dotted names."""
    out: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
