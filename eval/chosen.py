"""Which prompts are measured: the report's top level, and patterns never seen in training."""

from dataclasses import dataclass

from conf.schema import ConfigError, RunConfig
from data.eval_prompts import EvalPrompt, read_prompts, take
from data.records import Skipped

UNSEEN_SHARE = 4  # with max_prompts, one unseen pattern for so many seen ones: minutes count


@dataclass(frozen=True)
class ChosenPrompts:
    top: list[EvalPrompt]  # the report's top level
    unseen: list[EvalPrompt]  # an entry of their own
    skipped: Skipped


def choose_prompts(cfg: RunConfig) -> ChosenPrompts:
    """``eval.max_prompts`` prompts and a quarter as many of unseen patterns; null: all of both."""
    found = read_prompts(cfg.eval.prompts)
    count = cfg.eval.max_prompts
    top = take([prompt for prompt in found.prompts if prompt.seen is not False], count)
    rest = [prompt for prompt in found.prompts if prompt.seen is False]
    if not top:
        raise ConfigError(
            f"eval.prompts={cfg.eval.prompts}: every prompt is marked unseen_pattern and the "
            "report's top level would be empty; mark some seen_pattern, or drop the split"
        )
    unseen = take(rest, None if count is None else -(-count // UNSEEN_SHARE))
    return ChosenPrompts(top, unseen, found.skipped)
