"""Sweeps: what each point runs, what is refused, and the table that is left behind."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.schema import ConfigError
from eval.report import jsonable
from launch import sweep, sweep_points
from launch.sweep import make_plan
from launch.sweep_points import SweepPoint, point_name, read_held_out, torchrun
from launch.sweep_table import SweepResult, write_results

ROOT = Path(__file__).resolve().parents[2]


def overrides(tmp_path: Path, *more: str) -> list[str]:
    data = tmp_path / "answers.jsonl"
    data.write_text('{"id": "a", "conversations": []}\n')
    return ["sweep=ttt_depth", f"data.path={data}", f"run.root={tmp_path}/runs", *more]


def acceptance(depth: int) -> dict[str, Any]:
    alpha = [0.5 + 0.05 * depth, 0.4, math.nan]
    return {
        "tau": 1.5 + 0.1 * depth,
        "alpha_by_depth": alpha,
        "survival_by_depth": [0.5, 0.2, 0.0],
        "counters": {"rounds": 40, "accepted_by_depth": [20, 8, 0]},
    }


class FakeTorchrun:
    """Stands for the inner training: notes the command, writes what training writes."""

    def __init__(self, root: Path, fails: int | None = None, breaks: int | None = None):
        self.root, self.fails, self.breaks = root, fails, breaks
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        words = dict(word.split("=", 1) for word in command if "=" in word)
        if "ttt.depth" not in words:
            return 0
        depth = int(words["ttt.depth"])
        if depth == self.fails:
            return 3
        if depth != self.breaks:
            best = self.root / words["run.name"] / "best"
            best.mkdir(parents=True, exist_ok=True)
            (best / "acceptance.json").write_text(json.dumps(acceptance(depth)))
        return 0


def run_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeTorchrun, *more: str):
    monkeypatch.setattr(sweep_points, "run", fake)
    return sweep.main(["--nproc-per-node", "2", *overrides(tmp_path, *more)])


def test_every_point_is_one_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake = FakeTorchrun(tmp_path / "runs")
    assert run_sweep(monkeypatch, tmp_path, fake, "optim.lr=0.003") == 0
    shared, *points = fake.commands
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command in fake.commands:
        assert command[:5] == head and Path(command[5]) == ROOT / "train" / "main.py"
        assert "optim.lr=0.003" in command
        assert not any(word.startswith(("sweep=", "hydra")) for word in command)
    assert "stages=[prepare,capture]" in shared and "run.name=ttt_depth/shared" in shared
    depths = [word for command in points for word in command if word.startswith("ttt.depth=")]
    assert depths == [f"ttt.depth={k}" for k in (1, 3, 5, 7)]
    for command, depth in zip(points, (1, 3, 5, 7), strict=True):
        assert "stages=[prepare,capture,train]" in command
        assert "eval.valid_depth=7" in command
        assert f"run.name=ttt_depth/depth-{depth}" in command


def test_table_plot_and_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    assert run_sweep(monkeypatch, tmp_path, FakeTorchrun(tmp_path / "runs"), "run.name=mine") == 0
    folder = tmp_path / "runs" / "mine"
    found = json.loads((folder / "sweep.json").read_text())
    assert [point["name"] for point in found["points"]] == [f"depth-{k}" for k in (1, 3, 5, 7)]
    assert found["points"][1]["held_out"]["tau"] == pytest.approx(1.8)
    assert found["points"][1]["held_out"]["alpha_by_depth"] == [0.65, 0.4, None]
    assert found["swept"] == ["ttt.depth"]
    assert (folder / "depth_sweep.png").read_bytes().startswith(b"\x89PNG")
    page, screen = (folder / "sweep.md").read_text(), capsys.readouterr().out
    for text in (page, screen):
        for figure in ("depth-7", "2.200", "0.850", "n/a", "40"):
            assert figure in text
    assert "(depth_sweep.png)" in page and str(folder / "sweep.md") in screen


def test_a_failed_point_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    fake = FakeTorchrun(tmp_path / "runs", fails=3, breaks=5)
    assert run_sweep(monkeypatch, tmp_path, fake) == 1
    assert len(fake.commands) == 5
    page = (tmp_path / "runs" / "ttt_depth" / "sweep.md").read_text()
    assert "depth-3: exit code 3; see" in page and "depth-5: " in page
    assert "no held-out acceptance" in page and "2.200" in page
    assert "depth-3 failed: exit code 3" in capsys.readouterr().out


def test_no_point_starts_without_the_shared_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    commands: list[list[str]] = []
    monkeypatch.setattr(sweep_points, "run", lambda command: commands.append(command) or 1)
    assert sweep.main(overrides(tmp_path)) == 1
    assert len(commands) == 1


def test_the_command_line_may_sweep_something_else(tmp_path: Path):
    words = overrides(
        tmp_path, "ttt.depth=2", "loss=kl,lk", "optim.lr=0.001,0.002", "hydra.verbose=true"
    )
    plan = make_plan(words, 1)
    assert plan.swept == ["loss", "optim.lr"]
    assert "ttt.depth=2" in plan.fixed and "eval.valid_depth=7" in plan.fixed
    assert (
        point_name(["loss=lk", "optim.lr=0.001", "data.path=[a/b]"]) == "loss-lk_lr-0.001_path-a-b"
    )
    assert torchrun(plan, ["a=1"])[-1] == "a=1"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "sweep=null: choose one of .*ttt_depth.*python -m launch.sweep sweep="),
        (["sweep=nothing"], "sweep=nothing.*ttt_depth"),
        (["sweep=ttt_depth", "ttt.depth=3"], "every knob has one value"),
        (["sweep=ttt_depth", "ttt.dept=3"], "ttt.dept"),
        (["sweep=ttt_depth", "optim.lr=0"], "optim.lr=0"),
        (["sweep=ttt_depth", "stages=[train]"], "conf/sweep/ttt_depth.yaml names the stages"),
        (["sweep=ttt_depth", "run.name=a,b"], "run.name: names the sweep's folder"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence) as error:
        make_plan([*overrides(tmp_path)[1:], *words], 1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("count", ["0", "-2", "two"])
def test_no_ranks_is_one_sentence(count: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        sweep.main([f"--nproc-per-node={count}", "sweep=ttt_depth"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "--nproc-per-node" in error and count in error and error.count("\n") == 1


def test_no_sweep_given_ends_with_exit_code_2():
    command = [sys.executable, "-m", "launch.sweep"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sweep=null: choose one of") and done.stderr.count("\n") == 1


def test_null_of_a_point_stays_null(tmp_path: Path):
    """No held-out answer had a round: there is no ratio, and the point has not failed."""
    (tmp_path / "best").mkdir()
    nothing = {"tau": None, "alpha_by_depth": [None], "survival_by_depth": [None], "counters": {}}
    (tmp_path / "best" / "acceptance.json").write_text(json.dumps(nothing))
    found = read_held_out(tmp_path)
    assert jsonable(found) == nothing
    point = SweepPoint("depth-1", ["ttt.depth=1"], str(tmp_path), 60.0, None, found)
    write_results(tmp_path, SweepResult("s", [], ["ttt.depth"], [point]))
    assert json.loads((tmp_path / "sweep.json").read_text())["points"][0]["held_out"] == nothing
    assert "| n/a" in (tmp_path / "sweep.md").read_text()


def test_acceptance_of_another_shape_is_named(tmp_path: Path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "acceptance.json").write_text('{"tau": 1.0}')
    with pytest.raises(ValueError, match="no held-out acceptance"):
        read_held_out(tmp_path)


def test_points_through_submitit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its local executor starts a process a point; the training there is a stand-in."""
    monkeypatch.setattr(sweep_points, "run", lambda _command: 0)  # the shared cache
    here = os.getpid()

    def train_elsewhere(plan: sweep_points.SweepPlan, swept: list[str]) -> SweepPoint:
        other = "" if os.getpid() != here else "ran in the sweep's own process"
        return SweepPoint(point_name(swept), swept, str(plan.folder), 0.0, other or None, None)

    monkeypatch.setattr(sweep_points, "train", train_elsewhere)
    words = overrides(tmp_path, "hydra/launcher=submitit_local", "ttt.depth=1,3")
    points = sweep.launch(make_plan(words, 1))
    assert [point.overrides for point in points] == [["ttt.depth=1"], ["ttt.depth=3"]]
    assert not any(point.failure for point in points)


def test_a_launcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sweep, "is_plugin", lambda _name: False)
    with pytest.raises(ConfigError) as refusal:
        make_plan(overrides(tmp_path, "hydra/launcher=submitit_slurm"), 1)
    assert "'.[sweep]'" in str(refusal.value) and "\n" not in str(refusal.value)
