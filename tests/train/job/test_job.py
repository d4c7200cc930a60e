"""The job as people start it: real processes, from conversations to an exported head."""

import json
import math
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from conf.compose import from_command_line, load_config
from conf.runtime import RankInfo
from conf.schema import ConfigError, JobError
from data.manifest import manifest_file, read_manifest, shard_folder, write_manifest
from data.prepare import find_prepared
from data.shard_file import contents_of, describe
from data.shards import BY_TOKEN, ROWS, digest_of, raw
from train import stages
from train.stages import Stamps, train_on


@pytest.fixture(scope="module")
def killed(place, finished: Path) -> tuple[int, str]:
    """Runs ``killed`` and ``poisoned``, both as a kill in the middle of training leaves them.

    Before the kill the job is stopped, and a second one is started on its folder; what comes
    back is that one's exit code and its words.
    """
    run, words = place.run("killed"), place.words("killed", "stages=[train]")
    with place.start(words) as process:
        while not list(run.glob("checkpoints/step-*/state.json")):
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        with place.start(words) as second:
            said = second.communicate()[1]
        process.kill()
    assert not (run / "stages.json").exists(), "training was over before the kill"
    shutil.copytree(run, place.run("poisoned"))
    return second.returncode, said


def test_the_whole_job_leaves_all_its_files(place, finished: Path):
    expected = (
        "config.yaml provenance.json metrics.jsonl train.log best/draft.safetensors "
        "best/draft.json best/tokens.json best/acceptance.json eval/report.json eval/report.md "
        "eval/report.html eval/acceptance.png eval/speed.png eval/time_split.png "
        "eval/training.png export/vllm/config.json export/vllm/model.safetensors "
        "export/vllm/README.md"
    )
    assert not [name for name in expected.split() if not (finished / name).is_file()]
    kept = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (place.STEPS - place.SAVE_EVERY, place.STEPS)]
    rows = place.lines("whole")
    assert rows[-1]["step"] == place.STEPS and "held_out" in rows[-1]
    curve = [row["loss"] for row in rows if "loss" in row]
    assert curve[-1] < curve[0]
    assert list(finished.glob("wandb/offline-run-*"))
    assert not [p.name for p in place.folder.iterdir() if p.name in ("wandb", "outputs", "hydra")]
    assert "best held-out tau" in (finished / "train.log").read_text()


def test_the_best_head_is_the_one_of_the_highest_held_out_tau(place, finished: Path):
    """User report B29: neither the last one nor that of the lowest loss."""
    rows = place.lines("whole")
    taus = {row["step"]: row["held_out"]["tau"] for row in rows if "held_out" in row}
    assert len(taus) == place.STEPS // 4 and len(set(taus.values())) > 1
    kept = json.loads((finished / "best" / "acceptance.json").read_text())
    assert kept["tau"] == pytest.approx(max(taus.values()))
    best = max(taus, key=lambda step: taus[step])
    said = (finished / "train.log").read_text()
    assert f"best held-out tau {taus[best]:.3f} at step {best}: " in said


def test_a_budget_of_flops_is_said_and_kept_beside_the_figures(place, finished: Path):
    """optim.max_steps ends it long before 1e12 FLOPs are spent."""
    spent = {row["step"]: row["flops"] for row in place.lines("whole") if "loss" in row}
    a_step = spent[place.STEPS] / place.STEPS
    assert spent == {step: pytest.approx(step * a_step) for step in spent}
    said = (finished / "train.log").read_text()
    assert f"the {place.STEPS} steps spend {spent[place.STEPS]:.4g}" in said
    took = json.loads((finished / "training.json").read_text())
    assert took["flops"] == pytest.approx(spent[place.STEPS])
    assert took["steps"] == took["timed"] == place.STEPS and took["seconds"] > 0
    assert f"training {took['trained']:,} parameters" in said


