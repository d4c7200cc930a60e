"""The acceptance bench: heads of different recipes and trainers from one cache, for one budget.

    python tests/bench/acceptance.py make --work DIR
    python tests/bench/acceptance.py train --work DIR --cpu-seconds 100 [--seeds 0,1,2] [NAME ...]
    python tests/bench/acceptance.py peers --work DIR --cpu-seconds 200 [--seeds 0,1,2]
    python tests/bench/acceptance.py report --work DIR [--json FILE]

``train`` goes through tests/bench/acceptance_recipes.py, one process a training; what is there is
kept, so a broken-off call goes on. Every head's acceptance is walked over the held-out answers
(acceptance_walk.py) without decoding. Trainings are single-threaded; two lanes may run side by
side, since the budget is the CPU time of a process.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "bench"
sys.path[0] = str(ROOT)
sys.path.append(str(HERE))

from acceptance_data import PROMPTS, make  # noqa: E402  after the path is set
from acceptance_recipes import BASE, RECIPES, Recipe  # noqa: E402
from acceptance_report import found, tables  # noqa: E402
from acceptance_states import make_feed  # noqa: E402

from conf.runtime import say, write_atomically  # noqa: E402
from conf.schema import ConfigError  # noqa: E402


@dataclass(frozen=True)
class Budget:
    steps: int | None
    cpu_seconds: float | None

    @property
    def words(self) -> list[str]:
        if self.steps:
            return ["--steps", str(self.steps)]
        return ["--cpu-seconds", str(self.cpu_seconds)]

    @property
    def name(self) -> str:
        return f"{self.steps}steps" if self.steps else f"{self.cpu_seconds:g}s"


def run(command: list[str], log: Path) -> dict[str, Any]:
    """Run one training in a process of its own -> the JSON of its last line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    log.write_text(done.stdout)
    if done.returncode:
        raise ConfigError(f"{log}: exit code {done.returncode}; see its last lines")
    return json.loads(done.stdout.splitlines()[-1])


def folder_of(work: Path, name: str, seed: int, budget: Budget) -> Path:
    return work / "heads" / f"{name}-{budget.name}-seed{seed}"


def train(work: Path, recipe: Recipe, seed: int, budget: Budget) -> None:
    """One training and its walk, if they are not there."""
    folder = folder_of(work, recipe.name, seed, budget)
    if not (folder / "result.json").exists():
        command = [sys.executable, str(HERE / "acceptance_eyrie.py"), "--work", str(work)]
        command += ["--out", str(folder), *budget.words, *recipe.words, f"run.seed={seed}"]
        made = run(command, folder / "train.log")
        about = {"recipe": recipe.name, "group": recipe.group, "seed": seed, "budget": budget.name}
        write_atomically(folder / "result.json", json.dumps({**about, **made}))
    walked(work, folder, recipe.layers)


def walked(work: Path, folder: Path, layers: str) -> None:
    if not (folder / "walk.json").exists():
        command = [sys.executable, str(HERE / "acceptance_walk.py"), "--work", str(work)]
        run([*command, "--layers", layers, str(folder)], folder / "walk.log")
    counters = json.loads((folder / "walk.json").read_text())["counters"]["5"]
    rounds = sum(one["rounds"] for one in counters)
    accepted = sum(sum(one["accepted_by_depth"]) for one in counters)
    say(f"{folder.name}: tau {1 + accepted / rounds:.3f} at N = 5")


# ---- other trainers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    """Another trainer's run: its own script and environment."""

    name: str
    words: list[str]

    @property
    def trainer(self) -> str:
        return self.name.partition("_")[0]


ADAMW = {"specforge": [], "speculators": ["--optimizer", "adamw"]}
PEERS = [
    Peer(f"{trainer}_K{depth}_lr{rate}", ["--lr", rate, "--depth", depth, *words])
    for trainer, words in ADAMW.items()
    for depth in ("3", "7")
    for rate in ("5e-4", "1e-3", "2e-3")
] + [Peer("speculators_muon_K3_lr1e-3", ["--lr", "1e-3", "--depth", "3"])]  # as it comes


def train_peer(work: Path, envs: Path, peer: Peer, seed: int, budget: Budget) -> None:
    """One training by another trainer on the same cache, and the walk of its head in our loop."""
    folder, feed = folder_of(work, peer.name, seed, budget), work / "feed.safetensors"
    if not (folder / "result.json").exists():
        python = envs / peer.trainer / "bin" / "python"
        script = HERE / f"acceptance_{peer.trainer}.py"
        command = [str(python), str(script), "--feed", str(feed), "--out", str(folder)]
        made = run([*command, *peer.words, *budget.words, "--seed", str(seed)], folder / "log")
        about = {"recipe": peer.name, "group": "peers", "seed": seed, "budget": budget.name}
        write_atomically(folder / "result.json", json.dumps({**about, **made}))
    walked(work, folder, "2,15,27")


def wanted(task: str, names: list[str]) -> list[Recipe | Peer]:
    """Those of ``names``, or all. Raises ConfigError for a name that is none."""
    known: dict[str, Recipe | Peer] = {
        one.name: one for one in (PEERS if task == "peers" else RECIPES)
    }
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such recipe; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("make", "train", "peers", "report"))
    parser.add_argument("names", nargs="*", help="recipes; default: all")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--kind", default="greedy", choices=PROMPTS, help="cache to make")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--peer-envs", type=Path, help="made by tests/bench/peer_envs.sh")
    parser.add_argument("--base", default=BASE, help="recipe that the report compares with")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--cpu-seconds", type=float)
    args = parser.parse_intermixed_args()
    if args.task == "make":
        make(args.work, Path(os.environ.get("EYRIE_SHARED", "../shared")) / "data", args.kind)
        return 0
    budget = Budget(args.steps, args.cpu_seconds)
    if args.task == "report":
        groups = found(args.work, budget.name)
        base = next((group for group in groups if group.name == args.base), groups[0])
        titles = {recipe.name: recipe.group for recipe in RECIPES}
        print("\n\n".join(tables(groups, base, titles)))
        return 0
    if args.task == "peers" and not (args.work / "feed.safetensors").exists():
        make_feed(args.work, args.work / "feed.safetensors")
    failed = 0
    for seed in map(int, args.seeds.split(",")):
        for one in wanted(args.task, args.names):
            try:
                if isinstance(one, Recipe):
                    train(args.work, one, seed, budget)
                else:
                    train_peer(args.work, args.peer_envs, one, seed, budget)
            except ConfigError as error:
                failed += 1
                say(str(error))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
