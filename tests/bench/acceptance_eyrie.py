"""One training of the acceptance bench with Eyrie's own trainer, for a budget of steps or CPU time.

    python tests/bench/acceptance_eyrie.py --work DIR --out DIR [--steps N | --cpu-seconds S] \
        [--layers 2,15,27] [--samples N] [OVERRIDES]

The product's loader, module and DeepSpeed engine; only the end of training is the budget's: warm-up
and cosine follow the share of it that is used. CPU time is that of the process, all threads, from
the building of the head on, because draft.fit_rows fits one there: not the imports, and not the
held-out measure. The head is written as training writes it; the last line printed is JSON.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

from acceptance_data import AUX_LAYERS  # noqa: E402  after the path is set
from acceptance_states import CPU, Inputs, find_inputs  # noqa: E402
from acceptance_walk import walk_all  # noqa: E402

from conf.runtime import RankInfo, say  # noqa: E402
from data.distributed import setup, shutdown, use_threads  # noqa: E402
from data.loader import TrainLoader, on_device  # noqa: E402
from models.draft_file import save_draft  # noqa: E402
from train.engine import Engine  # noqa: E402
from train.loop import Schedule, build, row_weights  # noqa: E402

TICKS = 1 << 20  # of the schedule: the share of the budget that is used, as a step number
EVERY = 20.0  # seconds between two lines


@dataclass(frozen=True)
class Budget:
    """What a training may use: optimizer steps, or CPU seconds."""

    steps: int | None
    cpu_seconds: float | None

    def used(self, steps: int, seconds: float) -> float:
        """The share used, 1 and above at the end."""
        return steps / self.steps if self.steps else seconds / (self.cpu_seconds or 1.0)


@dataclass
class Progress:
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    spoken: float = 0.0


def train(inputs: Inputs, budget: Budget, out: Path) -> dict[str, object]:
    """Train until the budget is used, write the head, and say what it took."""
    cfg, source = inputs.cfg, inputs.source
    ranks = RankInfo.from_env()
    begin, wall = time.process_time(), time.perf_counter()
    engine = Engine(cfg, build(cfg, inputs.prepared, source, CPU), ranks)
    loader = TrainLoader(source, cfg.optim, cfg.ttt, cfg.run.seed, ranks)
    schedule = Schedule(cfg.optim, TICKS)
    done, loss = Progress(), 0.0
    for window in loader.windows():
        share = budget.used(done.steps, time.process_time() - begin)
        if share >= 1:
            break
        weights = row_weights(cfg, window.batches)
        for i, (packed, weight) in enumerate(zip(window.batches, weights.weights, strict=True)):
            batch = on_device(packed, CPU, engine.dtype)
            output = engine(batch, weight)
            engine.backward(output.loss, last=i == len(window.batches) - 1)
            loss = 0.98 * loss + 0.02 * float(output.sums[0] / output.counts[0].clamp_min(1))
            done.tokens += len(batch.input_ids)
            done.supervised += int(output.counts[0])
        engine.step(schedule.lr(int(share * TICKS)), weights.total)
        done.steps += 1
        if time.perf_counter() - wall - done.spoken > EVERY:
            done.spoken = time.perf_counter() - wall
            say(f"{share:.0%}, step {done.steps}, loss at depth 0 {loss:.3f}")
    seconds = time.process_time() - begin
    save_draft(out, engine.module.draft.config, engine.draft_state())
    return {
        "trainer": "eyrie",
        "updates": done.steps,
        "cpu_seconds": seconds,
        "tokens": done.tokens,
        "supervised": done.supervised,
        "trained_parameters": engine.trainable,
        "samples": len(loader.indices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="greedy")
    parser.add_argument("--layers", default="2,15,27")
    parser.add_argument("--samples", type=int)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--steps", type=int)
    size.add_argument("--cpu-seconds", type=float)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    layers = [int(word) for word in args.layers.split(",")]
    assert set(layers) <= set(AUX_LAYERS), f"the cache holds {AUX_LAYERS}"
    inputs = find_inputs(args.work, args.kind, layers, args.samples, args.overrides)
    use_threads(1)
    setup(CPU)
    found = train(inputs, Budget(args.steps, args.cpu_seconds), args.out)
    shutdown()
    walk_all(args.work, layers, [args.out])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
