"""A process with real vLLM in it: requests go in one after the other, answers come out as files."""

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

PROBE = Path(__file__).with_name("vllm_probe.py")
PATIENCE = 600.0  # seconds until one more answer must be there
PAUSE = 0.05


@dataclass(frozen=True)
class Request:
    """One engine: it is loaded, answers greedily, and goes."""

    name: str
    model: str  # folder that vLLM opens: a verifier, or a head that names its own
    prompts: list[list[int]]
    max_tokens: int
    speculative: dict[str, Any] | None = None  # vLLM's speculative_config
    watch: bool = False  # record the draft's first pass
    stop: list[int] = field(default_factory=list)  # tokens that end an answer; no others do
    dtype: str = "float32"
    max_length: int = 512  # of a prompt with its answer; near it vLLM guesses less


@dataclass(frozen=True)
class Served:
    """vLLM's answers to one request, and how many guesses it accepted."""

    tokens: list[list[int]]
    drafts: int  # rounds; 0 without a draft
    accepted_by_position: list[int]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)


def with_head(head: Path, n_draft: int, method: str = "eagle3") -> dict[str, Any]:
    """The speculative_config for a head in ``head``."""
    return {"method": method, "model": str(head), "num_speculative_tokens": n_draft}


class VllmProcess:
    """vLLM's import, the slow part, is paid once. Requests queue: nobody waits to ask."""

    def __init__(self, python: Path, folder: Path):
        self.folder = folder
        self.log = folder / "log.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, PROBE, folder],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def ask(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()

    def answer(self, name: str) -> Served:
        """Wait for the run ``name``. Raises RuntimeError with the log's end if vLLM gave up."""
        path, end = self.folder / f"{name}.json", time.monotonic() + PATIENCE
        while not path.is_file():
            ended = self.process.poll() is not None
            if (ended and not path.is_file()) or time.monotonic() > end:
                raise RuntimeError(f"no answer to {name}:\n{self.log.read_text()[-4000:]}")
            time.sleep(PAUSE)
        found = json.loads(path.read_text())
        counted = found["counters"]
        drafts = counted.get("drafts", [0])[0]
        return Served(found["tokens"], drafts, counted.get("accepted_tokens_per_pos", []))

    def states(self, name: str) -> dict[str, Tensor]:
        """What a run that watches recorded; call after ``answer``."""
        return load_file(self.folder / f"{name}.safetensors")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
