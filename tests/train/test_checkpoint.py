"""Checkpoints: whole or not there, the newest one resumed, and only by the run that wrote it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import ConfigError, DraftAttentionKind, JobError, RunConfig
from models.draft_file import CONFIG
from train import checkpoint
from train.checkpoint import Checkpoints, TrainState
from train.loop import curve_fingerprint, refuse_lost_head

FRESH = TrainState(step=0, best_tau=-1.0, best_step=0, world_size=2, fingerprint="curve0")


class FakeEngine:
    """Writes one file, notes what it is asked to load, or fails the way it is told to."""

    def __init__(self, failure: Exception | None = None):
        self.failure = failure
        self.loaded: list[Path] = []

    def save(self, folder: Path) -> None:
        (folder / "weights").write_text("whole" if self.failure is None else "ha")
        if self.failure is not None:
            raise self.failure

    def load(self, folder: Path, world_size: int) -> None:
        assert world_size == FRESH.world_size
        assert (folder / "weights").read_text() == "whole"
        self.loaded.append(folder)


def save_all(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(FakeEngine(), replace(FRESH, step=step, best_tau=step / 10))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2, is_main=True)


def test_the_last_ones_are_kept(checkpoints: Checkpoints):
    save_all(checkpoints, 9, 10, 100, 110)
    assert names(checkpoints.folder) == ["step-00000100", "step-00000110"]
    assert [path.name for path in checkpoints.whole()] == names(checkpoints.folder)


def test_half_a_checkpoint_is_not_resumed(checkpoints: Checkpoints):
    save_all(checkpoints, 10)
    for name in ("step-00000020", ".writing-00000030"):
        (checkpoints.folder / name).mkdir()
        (checkpoints.folder / name / "weights").write_text("ha")
    engine = FakeEngine()
    assert checkpoints.resume(engine, FRESH).step == 10
    assert engine.loaded == [checkpoints.folder / "step-00000010"]
    assert not (checkpoints.folder / ".writing-00000030").exists()
    save_all(checkpoints, 20)  # takes the place of the half one
    assert checkpoints.resume(engine, FRESH) == replace(FRESH, step=20, best_tau=2.0)


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_checkpoint_is_set_aside(checkpoints: Checkpoints, harm: str, capsys):
    save_all(checkpoints, 10, 20)
    weights = checkpoints.at(20) / "weights"
    weights.write_text("who") if harm == "cut" else weights.unlink()
    engine = FakeEngine()
    assert checkpoints.resume(engine, FRESH).step == 10
    assert engine.loaded == [checkpoints.at(10)]
    (said,) = capsys.readouterr().out.splitlines()
    assert (
        f"weights has {3 if harm == 'cut' else 0} of 5 bytes" in said and "before is taken" in said
    )
    save_all(checkpoints, 15)  # it does not count among the kept ones
    assert [path.name for path in checkpoints.whole()] == ["step-00000010", "step-00000015"]
    assert (checkpoints.folder / ".damaged-step-00000020").is_dir()


def test_a_changed_byte_is_damage(checkpoints: Checkpoints, capsys):
    save_all(checkpoints, 10, 20)
    (checkpoints.at(20) / "weights").write_text("whale")
    engine = FakeEngine()
    assert checkpoints.resume(engine, FRESH).step == 10 and engine.loaded == [checkpoints.at(10)]
    (said,) = capsys.readouterr().out.splitlines()
    assert "weights is not as it was written" in said and "before is taken" in said


@pytest.mark.parametrize("content", ['{"state": {', "{}", '{"state": {"step": 1}, "files": {}}'])
def test_a_state_file_that_cannot_be_read_is_damage(checkpoints: Checkpoints, content, capsys):
    save_all(checkpoints, 10, 20)
    (checkpoints.at(20) / "state.json").write_text(content)
    assert checkpoints.resume(FakeEngine(), FRESH).step == 10
    (said,) = capsys.readouterr().out.splitlines()
    assert "state.json cannot be read" in said and "delete it when you like" in said


def test_with_no_sound_checkpoint_left_training_starts_anew(checkpoints: Checkpoints):
    save_all(checkpoints, 10)
    (checkpoints.at(10) / "weights").unlink()
    assert checkpoints.resume(FakeEngine(), FRESH) == FRESH


def test_unreported_sums_come_back_as_they_were(checkpoints: Checkpoints):
    state = replace(FRESH, step=5, pending=[[0.1 + 0.2, 1e-300], [3.0, 1 / 3]])
    checkpoints.save(FakeEngine(), state)
    assert checkpoints.resume(FakeEngine(), FRESH) == state


def test_without_a_checkpoint_training_starts_anew(checkpoints: Checkpoints):
    engine = FakeEngine()
    assert checkpoints.resume(engine, FRESH) == FRESH and engine.loaded == []


def test_another_run_is_refused(checkpoints: Checkpoints):
    save_all(checkpoints, 10)
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=r"step-00000010.*curve0.*curve1.*run\.name"):
        checkpoints.resume(engine, replace(FRESH, fingerprint="curve1"))
    assert engine.loaded == []


def test_another_number_of_ranks_goes_on_with_all_sums(checkpoints: Checkpoints, capsys):
    pending = [[0.5, 1.0], [0.25, 4.0]]
    checkpoints.save(FakeEngine(), replace(FRESH, step=10, pending=pending))
    state = checkpoints.resume(FakeEngine(), replace(FRESH, world_size=4))
    assert state == replace(FRESH, step=10, world_size=4, pending=[[0.75, 5.0]])
    assert "written by 2 ranks; this run has 4" in capsys.readouterr().out


def test_a_full_disk_is_named_and_the_one_before_stays(checkpoints: Checkpoints):
    save_all(checkpoints, 10)
    with pytest.raises(RuntimeError) as torch_said:
        torch.save(torch.zeros(100_000), "/dev/full")
    with pytest.raises(JobError, match=r"cannot be written; make room .*goes on"):
        checkpoints.save(FakeEngine(torch_said.value), replace(FRESH, step=20))
    assert names(checkpoints.folder) == ["step-00000010"]
    with pytest.raises(RuntimeError, match=r"^another trouble$"):
        checkpoints.save(FakeEngine(RuntimeError("another trouble")), replace(FRESH, step=20))
    assert checkpoints.resume(FakeEngine(), FRESH).step == 10


def test_only_the_first_rank_names_and_deletes(checkpoints: Checkpoints, monkeypatch):
    save_all(checkpoints, 10, 20)
    second = Checkpoints(checkpoints.folder, keep=1, is_main=False)
    (checkpoints.folder / ".writing-00000030").mkdir()
    second.save(FakeEngine(), replace(FRESH, step=30))
    assert names(second.folder) == [".writing-00000030", "step-00000010", "step-00000020"]
    monkeypatch.setattr(checkpoint, "broadcast_object", lambda _mine: checkpoints.at(20))
    assert second.resume(FakeEngine(), FRESH).step == 20
    assert (second.folder / ".writing-00000030" / "weights").exists()


def test_a_run_does_not_go_on_without_its_best_head(tmp_path: Path):
    best = tmp_path / "best"
    refuse_lost_head(best, FRESH)
    with pytest.raises(ConfigError, match=r"best: holds no head.*step 7.*delete"):
        refuse_lost_head(best, replace(FRESH, best_step=7))
    best.mkdir()
    (best / CONFIG).write_text("{}")
    refuse_lost_head(best, replace(FRESH, best_step=7))


def test_what_shapes_the_curve_is_in_its_fingerprint():
    cfg = RunConfig()
    known = curve_fingerprint(cfg, "states0")
    assert curve_fingerprint(cfg, "states1") != known
    assert curve_fingerprint(replace(cfg, run=replace(cfg.run, seed=1)), "states0") != known
    assert curve_fingerprint(replace(cfg, ttt=replace(cfg.ttt, depth=1)), "states0") != known
    for knob in ("packs_per_step", "micro_batch_tokens"):
        other = replace(cfg, optim=replace(cfg.optim, **{knob: 64}))
        assert curve_fingerprint(other, "states0") != known
    free = replace(cfg, log=replace(cfg.log, every=1, breakdown=3), run=replace(cfg.run, name="x"))
    assert curve_fingerprint(free, "states0") == known


def test_what_a_machine_dictates_does_not_shape_the_curve():
    """After an out-of-memory error a run goes on with recomputation; packs are what a step sees."""
    cfg = RunConfig()
    other = RunConfig()
    other.engine.attention = DraftAttentionKind.plain
    other.engine.compile = other.engine.recompute = True
    assert curve_fingerprint(other, "states0") == curve_fingerprint(cfg, "states0")
