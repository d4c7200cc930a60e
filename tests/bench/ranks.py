"""Throughput of training on two CPU ranks against one, one thread each, in turns.

    python tests/bench/ranks.py --cache DIR [--rounds 3] [--json FILE] [OVERRIDES]

The first demo's job, from a cache that is there (run.cache of a finished demo), with two packs of
2,048 tokens a step: one rank takes both, of two ranks each takes one, so both train the same curve.
Tokens a second are those of the job's own metrics, the middle one of its lines; the first, in which
memory is taken, is left out. The ratio is the median over rounds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

from bars import Bar, bar_lines, bars_as_json  # noqa: E402  after the path is set

from conf.runtime import say, write_atomically  # noqa: E402

STEPS, EVERY = 15, 3
LEAST = 1.5
JOB = [
    "stages=[train]",
    "engine.threads=1",
    "optim.packs_per_step=2",
    "optim.micro_batch_tokens=2048",
    f"optim.max_steps={STEPS}",
    f"log.every={EVERY}",
    "log.valid_every=1000",
    "log.save_every=1000",
    "ttt.depth=5",
    "draft.fit_rows=null",
    "draft.head_init=verifier",
    "draft.norm_output=false",
]


def tokens_a_second(ranks: int, cache: Path, more: list[str]) -> float:
    """One short training -> the middle of its speeds."""
    with tempfile.TemporaryDirectory() as root:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        places = [f"run.root={root}", "run.name=x", f"run.cache={cache.resolve()}"]
        command = [sys.executable, *torchrun, "train/main.py", *places, *JOB, *more]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        lines = (Path(root) / "x" / "metrics.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    assert len(speeds) >= STEPS // EVERY, f"{len(speeds)} lines of metrics"
    return median(speeds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    pairs: list[tuple[float, float]] = []
    for number in range(args.rounds):
        one, two = (tokens_a_second(ranks, args.cache, args.overrides) for ranks in (1, 2))
        pairs.append((one, two))
        say(f"round {number + 1}: {one:.0f} tokens/s on 1 rank, {two:.0f} on 2: {two / one:.2f}")
    bars = [Bar("tokens/s on 2 ranks, of 1", median(two / one for one, two in pairs), LEAST)]
    print("\n".join(bar_lines(bars)))
    if args.json:
        write_atomically(args.json, json.dumps({"pairs": pairs, "bars": bars_as_json(bars)}))
    return 0 if all(bar.reached for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
