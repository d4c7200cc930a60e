"""capture.backend=vllm: the protocol with a stand-in for vLLM, and the states of a real one."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.runtime import RankInfo
from conf.schema import (
    CaptureSection,
    Device,
    JobError,
    Precision,
    RunConfig,
    StateBackend,
    StateDtype,
    VerifierSection,
)
from data.capture import capture
from data.reader import ShardReader
from data.records import PreparedData, Skipped, TokenizedSample
from data.vllm_engine import RUNNER, VllmEngine, environment, settings, started
from models.facts import load_facts

ALONE = RankInfo(0, 1, 0)
PROBE = Path(__file__).with_name("vllm_streams.py")
STAND_IN = '''
"""Writes as vLLM's connector does: a lock before the answer, the file some time after it."""
import fcntl, json, os, pathlib, threading, time
from safetensors.torch import load_file, save_file

HOME = pathlib.Path(os.environ["STAND_IN"])

class SamplingParams:
    def __init__(self, **given):
        self.given = given

class Output:
    def __init__(self, path):
        self.kv_transfer_params = {"hidden_states_path": path}

class LLM:
    def __init__(self, **given):
        print("vLLM says a lot on standard output")
        (HOME / "given.json").write_text(json.dumps(given))
        (HOME / "environment.json").write_text(json.dumps(dict(os.environ)))
        if (HOME / "no_gpu").exists():
            raise RuntimeError("no GPU to be found")
        draft = given["speculative_config"]["draft_model_config"]["hf_config"]
        self.layers = draft["eagle_aux_hidden_state_layer_ids"]
        connector = given["kv_transfer_config"]["kv_connector_extra_config"]
        self.folder = connector["shared_storage_path"]
        self.known = load_file(HOME / "known.safetensors")
        self.count = 0

    def generate(self, prompts, params, use_tqdm):
        assert params.given["max_tokens"] == 1
        return [self.one(prompt["prompt_token_ids"]) for prompt in prompts]

    def one(self, ids):
        path = f"{self.folder}/{self.count}-ab12.safetensors"
        self.count += 1
        lock = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=(path, lock, ids)).start()
        return Output(path)

    def write(self, path, lock, ids):
        import torch
        time.sleep(0.01)
        rows = self.known[" ".join(map(str, ids))][:, self.layers].clone()
        save_file({"hidden_states": rows, "token_ids": torch.tensor(ids)}, path)
        os.close(lock)
