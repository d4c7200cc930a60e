"""Capture on a tiny verifier: right states, refused when wrong, nothing lost when interrupted."""

import errno
import fcntl
import json
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.compose import entry
from conf.runtime import RankInfo
from conf.schema import (
    CaptureSection,
    ConfigError,
    Device,
    JobError,
    Precision,
    RunConfig,
    StateDtype,
    VerifierSection,
)
from data import capture_job
from data import states as states_module
from data.capture import capture, finish, main
from data.manifest import read_manifest, shard_folder
from data.reader import ShardReader
from data.records import PreparedData
from data.shard_file import describe
from data.states import batches
from models.verifier import Verifier, VerifierStates, weights_fingerprint

ROOT = Path(__file__).resolve().parents[2]
ALONE = RankInfo(0, 1, 0)


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    """Everything in float32: batch shapes then change the last bits only."""
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


def elsewhere(cfg: RunConfig, tmp_path: Path, name: str) -> RunConfig:
    return replace(cfg, run=replace(cfg.run, cache=str(tmp_path / name)))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(shard_folder(folder).iterdir())}


def assert_whole(folder: Path) -> None:
    """Every shard is what the manifest says, checksum included."""
    for shard in read_manifest(folder).shards:
        assert describe(folder, shard.name) == shard


