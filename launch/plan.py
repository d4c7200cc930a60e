"""The plan: what a job will take, from its configuration alone, before anything is computed.

python -m launch.plan [overrides], as verifier=llama3_1_8b plan.tokens=1e9 plan.gpus=8 plan.gpu=h100
"""

from conf.compose import entry
from conf.runtime import cache_dir, say
from conf.schema import RunConfig


def main(cfg: RunConfig) -> None:
    """Raises ConfigError, after the tables, for a job that does not fit."""
    from launch.planning.fit import refuse_misfit  # torch: bad input need not wait for it
    from launch.planning.pages import page
    from launch.planning.question import Question

    asked = Question.of(cfg, cache_dir(cfg))
    for line in page(asked):
        say(line)
    refuse_misfit(asked)


if __name__ == "__main__":
    entry(main, running=())
