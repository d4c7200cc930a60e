"""The list of checks that need a GPU: which, in what order, and for how long.

    python -m pytest -m gpu

A check is marked where it stands, ``@pytest.mark.gpu("step", seconds=20)``: the part of the list
it belongs to, and the seconds after which pytest-timeout ends it. Under ``-m gpu`` files without
such a mark are not imported, so that torch, transformers and pytest are enough for most of the
list; what needs more skips itself by name. Nothing is started that could end after ``LIMIT``.
"""

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest

# Cheap and fundamental first: what comes later means nothing where something before it is wrong.
ORDER = ("kernels", "step", "verifier", "graphs", "nccl", "figures")
LIMIT = 480.0  # seconds of the whole list
MARK = "pytest.mark.gpu("
NO_GPU = "needs a GPU, and torch finds no CUDA device"


class GpuList:
    """A plugin. ``present``: a GPU is here."""

    def __init__(
        self, present: bool, limit: float = LIMIT, clock: Callable[[], float] = perf_counter
    ):
        self.present, self.limit, self.clock = present, limit, clock
        self.begin = clock()

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """Pass by what marks nothing: its imports may be missing on a machine with a GPU."""
        return True if alone(config) and not marks_any(collection_path) else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("gpu")
            if mark is not None:
                item.add_marker(pytest.mark.timeout(mark.kwargs["seconds"]))
        items.sort(key=place_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            return
        if not self.present:
            pytest.skip(NO_GPU)
        spent = self.clock() - self.begin
        if alone(item.config) and spent + mark.kwargs["seconds"] > self.limit:
            pytest.skip(
                f"no time left: {spent:.0f} of {self.limit:.0f} s are over and it may take "
                f"{mark.kwargs['seconds']} s"
            )

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Say how much of the list was run, and name what was not, with the reason."""
        if not alone(config):
            return
        reports = terminalreporter.stats
        run = len(reports.get("passed", [])) + len(reports.get("failed", []))
        skipped = reports.get("skipped", [])
        terminalreporter.section("GPU checks")
        terminalreporter.line(f"{run} run, {len(skipped)} not run")
        for report in skipped:
            terminalreporter.line(f"not run  {report.nodeid}: {reason_of(report)}")


def alone(config: pytest.Config) -> bool:
    """The list alone was asked for; of several -m, pyproject's among them, the last one counts."""
    return config.getoption("markexpr") == "gpu"


def marks_any(path: Path) -> bool:
    """A test file, or a folder with one, that marks a check; environments (.venv) are passed by."""
    if path.name.startswith("."):
        return False
    files = path.rglob("test_*.py") if path.is_dir() else [path] if path.match("test_*.py") else []
    return any(MARK in file.read_text(errors="replace") for file in files)


def place_of(item: pytest.Item) -> int:
    """Its part's place in the list; other tests stay before it, in their order."""
    mark = item.get_closest_marker("gpu")
    return -1 if mark is None else ORDER.index(mark.args[0])


def reason_of(report: pytest.TestReport) -> str:
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")