def run_script(text: str, cfg: RunConfig, prepared: PreparedData, tmp_path: Path) -> list[str]:
    """Write a script that finds ``cfg`` and ``prepared`` -> the arguments that start it."""
    payload, script = tmp_path / "job.pickle", tmp_path / "job.py"
    payload.write_bytes(pickle.dumps((cfg, prepared)))
    head = f"import pickle\ncfg, prepared = pickle.load(open({str(payload)!r}, 'rb'))\n"
    script.write_text(head + text)
    return [str(script)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


# ---- the states are right -------------------------------------------------------------------


def test_states_equal_the_library(cfg: RunConfig, prepared: PreparedData, tiny_verifier: Path):
    reader = ShardReader(capture(cfg, prepared, ALONE))
    manifest = reader.manifest
    assert manifest.verifier == weights_fingerprint(tiny_verifier)
    assert manifest.aux_layers == [2, 4, 5] and manifest.dtype == "float32"
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    for index in range(len(reader)):
        cached = reader.read(index)
        ids = prepared.samples[index].input_ids
        assert torch.equal(cached.sample.input_ids, ids)
        with torch.no_grad():
            output = model(ids[None], output_hidden_states=True)
        streams = torch.cat([output.hidden_states[n][0] for n in (2, 4, 5)], -1)
        torch.testing.assert_close(cached.aux, streams, atol=1e-5, rtol=1e-5)
        asks = prepared.samples[index].loss_mask.roll(-1)
        asks[-1] = False
        last, logits = output.hidden_states[8][0][asks], output.logits[0][asks]
        torch.testing.assert_close(cached.last, last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cached.lse, logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
        assert torch.equal(cached.argmax, logits.argmax(-1))


def test_batches_of_one_and_of_four_give_the_same_cache(cfg, prepared, tmp_path: Path):
    """Report B53: a sample's states are its own, whatever ran beside it; its ids lie with them."""
    one = elsewhere(cfg, tmp_path, "one")
    one.capture = replace(cfg.capture, batch_tokens=1)
    four = elsewhere(cfg, tmp_path, "four")
    four.capture = replace(cfg.capture, batch_tokens=4 * 64)
    left = ShardReader(capture(one, prepared, ALONE))
    right = ShardReader(capture(four, prepared, ALONE))
    for index in range(len(left)):
        a, b = left.read(index), right.read(index)
        torch.testing.assert_close(a.aux, b.aux, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.last, b.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-5, rtol=1e-5)
        assert torch.equal(a.argmax, b.argmax)
        assert torch.equal(b.sample.input_ids, prepared.samples[index].input_ids)
    assert [len(batch) for batch in batches([60, 60, 60, 60], 4 * 64)] == [4]  # they were mixed


def test_head_figures_are_those_of_the_whole_logits(tiny_verifier: Path, monkeypatch):
    """By blocks of rows and of ids against argmax and logsumexp; equals give the first."""
    monkeypatch.setattr(states_module, "HEAD_ROWS", 20)
    monkeypatch.setattr(states_module, "EXACT_ROWS", 7)
    section = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    verifier = Verifier.load(section, tiny_verifier, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for block in (1, 3, 128, 256):
        monkeypatch.setattr(states_module, "BLOCK", block)
        last = torch.randn(50, 64, generator=generator)
        argmax, lse = states_module.head_figures(verifier, last)
        logits = verifier.logits_from(last)
        assert torch.equal(argmax, logits.argmax(-1))
        torch.testing.assert_close(lse, logits.logsumexp(-1))
        equals = torch.randint(3, (40, 10), generator=generator).float()
        found, largest = states_module.first_largest(equals)
        assert torch.equal(found, equals.argmax(-1)) and torch.equal(largest, equals.amax(-1))
    assert [len(part) for part in states_module.head_figures(verifier, last[:0])] == [0, 0]


def test_batches_hold_every_sample_once_within_the_limit():
    lengths = [5, 60, 7, 7, 30, 2, 90, 11]
    for limit in (1, 64, 128, 1000):
        found = list(batches(lengths, limit))
        assert sorted(place for batch in found for place in batch) == list(range(8))
        for batch in found:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit
    assert list(batches(lengths, 1000)) == [[6, 1, 4, 7, 2, 3, 0, 5]]


def test_bfloat16_storage_rounds_once(cfg: RunConfig, prepared: PreparedData, tmp_path: Path):
    exact = ShardReader(capture(cfg, prepared, ALONE))
    coarse = elsewhere(cfg, tmp_path, "coarse")
    coarse.capture = replace(cfg.capture, dtype=StateDtype.bfloat16)
    rounded = ShardReader(capture(coarse, prepared, ALONE))
    assert rounded.folder.name != exact.folder.name
    for index in range(len(exact)):
        a, b = exact.read(index), rounded.read(index)
        assert torch.equal(a.aux.bfloat16(), b.aux) and torch.equal(a.last.bfloat16(), b.last)
        assert torch.equal(a.argmax, b.argmax) and torch.equal(a.lse, b.lse)


def test_agreement_is_high_for_the_verifiers_own_text(
    cfg: RunConfig, prepared: PreparedData, flatten, tiny_verifier: Path, capsys
):
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    samples = []
    for sample in prepared.samples[:6]:
        start = sample.input_ids[:5][None]
        text = model.generate(start, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        mask = torch.arange(len(text)) >= 5
        samples.append(replace(sample, input_ids=text, loss_mask=mask))
    capture(cfg, replace(prepared, samples=flatten(samples)), ALONE)
    assert "top choice agrees with 100.0% of them" in capsys.readouterr().out


# ---- wrong states are refused ---------------------------------------------------------------


def one_layer_off(part: str) -> Callable[..., VerifierStates]:
    """What an engine gives that counts layers from another end."""

    def states(self: Verifier, input_ids: Tensor, cache: None = None) -> VerifierStates:
        streams = self.model(input_ids, output_hidden_states=True).hidden_states
        shift = int(part == "aux")
        aux = torch.cat([streams[n + shift] for n in self.facts.aux_layers], -1)
        return VerifierStates(aux, streams[-2] if part == "last" else streams[-1])

    return states


@pytest.mark.parametrize(
    ("part", "message"),
    [("last", r"capture\.tolerance=0\.02: .* away"), ("aux", r"stream 2 .* hidden_states\[2\]")],
)
def test_states_that_are_one_layer_off_are_refused(
    part: str, message: str, cfg: RunConfig, prepared: PreparedData, monkeypatch
):
    monkeypatch.setattr(Verifier, "states", one_layer_off(part))
    with pytest.raises(JobError, match=message):
        capture(cfg, prepared, ALONE)
    (folder,) = Path(cfg.run.cache).glob("capture-*")
    assert list(shard_folder(folder).iterdir()) == []


def test_the_control_itself_passes_when_nothing_is_off(cfg, prepared, monkeypatch):
    monkeypatch.setattr(Verifier, "states", one_layer_off("nothing"))
    capture(cfg, prepared, ALONE)


def test_an_unnormed_last_state_is_refused(cfg: RunConfig, prepared: PreparedData, monkeypatch):
    """Before the final norm the direction is nearly right: only the scale is not."""
    right = Verifier.states

    def unnormed(self: Verifier, input_ids: Tensor, cache: None = None) -> VerifierStates:
        states = right(self, input_ids, cache)
        return VerifierStates(states.aux, states.last * 1.1)

    monkeypatch.setattr(Verifier, "states", unnormed)
    with pytest.raises(JobError, match="after the final norm"):
        capture(cfg, prepared, ALONE)


def test_logits_that_are_not_finite_are_refused(cfg, prepared, monkeypatch):
    right = Verifier.logits_from
    monkeypatch.setattr("data.state_check.check_last", lambda *_: None)
    monkeypatch.setattr(Verifier, "logits_from", lambda self, last: right(self, last) / 0)
    with pytest.raises(JobError, match=r"sample-\d+ are not finite"):
        capture(cfg, prepared, ALONE)


# ---- fingerprint, skipping, room ------------------------------------------------------------


def test_a_complete_cache_is_not_made_again(cfg, prepared, monkeypatch, capsys):
    folder = capture(cfg, prepared, ALONE)
    monkeypatch.setattr(Verifier, "load", None)  # would fail if it were called
    for section, value in (("ttt", 3), ("optim", 5)):
        setattr(getattr(cfg, section), "depth" if section == "ttt" else "packs_per_step", value)
    cfg.capture.shard_mib = 7
    cfg.capture.batch_tokens = 999
    cfg.draft.vocab_size = 17
    assert capture(cfg, prepared, ALONE) == folder
    assert f"already in {folder}" in capsys.readouterr().out


def test_what_decides_the_states_decides_the_folder(cfg: RunConfig, prepared: PreparedData):
    def name(cfg: RunConfig, prepared: PreparedData) -> str:
        facts = capture_job.load_facts(cfg.verifier, Path(cfg.run.cache))
        return capture_job.manifest_of(cfg, prepared, facts).fingerprint

    names = {name(cfg, prepared), name(cfg, replace(prepared, fingerprint="other"))}
    for section in (
        replace(cfg.verifier, dtype=Precision.bfloat16),
        replace(cfg.verifier, aux_layers=[1, 2, 3]),
    ):
        names.add(name(replace(cfg, verifier=section), prepared))
    half = replace(cfg, capture=replace(cfg.capture, dtype=StateDtype.bfloat16))
    assert len(names | {name(half, prepared)}) == 5


def test_too_small_a_disk_is_refused_before_anything_is_written(
    cfg: RunConfig, prepared: PreparedData, monkeypatch
):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(ConfigError, match=r"run\.cache=.*need .* GB and 0\.001 GB are free"):
        capture(cfg, prepared, ALONE)
    assert not Path(cfg.run.cache).exists()


def test_the_estimate_is_what_is_written(cfg: RunConfig, prepared: PreparedData):
    """Report B58: the estimate is printed before anything is written, and right."""
    folder = capture(cfg, prepared, ALONE)
    rows = sum(len(sample.input_ids) for sample in prepared.samples)
    asking = sum(int(sample.loss_mask[1:].sum()) for sample in prepared.samples)
    states = rows * (3 * 64 * 4 + 5) + asking * (64 * 4 + 8) + len(prepared.samples) * 34
    written = sum(map(len, bytes_of(folder).values()))
    shards = len(read_manifest(folder).shards)
    assert states < written < states + shards * 2000  # headers, and eight bytes a shard


def test_two_captures_into_one_folder_are_refused(cfg: RunConfig, prepared: PreparedData):
    folder = capture(cfg, prepared, ALONE)
    (folder / "manifest.json").unlink()
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is capturing"):
            capture(cfg, prepared, ALONE)
    assert capture(cfg, prepared, ALONE) == folder


def test_a_cache_that_another_capture_ends_meanwhile_is_taken(
    cfg: RunConfig, prepared: PreparedData, tmp_path: Path, monkeypatch, capsys
):
    folder = capture(cfg, prepared, ALONE)
    folder.rename(tmp_path / "aside")
    right = capture_job.sole_writer

    @contextmanager
    def after_the_other(place: Path) -> Iterator[None]:
        (tmp_path / "aside").rename(place)
        with right(place):
            yield

    monkeypatch.setattr(capture_job, "sole_writer", after_the_other)
    monkeypatch.setattr(Verifier, "load", None)  # would fail if it were called
    assert capture(cfg, prepared, ALONE) == folder
    assert f"already in {folder}" in capsys.readouterr().out


def test_shards_are_ordered_by_number(cfg: RunConfig, prepared: PreparedData):
    folder = capture(cfg, prepared, ALONE)
    manifest = read_manifest(folder)
    names = ["00002.safetensors", "99999.safetensors", "100000.safetensors"]
    written = [replace(e, name=n) for n, e in zip(names, manifest.shards[:3], strict=True)]
    job = capture_job.CaptureJob(folder, replace(manifest, shards=[]), [])
    finish(job, written[::-1], ALONE)
    assert [entry.name for entry in read_manifest(folder).shards] == names


def test_samples_of_one_token_are_captured(cfg: RunConfig, prepared: PreparedData, flatten):
    """They have no row that asks; the first four are no probe then."""
    short = [
        replace(one, input_ids=one.input_ids[:1], loss_mask=one.loss_mask[:1])
        for one in prepared.samples[:5]
    ]
    for samples in (short + prepared.samples[5:9], short):
        some = replace(prepared, samples=flatten(samples), fingerprint=f"some{len(samples)}")
        reader = ShardReader(capture(cfg, some, ALONE))
        assert [len(reader.read(i).last) for i in range(5)] == [0] * 5


def test_a_dtype_is_named_as_its_knob_is(cfg: RunConfig, prepared: PreparedData):
    cfg.capture = replace(cfg.capture, dtype=StateDtype.fp8, tolerance=1e-4)
    with pytest.raises(JobError, match=r"or capture\.dtype=fp8 is too coarse"):
        capture(cfg, prepared, ALONE)


def test_the_command_judges_the_capture_too(monkeypatch, capsys, tiny_verifier: Path):
    words = [f"verifier.path={tiny_verifier}", "data.path=README.md", "capture.backend=vllm"]
    monkeypatch.setattr(sys, "argv", ["capture", *words, "capture.vllm_python=/no/python"])
    monkeypatch.delitem(sys.modules, "data.capture")  # or running it again is warned of
    with pytest.raises(SystemExit):
        runpy.run_module("data.capture", run_name="__main__")
    assert "capture.vllm_python=/no/python: no Python with vLLM" in capsys.readouterr().err


# ---- interrupted captures -------------------------------------------------------------------


def test_a_missing_shard_is_made_again_with_the_same_bytes(cfg, prepared, capsys):
    folder = capture(cfg, prepared, ALONE)
    before = bytes_of(folder)
    (shard_folder(folder) / "00002.safetensors").unlink()
    os.truncate(shard_folder(folder) / "00004.safetensors", 100)
    kept = (shard_folder(folder) / "00001.safetensors").stat().st_ino
    assert capture(cfg, prepared, ALONE) == folder
    assert bytes_of(folder) == before
    assert (shard_folder(folder) / "00001.safetensors").stat().st_ino == kept
    assert "00002.safetensors: missing" in capsys.readouterr().out
    assert_whole(folder)


def test_a_rerun_with_other_shard_sizes_leaves_no_stray_shard(cfg, prepared, monkeypatch):
    folder = capture(cfg, prepared, ALONE)
    (folder / "manifest.json").unlink()
    monkeypatch.setattr("data.shard_plan.MIN_SHARDS", 3)
    capture(cfg, prepared, ALONE)
    assert set(bytes_of(folder)) == {entry.name for entry in read_manifest(folder).shards}
    assert len(ShardReader(folder)) == len(prepared.samples)
    assert_whole(folder)


KILLED = """
import os, sys, time
from pathlib import Path
from conf.compose import entry
from conf.runtime import RankInfo
from data import shard_file
from data.capture import capture

real = os.fsync
def fsync(handle):
    done = len(list(Path(cfg.run.cache).glob("capture-*/shards/*.safetensors")))
    if done == 3 and os.readlink(f"/proc/self/fd/{handle}").endswith(".tmp"):
        print("in the middle", flush=True)
        time.sleep(600)
    real(handle)
shard_file.os.fsync = fsync
capture(cfg, prepared, RankInfo(0, 1, 0))
"""


def test_kill_in_the_middle_of_a_shard(cfg, prepared: PreparedData, tmp_path: Path):
    """Report B59: the file under its temporary name is torn, those under their own are whole."""
    whole = bytes_of(capture(elsewhere(cfg, tmp_path, "whole"), prepared, ALONE))
    arguments = run_script(KILLED, cfg, prepared, tmp_path)
    with subprocess.Popen(
        [sys.executable, *arguments], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("in the middle" in line for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
    (folder,) = Path(cfg.run.cache).glob("capture-*")
    left = bytes_of(folder)
    torn = left.pop("00003.safetensors.tmp")
    assert len(torn) > 0 and len(left) == 3
    assert all(left[name] == whole[name] for name in left)
    kept = (shard_folder(folder) / "00000.safetensors").stat().st_ino
    with pytest.raises(ConfigError, match="not complete"):
        ShardReader(folder)
    assert capture(cfg, prepared, ALONE) == folder
    assert bytes_of(folder) == whole
    assert (shard_folder(folder) / "00000.safetensors").stat().st_ino == kept
    assert_whole(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 500 KiB; mounting needs privileges."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_becomes_full(cfg, prepared, tmp_path: Path, small_disk: Path, monkeypatch):
    """Report B58: 0.4 MB of states beside 0.3 MB that another program wrote meanwhile."""
    whole = bytes_of(capture(elsewhere(cfg, tmp_path, "whole"), prepared, ALONE))
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    cfg.run.cache = str(small_disk / "cache")
    (small_disk / "other").write_bytes(bytes(300_000))
    with pytest.raises(ConfigError, match=r"run\.cache=.*: the disk became full"):
        capture(cfg, prepared, ALONE)
    (folder,) = Path(cfg.run.cache).glob("capture-*")
    left = bytes_of(folder)
    assert 0 < len(left) < len(whole)
    assert all(left[name] == whole[name] for name in left)  # and no torn one
    (small_disk / "other").unlink()
    capture(cfg, prepared, ALONE)
    assert bytes_of(folder) == whole


def test_a_full_disk_without_a_disk(cfg: RunConfig, prepared: PreparedData, monkeypatch):
    """The same where nothing can be mounted: the fourth shard meets the error."""
    real, calls = os.fsync, []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 7:  # a shard takes two: its file and its folder
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(ConfigError, match=r"run\.cache=.*: the disk became full"):
            capture(cfg, prepared, ALONE)
    (folder,) = Path(cfg.run.cache).glob("capture-*")
    assert sorted(bytes_of(folder)) == [f"{i:05d}.safetensors" for i in range(3)]
    assert_whole(capture(cfg, prepared, ALONE))


# ---- ranks ----------------------------------------------------------------------------------

TWO_RANKS = """
import torch
from conf.compose import entry
from conf.runtime import RankInfo
from data.capture import capture
from data.distributed import setup, shutdown

setup(torch.device("cpu"))
capture(cfg, prepared, RankInfo.from_env())
shutdown()
"""


def test_two_ranks_write_what_one_writes(cfg, prepared: PreparedData, tmp_path: Path):
    """Report B59: rank 0 decides what is missing, each rank writes its share."""
    one = capture(elsewhere(cfg, tmp_path, "one"), prepared, ALONE)
    arguments = run_script(TWO_RANKS, cfg, prepared, tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = Path(cfg.run.cache) / one.name
    assert bytes_of(two) == bytes_of(one)
    assert read_manifest(two) == read_manifest(one)
    assert done.stdout.count("top choice agrees") == 1


# ---- the command ----------------------------------------------------------------------------


def test_the_command_prepares_and_captures(
    tiny_verifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the command writes is undone
        monkeypatch.delenv(name)
    turns = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "a b c d"}]
    rows = [json.dumps({"id": f"row-{i}", "messages": turns}) for i in range(8)]
    (tmp_path / "talks.jsonl").write_text("\n".join(rows))
    words = [
        f"data.path=[{tmp_path / 'talks.jsonl'}]",
        f"run.cache={tmp_path / 'cache'}",
        f"verifier.path={tiny_verifier}",
        "verifier.dtype=float32",
        "verifier.aux_layers=null",
        "run.device=cpu",
        "engine.threads=1",
    ]
    entry(main, words)
    assert torch.get_num_threads() == 1
    (folder,) = (tmp_path / "cache").glob("capture-*")
    reader = ShardReader(folder)
    assert len(reader) == 8 and reader.valid_indices and reader.train_indices


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("aux_layers", [1, 2, 3])])
def test_a_manifest_that_says_what_its_folder_is_not_is_written_again(
    cfg, prepared, name: str, value: object, capsys
):
    folder = capture(cfg, prepared, ALONE)
    path = folder / "manifest.json"
    right, shards = path.read_text(), bytes_of(folder)
    path.write_text(json.dumps(json.loads(right) | {name: value}))
    assert capture(cfg, prepared, ALONE) == folder
    assert f"{name}={value} must be" in capsys.readouterr().out
    assert (path.read_text(), bytes_of(folder)) == (right, shards)
