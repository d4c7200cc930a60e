"""Scratch folders: gone afterwards, also those of a killed process, never those of a live one."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from conf.runtime import ROOT
from conf.scratch import Scratch


def test_what_a_killed_process_left_is_removed_and_a_live_one_kept(tmp_path: Path):
    text = f"""
import os, signal
from pathlib import Path
from conf.scratch import Scratch
Scratch(Path({str(tmp_path)!r}), "layers").folder.joinpath("weights").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    command, place = [sys.executable, "-c", text], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=place, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    with closing(Scratch(tmp_path, "vllm")) as other, closing(Scratch(tmp_path, "layers")) as one:
        assert not dead.exists()
        with closing(Scratch(tmp_path, "layers")) as two:
            assert all(scratch.folder.is_dir() for scratch in (other, one, two))
    assert list(tmp_path.iterdir()) == []


def test_a_published_folder_stays(tmp_path: Path):
    with closing(Scratch(tmp_path, "made")) as scratch:
        (scratch.folder / "file").touch()
        scratch.publish(tmp_path / "made")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]
    with closing(Scratch(tmp_path, "made")) as second, pytest.raises(OSError, match="not empty"):
        second.publish(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
