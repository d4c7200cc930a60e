"""A vLLM in a process of its own, often of another Python, that computes hidden states.

vLLM (0.18 and later) hands them over through files: its speculative method extract_hidden_states
keeps the streams after the layers asked for in the KV cache, and its ExampleHiddenStatesConnector
writes them when a request ends. The last stream, after all layers, is before the final norm.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.runtime import RankInfo, cache_dir, say
from conf.schema import JobError, RunConfig
from conf.scratch import Scratch
from data.dumped import read_streams
from data.records import TokenizedSample
from models.bundled import resolve
from models.facts import VerifierFacts

RUNNER = Path(__file__).with_name("vllm_runner.py")
MEMORY = 0.8  # of a GPU for vLLM; this process keeps the verifier's embedding and head there
PATIENCE = 60.0  # seconds that vLLM has to end once it is told to
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class VllmEngine:
    process: subprocess.Popen[str]
    log: Path  # what vLLM prints

    def streams(self, samples: list[TokenizedSample]) -> list[Tensor]:
        """[T, A+1, D] of each sample; its file is read, compared with the sample and deleted."""
        self._send([sample.input_ids.tolist() for sample in samples])
        paths = self.answer()
        return [taken(Path(path), sample) for path, sample in zip(paths, samples, strict=True)]

    def answer(self) -> Any:
        """The next line of its answer. Raises JobError when it ends instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.ended()
        return json.loads(line)

    def _send(self, prompts: list[list[int]]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(prompts) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.ended() from None

    def ended(self) -> JobError:
        status = wait_for(self.process)  # it closed its output, and may still be at work
        said = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        reason = next((line for line in reversed(said) if "Error" in line), "nothing said why")
        return JobError(
            f"capture.backend=vllm: vLLM ended with exit status {status} ({reason}); "
            f"see {self.log}, mend capture.vllm_args, or take capture.backend=transformers"
        )


@contextmanager
def vllm_engine(
    cfg: RunConfig, facts: VerifierFacts, device: torch.device, longest: int
) -> Iterator[VllmEngine]:
    """Start vLLM for sequences of up to ``longest`` tokens; it ends with the context.

    Its files go to a folder of their own in run.cache, which must have room for those of
    capture.chunk_tokens. Raises JobError when it does not start.
    """
    cache = cache_dir(cfg).resolve()
    with closing(Scratch(cache, "vllm")) as scratch:
        log = cache / f"vllm-rank{RankInfo.from_env().rank}.log"
        say(f"capture: starting vLLM; what it prints goes to {log}")
        asked = json.dumps(settings(cfg, facts, str(scratch.folder), longest))
        process = started([python_of(cfg), str(RUNNER), asked], log, environment(cfg, device))
        try:
            engine = VllmEngine(process, log)
            engine.answer()
            yield engine
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it ended before it read all; that is said elsewhere
                process.stdin.close()
            wait_for(process)


def started(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Raises JobError when there is no such program."""
    try:
        with log.open("w") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
            )
    except OSError as error:
        if error.filename != command[0]:
            raise
        raise JobError(
            f"capture.vllm_python={command[0]}: cannot be started ({error.strerror}); name the "
            "interpreter of an environment with vllm >= 0.18"
        ) from error


def wait_for(process: subprocess.Popen[str]) -> int:
    """Its exit status, after PATIENCE by force."""
    try:
        return process.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def python_of(cfg: RunConfig) -> str:
    own = cfg.capture.vllm_python
    return sys.executable if own is None else str(Path(own).expanduser())


def settings(cfg: RunConfig, facts: VerifierFacts, folder: str, longest: int) -> dict[str, Any]:
    """What data/vllm_runner.py reads."""
    arguments = {
        "dtype": cfg.verifier.dtype.value,
        "trust_remote_code": cfg.verifier.trust_remote_code,
        "max_model_len": longest + 1,  # it generates one token
        "gpu_memory_utilization": MEMORY,
    }
    return {
        "model": str(resolve(cfg.verifier.path, cache_dir(cfg)).resolve()),
        "layers": [*facts.aux_layers, facts.num_layers],
        "folder": folder,
        "arguments": arguments | cfg.capture.vllm_args,
    }


def environment(cfg: RunConfig, device: torch.device) -> dict[str, str]:
    """This process's, without what torchrun told it, and with this rank's GPU alone.

    A vLLM that splits the verifier over GPUs (tensor_parallel_size) sees all of them.
    """
    found = {name: value for name, value in os.environ.items() if name not in OURS}
    if device.type == "cuda" and "tensor_parallel_size" not in cfg.capture.vllm_args:
        seen = [name for name in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        index = device.index or 0
        found["CUDA_VISIBLE_DEVICES"] = seen[index] if seen else str(index)
    return found


def taken(path: Path, sample: TokenizedSample) -> Tensor:
    """Wait until vLLM has written ``path``, read it and delete it.

    vLLM answers before the file is complete, and holds a lock beside it until then.
    """
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    rows = read_streams(path, sample)
    for done in (lock, path):
        done.unlink(missing_ok=True)
    return rows
