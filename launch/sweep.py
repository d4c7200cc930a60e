"""A sweep: one job a point, each in a torchrun of its own, then the tables and plots of all.

Several trainings inside one torchrun deadlock in the second ``init_process_group`` (a PyTorch
limit), so Hydra's multirun stays outside, in a process that joins no process group.
"""

import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf.compose import FOLDER, completed, load_config, one_sentence, sentence_on_error
from conf.runtime import say
from conf.schema import ConfigError, Device, RunConfig
from eval.parser import Parser
from launch.sweep_plan import SweepPlan, stages_word

if TYPE_CHECKING:
    from launch.sweep_points import SweepPoint

OURS = ("sweep", "stages", "run.name")  # the sweep sets them for each point


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when a point failed. Raises ConfigError for bad input."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    plan = make_plan(options.overrides, options.nproc_per_node)
    say(f"sweep {plan.name} over {', '.join(plan.swept)}: results go to {plan.folder}")
    from launch.sweep_points import make_cache  # torch: bad input need not wait for it

    code = make_cache(plan)
    if code:
        say(f"making the shared cache failed with exit code {code}; no point was started")
        return 1
    points = launch(plan)
    from launch.sweep_table import SweepResult, write_results  # torch, as above

    write_results(plan.folder, SweepResult(plan.name, plan.fixed, plan.swept, points))
    return 1 if any(point.failure for point in points) else 0


def read_options(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="python -m launch.sweep", description="Train every point of a sweep and compare them."
    )
    parser.add_argument(
        "--nproc-per-node", type=int, help="ranks of one training; default: one a GPU, else one"
    )
    parser.add_argument("overrides", nargs="*", help="sweep=NAME and any override of the job")
    options = parser.parse_args(argv)
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        parser.error(f"--nproc-per-node={options.nproc_per_node}: must be 1 or more")
    return options


def make_plan(overrides: list[str], processes: int | None) -> SweepPlan:
    """Split the overrides into fixed and swept ones. Raises ConfigError for bad input."""
    words = [completed(word) for word in overrides]
    refuse_missing_launcher(words)
    try:
        given = parse(words)
        single = [str(o.input_line) for o in given if not o.is_sweep_override()]
        with initialize_config_dir(str(FOLDER), version_base=None):
            composed = compose("config", single, return_hydra_config=True)
        choice = composed.hydra.runtime.choices.get("sweep")
        params = composed.hydra.sweeper.get("params") or {}
        defaults = parse([f"{knob}={value}" for knob, value in params.items()])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_sentence(error, words)) from error
    last = {o.get_key_element(): o for o in [*defaults, *given]}  # the command line comes last
    swept = [knob for knob, override in last.items() if override.is_sweep_override()]
    refuse(choice, swept, last)
    outer = (*swept, *OURS)
    fixed = [
        str(o.input_line)
        for knob, o in last.items()
        if knob not in outer and not knob.startswith("hydra")
    ]
    stages = list(composed.stages)
    cfg = load_config([*fixed, stages_word(stages)])  # a broken rule ends here, before any job
    name = composed.run.name if "run.name" in last else choice
    ranks = processes or default_processes(cfg)
    return SweepPlan(name, Path(cfg.run.root), fixed, swept, stages, words, ranks)


def refuse_missing_launcher(words: list[str]) -> None:
    """Raise ConfigError for a launcher of the extra ``sweep`` that is not installed."""
    for word in words:
        key, _, name = word.partition("=")
        kind = name.partition("_")[0]
        plugin = f"hydra_{kind}_launcher"
        if key == "hydra/launcher" and kind in ("joblib", "submitit") and not is_plugin(plugin):
            raise ConfigError(
                f"{word}: that launcher is not installed; get it with "
                "python -m pip install -c launch/constraints.txt -e '.[sweep]'"
            )


def is_plugin(name: str) -> bool:
    return find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{name}") is not None


def parse(words: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(words)


def refuse(choice: str | None, swept: list[str], last: dict[str, Override]) -> None:
    """Raise ConfigError for a command line that is no sweep."""
    if choice is None:
        names = sorted(file.stem for file in (FOLDER / "sweep").glob("*.yaml"))
        raise ConfigError(
            f"sweep=null: choose one of {', '.join(names)}, as in "
            f"python -m launch.sweep sweep={names[0]}"
        )
    if not swept:
        raise ConfigError(
            f"sweep={choice}: every knob has one value; give one several, as in ttt.depth=1,3"
        )
    if "stages" in last:
        raise ConfigError(
            f"{last['stages'].input_line}: conf/sweep/{choice}.yaml names the stages of a point; "
            "remove it, and evaluate a point with python -m eval.main run.name=SWEEP/POINT"
        )
    if "run.name" in swept:
        raise ConfigError("run.name: names the sweep's folder and takes one value; give one")


def default_processes(cfg: RunConfig) -> int:
    if cfg.run.device is Device.cpu:
        return 1
    import torch  # seconds; bad input must not wait for it

    return max(1, torch.cuda.device_count())


def launch(plan: SweepPlan) -> "list[SweepPoint]":
    """Let Hydra's sweeper and launcher go through the points; a failed one stops no other."""
    from launch.sweep_points import train  # torch, as above

    def train_point(_cfg: DictConfig) -> "SweepPoint":
        hydra = HydraConfig.get()
        swept = [word for word in hydra.overrides.task if word.partition("=")[0] in plan.swept]
        say(f"\npoint {hydra.job.num + 1}: {' '.join(swept)}")
        return train(plan, swept)

    quiet = [
        f"hydra.sweep.dir='{plan.folder}'",
        "hydra.sweep.subdir=.",  # a training makes its own folder
        "hydra.output_subdir=null",
        "hydra/hydra_logging=none",
        "hydra/job_logging=none",
    ]
    try:
        with initialize_config_dir(str(FOLDER), version_base=None):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            batches = hydra.multirun("config", train_point, [*plan.words, *quiet])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_sentence(error, plan.words)) from error
    return [job.return_value for batch in batches for job in batch]


if __name__ == "__main__":
    with sentence_on_error():
        sys.exit(main())