def test_a_checkpoint_holds_the_draft_and_its_optimizer_alone(place, finished: Path):
    folder = finished / "checkpoints" / f"step-{place.STEPS:08d}"
    with safe_open(finished / "best" / "draft.safetensors", "pt") as file:
        draft = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    frozen = math.prod(draft.pop("embed_tokens.weight"))
    (model,) = folder.glob("engine/*model_states.pt")
    held = torch.load(model)["module"]
    assert {name.removeprefix("test.draft.") for name in held} == set(draft)  # d2t, t2d: the map
    trained = sum(math.prod(shape) for name, shape in draft.items() if name not in ("d2t", "t2d"))
    said = (finished / "train.log").read_text()
    assert f"training {trained:,} parameters ({frozen:,} frozen)" in said
    # bf16 weights; fp32 masters and two moments; the map.
    due = trained * (2 + 3 * 4) + 8 * draft["d2t"][0] + draft["t2d"][0]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert due < size < 1.2 * due
    state = json.loads((folder / "state.json").read_text())
    assert state["state"]["step"] == place.STEPS  # data order and schedule follow from it
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(state["files"]) == names - {"state.json"}
    assert all(name.endswith("_states.pt") for name in state["files"])


def test_training_leaves_the_verifier_as_it_was(place, finished: Path):
    assert place.digests(place.verifier) == place.verifier_files


def test_the_same_call_again_skips_every_stage(place, finished: Path):
    before = place.digests(*(finished / name for name in ("best", "checkpoints", "eval", "export")))
    out, _ = place.finish(place.words("whole", "log.wandb=true"))
    said = out.splitlines()
    for stage, word in (("prepare", "nothing to do"), ("capture", "already in")):
        assert any(line.startswith(stage) and word in line for line in said), out
    for stage in ("train", "eval", "export"):
        assert any(line.startswith(stage) and line.endswith("skipped") for line in said), out
    folders = (finished / name for name in ("best", "checkpoints", "eval", "export"))
    assert place.digests(*folders) == before


def test_a_head_for_the_whole_vocabulary(place, finished: Path):
    stages = "stages=[prepare,capture,train,export]"
    few = ["optim.max_steps=4", "log.valid_every=4", "log.save_every=4"]
    out, _ = place.finish(place.words("full", stages, "draft.vocab_size=full", *few))
    assert "draft vocabulary: 128 of 128 tokens, 100.0% of the training labels" in out
    with safe_open(place.run("full") / "best" / "draft.safetensors", "pt") as file:
        assert file.get_slice("lm_head.weight").get_shape()[0] == 128
        assert file.get_tensor("t2d").all() and not file.get_tensor("d2t").any()
    exported = place.run("full") / "export" / "vllm"
    config = json.loads((exported / "config.json").read_text())
    assert config["draft_vocab_size"] == config["vocab_size"] == 128
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert not {"d2t", "t2d"} & set(file.keys())  # vLLM refuses a map of equal sizes
    with safe_open(finished / "export" / "vllm" / "model.safetensors", "pt") as file:
        assert {"d2t", "t2d"} <= set(file.keys())


def test_a_stage_whose_output_is_gone_is_not_skipped(tmp_path: Path):
    done = Stamps(tmp_path)
    (tmp_path / "eval").mkdir()
    done.add("eval", "mark", RankInfo(0, 1, 0))
    done.add("train", "other", RankInfo(1, 2, 1))  # only rank 0 writes
    assert done.has("eval", "mark", tmp_path / "eval") and not done.has("train", "other")
    assert not done.has("eval", "another", tmp_path / "eval")
    assert not done.has("eval", "mark", tmp_path / "eval", tmp_path / "best")


def test_other_settings_in_the_same_folder_are_refused(place, finished: Path):
    before = place.digests(finished / "best") | place.digests(finished / "checkpoints")
    saved = (finished / "config.yaml").read_text()
    _, said = place.finish(place.words("whole", "optim.lr=0.5"), code=2)
    assert said.count("\n") == 1
    assert "optim.lr=0.5" in said and "optim.lr=0.001" in said and "run.name" in said
    assert place.digests(finished / "best") | place.digests(finished / "checkpoints") == before
    assert (finished / "config.yaml").read_text() == saved


def test_a_running_job_keeps_its_folder(killed: tuple[int, str]):
    code, said = killed
    assert code == 2 and said.count("\n") == 1
    assert "run.name=killed" in said and "another process" in said