'''


@pytest.fixture
def cfg(tiny_verifier: Path, tmp_path: Path) -> RunConfig:
    cfg = RunConfig()
    cfg.run.cache = str(tmp_path / "cache")
    cfg.run.device = Device.cpu
    cfg.verifier = VerifierSection(path=str(tiny_verifier), dtype=Precision.float32)
    cfg.capture = CaptureSection(dtype=StateDtype.float32, batch_tokens=128)
    return cfg


@pytest.fixture
def stand_in(tiny_verifier: Path, prepared: PreparedData, tmp_path: Path, monkeypatch) -> Path:
    """A folder with a package named vllm, which knows the streams after 0..8 layers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32)
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0][0]))
    known = {}
    for sample in prepared.samples:
        for ids in (sample.input_ids, sample.input_ids[:64]):
            with torch.no_grad():
                states = model(ids[None], output_hidden_states=True).hidden_states
            streams = torch.stack([*(state[0] for state in states[:-1]), kept.pop()], 1)
            known[" ".join(map(str, ids.tolist()))] = streams
    home = tmp_path / "stand_in"
    (home / "vllm").mkdir(parents=True)
    (home / "vllm" / "__init__.py").write_text(STAND_IN)
    save_file(known, home / "known.safetensors")
    monkeypatch.setenv("STAND_IN", str(home))
    monkeypatch.setenv("PYTHONPATH", str(home))
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun's, which is not for vLLM
    return home


def test_what_vllm_writes_is_packed(cfg, prepared: PreparedData, tmp_path: Path, stand_in: Path):
    own = ShardReader(capture(cfg, prepared, ALONE))
    cfg.capture = replace(cfg.capture, backend=StateBackend.vllm, vllm_args={"max_num_seqs": 8})
    found = ShardReader(capture(cfg, prepared, ALONE))
    assert found.folder != own.folder and found.manifest.backend == "vllm"
    for index in range(len(own)):
        a, b = own.read(index), found.read(index)
        assert a.sample.id == b.sample.id
        torch.testing.assert_close(a.aux, b.aux, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.last, b.last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.lse, b.lse, atol=1e-5, rtol=1e-5)
    given = json.loads((stand_in / "given.json").read_text())
    assert given["max_model_len"] == 65 and given["dtype"] == "float32"  # the longest has 64
    assert given["max_num_seqs"] == 8 and not given["enable_prefix_caching"]
    assert "WORLD_SIZE" not in json.loads((stand_in / "environment.json").read_text())
    left = {path.name for path in Path(cfg.run.cache).iterdir()}
    assert left == {own.folder.name, found.folder.name, "vllm-rank0.log"}


def test_a_vllm_that_counts_layers_otherwise_is_refused(cfg, prepared, stand_in: Path):
    source = (stand_in / "vllm" / "__init__.py").read_text()
    wrong = source.replace("self.layers = draft", "self.layers = [n - 1 for n in draft").replace(
        '_layer_ids"]\n', '_layer_ids"]]\n'
    )
    (stand_in / "vllm" / "__init__.py").write_text(wrong)
    cfg.capture = replace(cfg.capture, backend=StateBackend.vllm)
    with pytest.raises(
        JobError, match=r"capture\.backend=vllm: what should be .* 2 layers is .* 1"
    ):
        capture(cfg, prepared, ALONE)


def test_a_vllm_that_does_not_start_is_quoted(cfg, prepared, stand_in: Path):
    (stand_in / "no_gpu").touch()
    cfg.capture = replace(cfg.capture, backend=StateBackend.vllm)
    message = (
        r"capture\.backend=vllm: .*exit status 1 \(RuntimeError: no GPU to be found\); see .*log"
    )
    with pytest.raises(JobError, match=message):
        capture(cfg, prepared, ALONE)


def test_what_cannot_be_started_is_named_and_leaves_nothing(cfg, prepared, tmp_path: Path):
    (tmp_path / "python").write_text("no program")
    cfg.capture = replace(
        cfg.capture, backend=StateBackend.vllm, vllm_python=str(tmp_path / "python")
    )
    message = r"capture\.vllm_python=.*python: cannot be started \(Permission denied\); name"
    with pytest.raises(JobError, match=message):
        capture(cfg, prepared, ALONE)
    assert not [path for path in Path(cfg.run.cache).iterdir() if ".vllm." in path.name]


def test_a_vllm_that_ends_while_it_is_written_to_is_quoted(tmp_path: Path, monkeypatch):
    """Its end is said, not the broken pipe of what it did not read; and it is waited for in vain
    only so long."""
    monkeypatch.setattr("data.vllm_engine.PATIENCE", 0.2)
    log = tmp_path / "log"
    log.write_text("RuntimeError: lost the GPU")
    text = "import os, time; os.close(0); os.close(1); time.sleep(60)"
    process = started([sys.executable, "-c", text], log, dict(os.environ))
    log.write_text("RuntimeError: lost the GPU")
    with pytest.raises(JobError, match=r"status -9 \(RuntimeError: lost the GPU\)"):
        while True:
            VllmEngine(process, log)._send([[1] * 100_000])
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()


def test_each_rank_shows_vllm_its_own_gpu(cfg: RunConfig, monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert environment(cfg, device)["CUDA_VISIBLE_DEVICES"] == "6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert environment(cfg, device)["CUDA_VISIBLE_DEVICES"] == "1"
    cfg.capture.vllm_args = {"tensor_parallel_size": 2}
    assert "CUDA_VISIBLE_DEVICES" not in environment(cfg, device)


# ---- a real vLLM ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.vllm
def test_real_vllm_gives_our_states(
    cfg: RunConfig, smollm2: Path, vllm_python: Path, tmp_path: Path
):
    """The runner's own settings, on a CPU, where the connector cannot write: a probe does.

    Which streams they are, in which order, and that the last is not normed: all that packing
    assumes of vLLM.
    """
    cfg.verifier.path = str(smollm2)
    facts = load_facts(cfg.verifier, Path(cfg.run.cache))
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate((40, 12, 70)):
        ids = torch.randint(100, 40_000, (length,), generator=generator)
        mask = torch.arange(length) >= 4
        samples.append(TokenizedSample(f"sample-{number}", ids, mask, False, number == 0))
    prepared = PreparedData(tmp_path, "prepared00", samples, torch.zeros(1), Skipped(3, 3))
    (tmp_path / "dump").mkdir()
    asked = settings(cfg, facts, str(tmp_path / "dump"), 70)
    prompts = [sample.input_ids.tolist() for sample in samples]
    request = {"runner": str(RUNNER), "settings": asked, "prompts": prompts}
    done = subprocess.run(
        [vllm_python, PROBE],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own = ShardReader(capture(cfg, prepared, ALONE))
    cfg.capture = replace(
        cfg.capture, backend=StateBackend.dumped, dumped=str(tmp_path / "dump"), tolerance=1e-3
    )
    found = ShardReader(capture(cfg, prepared, ALONE))
    for index in range(3):
        a, b = own.read(index), found.read(index)
        for ours, theirs in ((a.aux, b.aux), (a.last, b.last), (a.lse, b.lse)):
            assert (ours - theirs).norm() < 1e-4 * ours.norm()
        assert torch.equal(a.argmax, b.argmax)
