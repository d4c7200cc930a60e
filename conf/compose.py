"""From a command line to one judged RunConfig; a mistake becomes one sentence and exit code 2."""

import errno
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.rules import validate
from conf.runtime import RankInfo, note_in_log
from conf.schema import ConfigError, JobError, RunConfig, Stage

FOLDER = Path(__file__).resolve().parent
Raised = TypeVar("Raised", bound=BaseException | None)
USAGE = """usage: {program} [key=value ...] [--cfg job]

Overrides name a knob of conf/schema.py (ttt.depth=5) or choose a group file:
{groups}
--cfg job prints the composed configuration and stops."""

ConfigStore.instance().store(name="schema", node=RunConfig)


def load_config(argv: list[str], running: Sequence[Stage] | None = None) -> RunConfig:
    """Compose ``conf/`` with the overrides in ``argv`` and judge the result.

    ``running``: the stages whose files must be there; None means those the configuration names.
    Raises ConfigError for an unknown key, a wrong type, a missing value or a broken rule.
    """
    overrides = [completed(word) for word in argv]
    try:
        with initialize_config_dir(str(FOLDER), version_base=None):
            refuse_group_of_null(overrides)
            composed = compose("config", overrides)
        cfg = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_sentence(error, argv)) from error
    assert isinstance(cfg, RunConfig)
    return validate(cfg, cfg.stages if running is None else running)


def load_saved(path: Path) -> RunConfig:
    """Read a run's own ``config.yaml`` back. Raises ConfigError when it is not one."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the folder of a run made by train/main.py")
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ValueError("it is a list")
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), loaded)
        cfg = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(one_sentence(error, [str(path)])) from error
    except (OSError, ValueError) as error:  # another kind of document, or no text
        raise ConfigError(
            f"{path}: not a run's configuration ({error}); put back what train/main.py wrote"
        ) from error
    assert isinstance(cfg, RunConfig)
    return cfg


def to_yaml(cfg: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def entry(
    main: Callable[[RunConfig], None],
    argv: list[str] | None = None,
    running: Sequence[Stage] = (Stage.prepare,),
) -> None:
    """Run a stage from the command line: compose, judge, call; bad input ends with exit code 2."""
    with sentence_on_error():
        words = sys.argv[1:] if argv is None else argv
        cfg = from_command_line(words, running)
        if cfg is not None:
            main(cfg)


class sentence_on_error:
    """Turn an error into its sentence on standard error and an exit code: bad input 2, others 1,
    an interruption from the keyboard 130."""

    def __init__(self, alike: bool = False):
        """``alike``: every rank meets the same error, so the first one speaks for all."""
        self.speaks = not alike or RankInfo.from_env().is_main

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        error = in_words(error)
        if isinstance(error, KeyboardInterrupt):
            if self.speaks:
                sys.stderr.write("interrupted; the same command goes on from what is finished\n")
            raise SystemExit(130) from None
        if isinstance(error, ConfigError | JobError):
            if self.speaks:
                sys.stderr.write(f"{error}\n")
                note_in_log(str(error))
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


def in_words(error: Raised) -> Raised | JobError:
    """A disk that is full, or a file that cannot be had, as a sentence with its way out."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JobError(
            f"{error.filename or 'run.root or run.cache'}: the disk became full; make room and "
            "run the same command again, which goes on from what is finished"
        )
    if isinstance(error, OSError) and error.filename is not None:
        # A rename's second name is the one that the user gave.
        return JobError(
            f"{error.filename2 or error.filename}: {error.strerror}; give a place that can be "
            "read and written, or mend this one, and run the same command again"
        )
    return error


def from_command_line(words: list[str], running: Sequence[Stage] | None = None) -> RunConfig | None:
    """A configuration, or None when the words only asked to see something."""
    if {"-h", "--help"} & set(words):
        sys.stdout.write(USAGE.format(program=Path(sys.argv[0]).name, groups=group_table()) + "\n")
        return None
    if {"-m", "--multirun"} & set(words):
        raise ConfigError(
            "--multirun: a sweep inside one job deadlocks in its second process group; "
            "use python -m launch.sweep sweep=ttt_depth"
        )
    plain = (word.lstrip("+") for word in words)
    sweep = next((word for word in plain if word.startswith("sweep=")), None)
    if sweep:
        raise ConfigError(f"{sweep}: one job is one point; use python -m launch.sweep {sweep}")
    show = "--cfg" in words
    if show:
        at = words.index("--cfg")
        words = words[:at] + words[at + 2 :]
    flag = next((word for word in words if word.startswith("-")), None)
    if flag:
        raise ConfigError(f"{flag}: not an option here; write key=value, or --help for the knobs")
    cfg = load_config(words, running)
    if show:
        sys.stdout.write(to_yaml(cfg))
        return None
    return cfg


def group_table() -> str:
    folders = (path for path in FOLDER.iterdir() if path.is_dir() and path.name[0] not in "_.")
    groups = sorted(path for path in folders if path.name != "sweep")  # launch.sweep's own
    lines = []
    for group in groups:
        options = ", ".join(sorted(file.stem for file in group.glob("*.yaml")))
        if options:
            lines.append(f"  {group.name}: {options}")
    return "\n".join(lines)


def refuse_group_of_null(overrides: list[str]) -> None:
    """Hydra meets a group set to null with a traceback."""
    for word in overrides:
        key, _, value = word.partition("=")
        if value in ("null", "") and (FOLDER / key.lstrip("+")).is_dir():
            raise ConfigError(f"{word}: names no file of the group; --help lists the groups")


def knobs_holding(container: type, section: Any = RunConfig, prefix: str = "") -> set[str]:
    """Dotted names of every knob that is a ``list`` or a ``dict``."""
    found: set[str] = set()
    hints = get_type_hints(section)
    for knob in fields(section):
        kind = hints[knob.name]
        if is_dataclass(kind):
            found |= knobs_holding(container, kind, f"{prefix}{knob.name}.")
        elif container in (get_origin(kind), *(get_origin(part) for part in get_args(kind))):
            found.add(prefix + knob.name)
    return found


def completed(word: str) -> str:
    """``data.path=file`` means the list of one file; keys of a free-form section need no plus."""
    key, equals, value = word.partition("=")
    wraps = equals and value and value[0] not in "[$" and value not in ("null", "???")
    if wraps and key.lstrip("+") in knobs_holding(list):
        return f"{key}=[{value}]"
    free = any(key == knob or key.startswith(f"{knob}.") for knob in knobs_holding(dict))
    return f"++{word}" if equals and free else word


def one_sentence(error: Exception, argv: list[str]) -> str:
    """Say in one line what Hydra says in several: knob, value, reason, way out."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    reason = lines[0].rstrip(".") if lines else type(cause).__name__
    if "Available options" in str(error):
        found = [line.strip() for line in str(error).splitlines() if line.startswith("\t")]
        options = [one for one in found if "=" not in one]  # beside them Hydra lists search paths
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{lines[0].rstrip('.')}; choose one of {', '.join(options)}"
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    named = key or knob_in(reason, argv)
    guilty = next((word for word in argv if named and word.lstrip("+").startswith(named)), named)
    head = f"{guilty}: " if guilty and not reason.startswith(str(guilty)) else ""
    return f"{head}{reason}; --help lists the groups, conf/schema.py every knob"


def knob_in(reason: str, argv: list[str]) -> str | None:
    """The override whose key the reason mentions."""
    for word in argv:
        key = word.lstrip("+~").partition("=")[0]
        if key and (key in reason or f"'{key.rpartition('.')[2]}'" in reason):
            return key
    return None
