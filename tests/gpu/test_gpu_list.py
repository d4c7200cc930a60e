"""The list of GPU checks: its order and its clock, and what it asks of a machine."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from gpu_list import LIMIT, MARK, NO_GPU, ORDER, GpuList, marks_any

ROOT = Path(__file__).resolve().parents[2]

# What a machine that is lent with a GPU lacks.
ABSENT = ("hydra", "omegaconf", "deepspeed", "datasets", "flash_attn", "wandb", "gguf")
BARE = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None  # importing it fails, looking for it finds nothing
import torch
torch.cuda.is_available = lambda: False
import pytest
sys.exit(pytest.main(["-m", "gpu", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider"]))
"""


ALONE = ("--import-mode=importlib", "-p", "no:cacheprovider", "-q")  # beside the outer run


@dataclass
class Watch:
    """A clock that a test moves, and what became of each check, in order."""

    now: float = 0.0
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = report.when == "call" or (report.when == "setup" and not report.passed)
        if told:
            self.seen.append((report.nodeid.split("::")[1], report.outcome))
            self.now += 100


CHECKS = """
import time
import pytest

@pytest.mark.gpu("figures", seconds=120)
def test_last(): pass

@pytest.mark.gpu("kernels", seconds=30)
def test_first(): pass

@pytest.mark.gpu("graphs", seconds=1)
def test_hangs(): time.sleep(5)

@pytest.mark.gpu("step", seconds=30)
def test_second(): pass

def test_other(): pass
"""


def outcomes(folder: Path, limit: float, present: bool = True, mark: str = "gpu") -> list:
    """Each check of ``CHECKS``, every one of which takes 100 s."""
    (folder / "test_checks.py").write_text(CHECKS)
    (folder / "test_broken.py").write_text("import no_such_module\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu:\n")
    watch = Watch()
    words = [str(folder), "-c", str(folder / "pytest.ini"), *ALONE]
    pytest.main([*words, "-m", "not slow", "-m", mark], [GpuList(present, limit, watch), watch])
    return watch.seen


def test_checks_run_in_the_lists_order_and_one_that_hangs_is_ended(tmp_path: Path):
    assert outcomes(tmp_path, limit=1000) == [
        ("test_first", "passed"),
        ("test_second", "passed"),
        ("test_hangs", "failed"),
        ("test_last", "passed"),
    ]


def test_nothing_is_started_that_may_end_too_late(tmp_path: Path, capsys):
    assert outcomes(tmp_path, limit=400) == [
        ("test_first", "passed"),
        ("test_second", "passed"),
        ("test_hangs", "failed"),
        ("test_last", "skipped"),  # 300 s are over, and it may take 120
    ]
    said = capsys.readouterr().out
    assert "3 run, 1 not run" in said
    assert "test_last: no time left: 300 of 400 s are over and it may take 120 s" in said


def test_without_a_gpu_none_counts_as_run(tmp_path: Path, capsys):
    found = outcomes(tmp_path, limit=1000, present=False)
    assert [outcome for _, outcome in found] == ["skipped"] * 4
    said = capsys.readouterr().out
    assert "0 run, 4 not run" in said and said.count(NO_GPU) == 4


def test_a_full_run_has_no_clock_and_imports_every_file(tmp_path: Path):
    """The file that cannot be imported is met, as it is not under -m gpu."""
    assert outcomes(tmp_path, limit=10, mark="gpu or not gpu") == []
    (tmp_path / "test_broken.py").write_text("")
    (tmp_path / "test_sound.py").write_text(CHECKS)
    watch = Watch()
    words = [str(tmp_path / "test_sound.py"), "-c", str(tmp_path / "pytest.ini"), *ALONE]
    pytest.main(words, [GpuList(True, 10, watch), watch])
    assert next(name for name, _ in watch.seen) == "test_other"
    assert [outcome for _, outcome in watch.seen].count("skipped") == 0


def test_only_test_files_are_read(tmp_path: Path):
    (tmp_path / "others.bin").write_bytes(b"\xa4")
    (tmp_path / "test_one.py").write_text(f"@{MARK}'unroll', seconds=1)\n")
    (tmp_path / "test_big5.py").write_bytes(b"# \xa4")  # joblib brings such a test
    assert not marks_any(tmp_path / "others.bin") and not marks_any(tmp_path / "test_big5.py")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "test_one.py").write_text(f"@{MARK}'unroll', seconds=1)\n")
    assert not marks_any(tmp_path / ".venv")
    assert marks_any(tmp_path / "test_one.py") and marks_any(tmp_path)


def test_the_list_is_collected_where_little_is_installed():
    """``pytest -m gpu`` as a user types it, in an environment like that of a lent GPU."""
    run = subprocess.run(
        [sys.executable, "-c", BARE],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # hydra brings a plugin
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    named = [line for line in run.stdout.splitlines() if line.startswith("not run")]
    assert f"0 run, {len(named)} not run" in run.stdout
    assert all(line.endswith(NO_GPU) for line in named)
    files = list(dict.fromkeys(line.split()[2].split("::")[0] for line in named))
    assert files == [  # in the order of the list
        "tests/models/test_attention.py",
        "tests/train/test_cuda.py",
        "tests/gpu/test_verifier.py",
        "tests/eval/test_steps.py",
        "tests/gpu/test_nccl.py",
        "tests/gpu/test_figures.py",
    ]
    assert len(named) <= 50


def test_every_part_has_checks_and_a_budget_that_fits():
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    texts = [text for text in texts if MARK in text and "CHECKS = " not in text]
    for part in ORDER:
        assert any(f'{MARK}"{part}", seconds=' in text for text in texts), part
    budgets = [
        int(rest.split("seconds=")[1].split(")")[0])
        for text in texts
        for rest in text.split(MARK)[1:]
    ]
    assert sum(budgets) <= LIMIT  # each kind of check once; its parameters take seconds
