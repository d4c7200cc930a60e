"""The plan: what a job will take, from its configuration alone, before anything is computed.

python -m launch.plan [overrides], as verifier=llama3_1_8b plan.tokens=1e9 plan.gpus=8 plan.gpu=h100
"""

import sys

from conf.compose import entry
from conf.runtime import cache_dir, say
from conf.schema import RunConfig


def main(cfg: RunConfig) -> None:
    """Raises ConfigError, after the tables, for a job that does not fit; exits with 1 when
    plan.check=true finds the plan off by more than its bars allow."""
    from launch.planning.fit import refuse_misfit  # torch: bad input need not wait for it
    from launch.planning.pages import page
    from launch.planning.question import Question

    asked = Question.of(cfg, cache_dir(cfg))
    for line in page(asked):
        say(line)
    if cfg.plan.check:
        compare(cfg)
    refuse_misfit(asked)


def compare(cfg: RunConfig) -> None:
    from launch.planning import check

    say("\na small job runs on this machine, in float32 with one thread: a minute or two")
    bars = check.check(cfg)
    for line in check.page(bars):
        say(line)
    if not all(bar.reached for bar in bars):
        sys.exit(1)


if __name__ == "__main__":
    entry(main, running=())
