"""What training reports: sums and counts until printed; JSON lines always, W&B if asked."""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from conf.runtime import RankInfo, plain, say, write_atomically
from conf.schema import RunConfig
from data.distributed import sum_over_ranks
from eval.acceptance import AcceptanceReport
from train.ttt import TTTOutput

WANDB_TIMEOUT = 8  # seconds until an unreachable server means offline


class Interval:
    """Sums over the steps since the last report; they stay on the device until then."""

    def __init__(self, depth: int, device: torch.device):
        self.totals = torch.zeros(3, depth, dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        self.started = time.perf_counter()
        self.seconds = 0.0  # between reports, so far

    def add(self, output: TTTOutput, tokens: int) -> None:
        self.totals += torch.stack([output.sums, output.counts, output.hits])
        self.tokens += tokens

    def restart(self) -> None:
        self.started = time.perf_counter()

    def pending(self) -> list[float]:
        """This rank's sums so far, for a checkpoint between two reports; the rate starts anew."""
        return self.totals.flatten().tolist()

    def take_up(self, pending: list[list[float]], rank: int) -> None:
        """Go on from what ``pending`` gave on each rank; one that it lacks starts at zero."""
        if rank < len(pending):
            totals = torch.tensor(pending[rank], dtype=torch.float64)
            self.totals.copy_(totals.view_as(self.totals))

    def close(self, decay: float) -> dict[str, float | list[float]]:
        """Reduce over ranks once and start anew -> loss, loss and accuracy by depth, tokens/s."""
        flat = sum_over_ranks(torch.cat([self.totals.flatten(), self.tokens[None]]))
        sums, counts, hits = flat[:-1].view(3, -1).tolist()
        now = time.perf_counter()
        rate = float(flat[-1]) / (now - self.started)
        self.seconds += now - self.started
        self.totals.zero_()
        self.tokens.zero_()
        self.restart()
        first = max(counts[0], 1.0)
        return {
            "loss": sum(decay**k * total for k, total in enumerate(sums)) / first,
            "loss_by_depth": [s / max(n, 1.0) for s, n in zip(sums, counts, strict=True)],
            "accuracy_by_depth": [h / max(n, 1.0) for h, n in zip(hits, counts, strict=True)],
            "supervised_tokens": counts[0],
            "tokens_per_second": rate,
        }


class MetricsLog:
    """``metrics.jsonl`` and the progress bar, on rank 0; the other ranks keep silent."""

    def __init__(self, cfg: RunConfig, folder: Path, ranks: RankInfo, total_steps: int):
        self.is_main = ranks.is_main
        self.path = folder / "metrics.jsonl"
        self.run = start_wandb(cfg, folder) if ranks.is_main and cfg.log.wandb else None
        self.words: dict[str, str] = {}
        lines = not sys.stderr.isatty()
        self.bar = tqdm(
            total=total_steps,
            desc="train",
            unit="step",
            disable=not ranks.is_main,
            dynamic_ncols=True,
            mininterval=10.0 if lines else 0.2,
            file=sys.stderr,
        )

    def truncate(self, step: int) -> None:
        """Drop lines beyond ``step``, and half a last line: a resumed run writes them again."""
        self.bar.n = self.bar.initial = step
        if not self.is_main or not self.path.is_file():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write_atomically(self.path, "".join(kept))

    def write(self, step: int, figures: dict) -> None:
        if not self.is_main:
            return
        line = {"step": step, **plain(figures)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.run is not None:
            self.run.log(flat(figures), step=step)

    def train(self, step: int, figures: dict) -> None:
        """A line of training figures, and the bar's loss and rate."""
        self.write(step, figures)
        self.words["loss"] = f"{figures['loss']:.3f}"
        self.words["tok/s"] = f"{figures['tokens_per_second']:.0f}"
        self.bar.set_postfix(self.words, refresh=False)

    def held_out(self, step: int, report: AcceptanceReport) -> None:
        """A line of held-out acceptance, and the bar's alpha by depth."""
        self.write(step, {"held_out": plain(report)})
        self.words["tau"] = f"{report.tau:.2f}"
        self.words["alpha"] = " ".join(
            "-" if math.isnan(alpha) else f"{alpha:.2f}" for alpha in report.alpha_by_depth
        )
        self.bar.set_postfix(self.words, refresh=False)

    def close(self) -> None:
        self.bar.close()
        if self.run is not None:
            self.run.finish()


def flat(figures: dict) -> dict[str, float]:
    """Lists by depth become one series a depth."""
    series: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            series.update({f"{name}/{key}": item for key, item in flat(value).items()})
        elif isinstance(value, list):
            series.update({f"{name}/{k}": item for k, item in enumerate(value)})
        elif isinstance(value, int | float):
            series[name] = value
    return series


def start_wandb(cfg: RunConfig, folder: Path):
    """A Weights & Biases run: online when logged in and reachable, else offline, and it says so."""
    import wandb  # a second of import time, and only those who ask for it pay
    from wandb.errors import CommError, UsageError

    settings = wandb.Settings(init_timeout=WANDB_TIMEOUT, silent=True)
    common = {
        "project": cfg.log.project,
        "name": cfg.run.name,
        "dir": str(folder),
        "config": plain(cfg),
    }
    if os.environ.get("WANDB_MODE"):  # online, offline or disabled: the user's word counts
        return wandb.init(settings=settings, **common)
    if wandb.login(prompt=False, verify=False):  # no network: init finds out in WANDB_TIMEOUT
        try:
            return wandb.init(mode="online", settings=settings, **common)
        except (CommError, UsageError, TimeoutError) as error:
            say(f"wandb: no server ({str(error).splitlines()[0]}); logging offline")
    return wandb.init(mode="offline", settings=settings, **common)
