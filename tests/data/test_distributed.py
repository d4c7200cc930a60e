"""Processes together: two real ones over gloo, and one alone without torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.runtime import RankInfo
from conf.schema import ConfigError, Device
from data import distributed

ROOT = Path(__file__).resolve().parents[2]
TWO_RANKS = """
import torch
from conf.runtime import RankInfo
from data import distributed as d

ranks = RankInfo.from_env()
d.setup(torch.device("cpu"))
d.setup(torch.device("cpu"))
total = d.sum_over_ranks(torch.tensor([1.0 + ranks.rank, 10.0]))
assert total.tolist() == [3.0, 20.0], total
assert d.broadcast_object({"from": ranks.rank}) == {"from": 0}
assert d.gather_objects(ranks.rank * 7) == [0, 7]
d.barrier()
d.shutdown()
print("rank", ranks.rank, "done", flush=True)
"""


def test_two_ranks_over_gloo(tmp_path: Path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2  # two ranks share the pipe, and may split a line


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what setup writes is undone, too
        monkeypatch.delenv(name)
    yield
    distributed.shutdown()


def test_one_process_needs_no_torchrun(no_torchrun):
    for _ in range(2):  # leaving and joining again works
        distributed.setup(torch.device("cpu"))
        assert RankInfo.from_env() == RankInfo(0, 1, 0)
        assert int(os.environ["MASTER_PORT"]) > 0
        assert distributed.sum_over_ranks(torch.tensor(3)).item() == 3
        assert distributed.broadcast_object([1]) == [1]
        assert distributed.gather_objects("a") == ["a"]
        distributed.barrier()
        distributed.shutdown()


def test_without_a_group_everything_is_local(no_torchrun):
    assert distributed.sum_over_ranks(torch.tensor(3)).item() == 3
    assert distributed.broadcast_object("a") == "a"
    assert distributed.gather_objects("a") == ["a"]
    distributed.barrier()
    distributed.shutdown()


def test_devices(monkeypatch: pytest.MonkeyPatch):
    assert distributed.pick_device(Device.cpu, 0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.pick_device(Device.auto, 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"run\.device=cuda"):
        distributed.pick_device(Device.cuda, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.pick_device(Device.auto, 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="nproc-per-node"):
        distributed.pick_device(Device.auto, 2)


def test_threads_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    """Ranks of one machine share the cores that the process may use, not those it has."""
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    distributed.use_threads(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    distributed.use_threads(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    distributed.use_threads(None)
    distributed.use_threads(3)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_SIZE", "3")  # DeepSpeed's launcher
    distributed.use_threads(None)
    assert set_to == [6, 1, 1, 3, 2]
