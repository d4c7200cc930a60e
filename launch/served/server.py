"""A vLLM server as a process of its own: started, awaited, and ended whatever happens."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx

from conf.runtime import ROOT, progress, say
from conf.schema import ConfigError
from data.vllm_engine import OURS
from models.export.read_eagle1 import is_eagle1_folder

MODULE = "vllm.entrypoints.openai.api_server"
PATIENCE = 20.0  # seconds that it has to end once it is told to
LOOK = 2.0  # seconds that one look at /health may take
BUILT = re.compile(r"Initializing a V1 LLM engine.* dtype=(?:torch\.)?(\w+)")
QUANTISED = re.compile(r"Initializing a V1 LLM engine.* quantization=(\w+)")


@dataclass(frozen=True)
class ServerPlan:
    """What is started; ``head`` of None serves the verifier alone."""

    python: Path
    verifier: str
    dtype: str  # as --dtype takes it
    length: int  # positions
    head: Path | None
    n_draft: int
    patience: float  # seconds until it must answer
    more: list[str] = field(default_factory=list)  # arguments of the person's own, they win

    def command(self, port: int) -> list[str]:
        words = [str(self.python), "-m", MODULE, "--model", self.verifier, "--dtype", self.dtype]
        words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(self.length)]
        if self.head is not None:
            speculative = {
                "method": "eagle" if is_eagle1_folder(self.head) else "eagle3",
                "model": str(self.head),
                "num_speculative_tokens": self.n_draft,
            }
            words += ["--speculative-config", json.dumps(speculative)]
        return [*words, *self.more]


@dataclass(frozen=True)
class Running:
    url: str
    log: Path  # what it prints

    def built(self, pattern: re.Pattern[str]) -> str | None:
        """What it says of itself when it builds its engine; None where it does not."""
        found = pattern.search(self.log.read_text(errors="replace"))
        return found[1] if found and found[1] != "None" else None


@contextmanager
def vllm_server(plan: ServerPlan, log: Path) -> Iterator[Running]:
    """Start it and wait until it answers; its whole process group ends with the context.

    Also when this process is interrupted or told to end. Raises ConfigError when it does not start.
    """
    port = free_port()
    command = plan.command(port)
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"starting {shlex.join(command)}")
    say(f"what it prints goes to {log}")
    with ended_by_terminate():
        process = started(command, log)
        try:
            running = Running(f"http://127.0.0.1:{port}", log)
            wait_until_up(process, running, plan.patience)
            yield running
        finally:
            end_group(process)


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that all it starts can be ended with it."""
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    environment = inherited | {"PYTHONSAFEPATH": "1"}  # this folder's packages are not its own
    try:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        if error.filename != command[0]:
            raise
        raise ConfigError(
            f"--vllm-python={command[0]}: cannot be started ({error.strerror}); name the "
            "interpreter of an environment with vllm, which bash launch/vllm_env.sh makes"
        ) from error


def wait_until_up(process: subprocess.Popen[bytes], running: Running, patience: float) -> None:
    """Look at /health once a second. Raises ConfigError when it ends, or stays silent too long."""
    until = time.monotonic() + patience
    seconds = int(patience)
    with httpx.Client(trust_env=False, timeout=LOOK) as http:
        for _ in progress(range(seconds), seconds, "vLLM starts, at most", "s"):
            begin = time.monotonic()
            with suppress(httpx.HTTPError):
                if http.get(f"{running.url}/health").is_success:
                    return
            if process.poll() is not None:
                raise did_not_start(f"ended with exit status {process.returncode}", running.log)
            if begin > until:
                break
            time.sleep(max(0.0, 1.0 - (time.monotonic() - begin)))
    raise did_not_start(f"did not answer within --start-timeout={patience:g} seconds", running.log)


def did_not_start(how: str, log: Path) -> ConfigError:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    reason = next((line for line in reversed(said) if "Error" in line), "nothing said why")
    if "No module named" in reason:
        way_out = "name an environment with vllm by --vllm-python (bash launch/vllm_env.sh)"
    else:
        way_out = "mend --server-args, or raise --start-timeout where it was still at work"
    return ConfigError(f"vLLM {how} ({reason[-300:]}); see {log}, {way_out}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Tell the server and what it started to end; after PATIENCE, and whatever is left, by force.

    The group outlives its leader for as long as one of its processes does.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_by_terminate() -> Iterator[None]:
    """Have SIGTERM run the clean-up that Ctrl-C runs: unheeded, it would leave the server alone."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def find_python(chosen: str | None) -> Path:
    """The interpreter that has vLLM: the one named, that of launch/vllm_env.sh, or this one."""
    if chosen is not None:
        return Path(chosen).expanduser()
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return own if own.is_file() else Path(sys.executable)
