"""The job as people start it: a folder with conversations, and runs in real processes."""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

MAIN = str(Path(__file__).resolve().parents[3] / "train" / "main.py")


@dataclass(frozen=True)
class Place:
    """A folder with conversations, prompts, runs and a cache."""

    STEPS: ClassVar[int] = 24
    SAVE_EVERY: ClassVar[int] = 8
    SETTINGS: ClassVar[list[str]] = f"""
        data=jsonl data.max_length=96 data.valid_share=0.2 draft.vocab_size=64 ttt.depth=2
        draft.fit_rows=null draft.head_init=verifier
        verifier.aux_layers=null verifier.dtype=float32 engine.threads=1
        capture.min_agreement=0
        optim.packs_per_step=2 optim.micro_batch_tokens=192 optim.flops=1e12 optim.max_steps={STEPS}
        log.every=3 log.valid_every=4 log.save_every={SAVE_EVERY}
        eval.max_prompts=2 eval.max_new_tokens=8 eval.speed_prompts=1 eval.n_sweep=[1]
        eval.n_draft=2 eval.valid_depth=2 eval.bootstrap=20
        """.split()

    folder: Path
    verifier: Path
    verifier_files: dict[str, str]  # their digests before any run

    def words(self, name: str, *more: str, cache: str = "cache") -> list[str]:
        return [
            f"verifier.path={self.verifier}",
            f"data.path={self.folder / 'answers.jsonl'}",
            f"eval.prompts={self.folder / 'prompts.jsonl'}",
            f"run.root={self.folder / 'runs'}",
            f"run.cache={self.folder / cache}",
            f"run.name={name}",
            *self.SETTINGS,
            *more,
        ]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def start(self, words: list[str], ranks: int = 0, program: str = MAIN) -> subprocess.Popen[str]:
        """Start the job outside the checkout; ``ranks`` > 0 goes through torchrun."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks else []), program, *words]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**kept, "HOME": str(self.folder)},  # no one's login to Weights & Biases
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, words: list[str], ranks: int = 0, code: int = 0) -> tuple[str, str]:
        """Run to the end, require the exit code -> standard output and standard error."""
        with self.start(words, ranks) as process:
            out, err = process.communicate()
        assert process.returncode == code, err[-3000:]
        return out, err

    def wait_for(self, process: subprocess.Popen[str], name: str, step: int) -> None:
        """Until the metrics of a run have a line of ``step``."""
        metrics = self.run(name) / "metrics.jsonl"
        while not metrics.is_file() or f'"step": {step},' not in metrics.read_text():
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.001)

    @staticmethod
    def workers(process: subprocess.Popen[str]) -> list[int]:
        """The ranks that torchrun started."""
        task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    @staticmethod
    def digests(*folders: Path) -> dict[str, str]:
        files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def lines(self, name: str) -> list[dict]:
        """metrics.jsonl without the one figure that is a time."""
        text = (self.run(name) / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]

    def assert_same_training(self, one: str, other: str) -> None:
        """Metrics and best head of two runs are equal to the last bit."""
        assert self.lines(one) == self.lines(other)
        weights = [path.name for path in (self.run(one) / "best").glob("*.safetensors")]
        assert len(weights) == 1
        for name in (*weights, "draft.json", "acceptance.json"):
            first, second = (self.run(run) / "best" / name for run in (one, other))
            assert first.read_bytes() == second.read_bytes(), name


@pytest.fixture(scope="session")
def place(tiny_verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("job")
    rows = []
    for i in range(24):
        turns = [
            {"role": "user", "content": f"count to {i % 7}"},
            {"role": "assistant", "content": " ".join(str(n) for n in range(5 + i % 7)) + " done"},
        ]
        rows.append({"id": f"c{i}", "messages": turns, "greedy": i % 2 == 0})
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [{"id": f"p{i}", "task": "count", "turns": [f"count to {i}"]} for i in (3, 4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return Place(folder, tiny_verifier, Place.digests(tiny_verifier))


@pytest.fixture(scope="session")
def finished(place: Place) -> Path:
    """The run folder of a job that went through all its stages; its name is ``whole``."""
    place.finish(place.words("whole", "log.wandb=true"))
    return place.run("whole")
