"""report.json as a file: read back into the records it was written from."""

import json
import reprlib
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from conf.schema import ConfigError
from eval.acceptance import Interval
from eval.report import EvalReport
from eval.report_check import impossible

LARGEST = sys.float_info.max
AGAIN = "write it anew with python -m eval.main run.name=NAME"


class BadValue(ValueError):
    """Which key of the file is not what it should be; the message is ``key: what is wrong``."""


def read_report(path: Path) -> EvalReport:
    """The report in ``path``: a report.json, or a run's folder. A figure of null becomes NaN.

    Raises ConfigError for a file that is missing, broken, or of an older Eyrie. Keys that this
    version does not know are left out.
    """
    file = find_report(path)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also too many digits
        raise ConfigError(f"{file}: not JSON ({error}); {AGAIN}") from error
    if not isinstance(value, dict) or "tau" not in value or "settings" not in value:
        raise ConfigError(f"{file}: no report of eval.main; give runs/NAME/eval/report.json")
    missing = [one.name for one in fields(EvalReport) if one.name not in value]
    if missing:
        raise ConfigError(
            f"{file}: written by another version of Eyrie, it lacks {', '.join(missing)}; {AGAIN}"
        )
    try:
        report = build(EvalReport, value, "")
    except BadValue as error:
        raise ConfigError(f"{file}: {error}; {AGAIN}") from error
    for wrong in impossible(report):
        raise ConfigError(f"{file}: {wrong}; {AGAIN}")
    return report


def find_report(path: Path) -> Path:
    """The file itself, or the one in a run's folder. Raises ConfigError when there is none."""
    path = path.expanduser()
    for file in (path, path / "report.json", path / "eval" / "report.json"):
        if file.is_file():
            return file
    raise ConfigError(
        f"{path}: no report there; give a report.json or the folder of a run that was evaluated"
    )


def build(kind: Any, value: Any, key: str) -> Any:
    """``value`` of JSON as ``kind``: a dataclass, list, dict, enum, number or text.

    Raises BadValue with the key, as ``by_n.3.tau``.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (kind,) = [one for one in inner if one is not NoneType]
        return build(kind, value, key)
    if kind is Interval:
        if not isinstance(value, list) or len(value) != 2:
            raise BadValue(f"{key} is no interval [low, high]")
        return Interval(build(float, value[0], key), build(float, value[1], key))
    if is_dataclass(kind):
        return build_record(kind, value, key)
    if origin in (list, dict):
        return build_many(origin, inner, value, key)
    return build_leaf(kind, value, key)


def build_record(kind: Any, value: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise BadValue(f"{key} is no object")
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for one in fields(kind):
        below = f"{key}.{one.name}" if key else one.name
        if one.name in value:
            found[one.name] = build(hints[one.name], value[one.name], below)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise BadValue(f"{below} is missing")
    return kind(**found)


def build_many(origin: Any, inner: tuple[Any, ...], value: Any, key: str) -> Any:
    if not isinstance(value, origin):
        raise BadValue(f"{key} is no {'list' if origin is list else 'object'}")
    if origin is list:
        return [build(inner[0], item, f"{key}.{i}") for i, item in enumerate(value)]
    return {
        build_key(inner[0], name, key): build(inner[1], item, f"{key}.{name}")
        for name, item in value.items()
    }


def build_key(kind: Any, name: str, key: str) -> Any:
    if kind is int and not name.isdecimal():
        raise BadValue(f"{key} has the key {name!r}, which is no number")
    return kind(name)


def build_leaf(kind: Any, value: Any, key: str) -> Any:
    if kind is float and value is None:
        return float("nan")  # a ratio of nothing
    if kind is float and type(value) in (int, float) and abs(value) <= LARGEST:
        return float(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value in [one.value for one in kind]:
            return kind(value)
        raise BadValue(f"{key}={value!r} is none of {[one.value for one in kind]}")
    if type(value) is kind:
        return value
    raise BadValue(f"{key}={reprlib.repr(value)} is no {kind.__name__}")