def test_a_killed_job_goes_on_as_if_nothing_had_happened(
    place, finished: Path, killed: tuple[int, str]
):
    run = place.run("killed")
    torn = run / "checkpoints" / f"step-{place.STEPS:08d}"  # no state.json: not whole
    leftover = run / "checkpoints" / f".writing-{place.STEPS - 1:08d}"
    for folder in (torn, leftover):
        (folder / "engine").mkdir(parents=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    out, _ = place.finish(place.words("killed", "stages=[train]"))
    assert "resumed at step" in out
    place.assert_same_training("killed", "whole")
    took = json.loads((run / "training.json").read_text())  # of all steps; timed were the later
    assert took["steps"] == place.STEPS and 0 < took["timed"] < place.STEPS
    assert not leftover.exists() and (torn / "state.json").is_file()


def test_a_loss_that_is_not_finite_ends_the_job(place, killed: tuple[int, str]):
    shutil.copytree(place.folder / "cache", place.folder / "poisoned_cache")
    (cached,) = place.folder.glob("poisoned_cache/capture-*")
    poison(cached)
    run = place.run("poisoned")
    before = place.digests(run / "best", run / "checkpoints")
    words = place.words("poisoned", "stages=[train]", cache="poisoned_cache")
    _, said = place.finish(words, code=1)
    assert "Traceback" not in said
    sentence = said.splitlines()[-1]
    assert sentence.startswith("optim.lr=0.001: training diverged"), said
    assert "run.name" in sentence and "step" in sentence
    assert place.digests(run / "best", run / "checkpoints") == before


def poison(cached: Path) -> None:
    """Make the aux states NaN, under digests that fit: such a capture would have gone wrong."""
    manifest = read_manifest(cached)
    for entry in manifest.shards:
        path = shard_folder(cached) / entry.name
        with safe_open(path, "pt") as file:
            about = file.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        tensors["aux"].fill_(math.nan)
        for place in range(entry.samples):
            rows = []
            for name in ROWS:
                offsets = tensors["offsets" if name in BY_TOKEN else "last_offsets"]
                if name in tensors:
                    rows.append(tensors[name][offsets[place] : offsets[place + 1]])
            tensors["digests"][place] = digest_of([raw(part) for part in rows])
        path.write_bytes(b"".join(contents_of(tensors, about)))
    entries = [describe(cached, entry.name) for entry in manifest.shards]
    write_manifest(cached, replace(manifest, shards=entries))


def test_states_of_another_verifier_are_refused(place, finished: Path, tmp_path: Path):
    cfg = load_config(place.words("whole"))
    (cached,) = place.folder.glob("cache/capture-*")
    shutil.copytree(cached, tmp_path / "cached")
    manifest = manifest_file(tmp_path / "cached")
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**entries, "verifier": "0123456789abcdef"}))
    with pytest.raises(ConfigError) as caught:
        train_on(cfg, find_prepared(cfg), tmp_path / "cached", RankInfo(0, 1, 0))
    assert "0123456789abcdef" in str(caught.value) and entries["verifier"] in str(caught.value)


def test_data_that_the_verifier_does_not_agree_with_stop_the_job(
    place, finished: Path, monkeypatch, capsys
):
    words = ["stages=[prepare,capture,train]", "capture.min_agreement=0.99"]
    cfg = load_config(place.words("foreign", *words))
    monkeypatch.setattr(stages, "fit", lambda *_: pytest.fail("it trained"))
    with pytest.raises(JobError, match=r"^capture\.min_agreement=0\.99: .* data\.preview"):
        stages.run_in(place.run("foreign"), cfg, RankInfo(0, 1, 0))
    assert capsys.readouterr().out.count("top choice agrees with") == 1


def test_a_sweep_inside_a_job_is_refused(place):
    _, said = place.finish(["-m", "ttt.depth=1,3"], ranks=1, code=1)  # torchrun's own code
    assert "use python -m launch.sweep" in said.splitlines()[0]
    with pytest.raises(ConfigError, match=r"^sweep=ttt_depth: .*launch\.sweep sweep=ttt_depth"):
        from_command_line(["sweep=ttt_depth", "stages=[train]"])


@pytest.mark.slow
def test_two_ranks_train_the_same_curve_as_one(place, finished: Path):
    exact = ["stages=[train]", "engine.precision=float32"]
    place.finish(place.words("alone", *exact))
    place.finish(place.words("pair", *exact), ranks=2)
    alone, pair = place.lines("alone"), place.lines("pair")
    for one, two in zip(alone, pair, strict=True):
        assert one["step"] == two["step"]
        if "loss" in one:
            assert two["loss_by_depth"] == pytest.approx(one["loss_by_depth"], rel=1e-5, abs=1e-7)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
