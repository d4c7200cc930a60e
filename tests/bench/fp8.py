"""Acceptance of a head trained on fp8 states against one trained on bf16 states.

    python tests/bench/fp8.py [--steps 2016] [--seed 0] [--folder DIR] [--json FILE] [key=value ...]

The demo's job twice, from conversations to the best head, with the same seed, steps and order;
capture.dtype alone differs. Both heads then guess on the held-out answers from the bf16 states,
which are what a verifier gives at serving. An interval of the difference draws whole samples, the
same for both heads. Further words are overrides of the job.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

import numpy as np  # noqa: E402  after the path is set
import torch  # noqa: E402
from bars import Bar, bar_lines, bars_as_json  # noqa: E402

from conf.compose import load_config  # noqa: E402
from conf.runtime import plain, run_dir, write_atomically  # noqa: E402
from conf.schema import RunConfig, StateDtype  # noqa: E402
from data.capture_job import manifest_of  # noqa: E402
from data.chains import Chains  # noqa: E402
from data.distributed import pick_device  # noqa: E402
from data.loader import batch_of, on_device  # noqa: E402
from data.prepare import find_prepared  # noqa: E402
from data.reader import ShardReader  # noqa: E402
from data.records import CachedPack  # noqa: E402
from eval.acceptance import AcceptanceReport, Counters, report_acceptance  # noqa: E402
from models.draft_file import load_draft  # noqa: E402
from models.kernels import choose_kernel  # noqa: E402
from models.verifier import load_facts  # noqa: E402
from train.held_out import walk_answers  # noqa: E402
from train.ttt import unroll_own  # noqa: E402

BOTH = (StateDtype.bfloat16, StateDtype.fp8)
RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """alpha at one depth from fp8 minus that from bf16, and its 95 % interval."""

    depth: int
    value: float
    low: float
    high: float

    @property
    def within(self) -> bool:
        return self.low <= 0 <= self.high


def words_of(args: argparse.Namespace, folder: Path, dtype: StateDtype) -> list[str]:
    return [
        f"run.root={folder / 'runs'}",
        f"run.cache={folder / 'cache'}",
        f"run.name={dtype.name}",
        f"run.seed={args.seed}",
        "data.valid_share=0.1",
        f"capture.dtype={dtype.name}",
        f"optim.max_steps={args.steps}",
        f"log.valid_every={args.steps}",
        "stages=[prepare,capture,train]",
        *args.overrides,
    ]


def train(words: list[str]) -> RunConfig:
    """Run the job to its end in a process of its own."""
    subprocess.run([sys.executable, str(ROOT / "train" / "main.py"), *words], check=True, cwd=ROOT)
    return load_config(words)


def states_of_cache(cfg: RunConfig) -> ShardReader:
    cache = Path(cfg.run.cache)
    manifest = manifest_of(cfg, find_prepared(cfg), load_facts(cfg.verifier, cache))
    return ShardReader(cache / f"capture-{manifest.fingerprint}", manifest)


@torch.no_grad()
def guesses(cfg: RunConfig, reader: ShardReader) -> list[Counters]:
    """What the run's best head has accepted in each held-out sample."""
    device = pick_device(cfg.run.device, 0)
    draft = load_draft(run_dir(cfg) / "best", device, torch.float32)
    kernel = choose_kernel(cfg.engine.attention, device, torch.float32, draft.config.head_dim)
    counters = []
    for index in reader.valid_indices:
        cached = reader.read(index)
        chains = Chains.of_answers(cached.sample.loss_mask, CachedPack.of([cached]).starts)
        batch = on_device(batch_of(CachedPack.of([cached]), chains), device, torch.float32)
        proposed = unroll_own(draft, batch, kernel, cfg.eval.valid_depth).T.cpu()
        counters.append(walk_answers(proposed, cached.sample.input_ids, cached.sample.loss_mask))
    return counters


def differences(exact: list[Counters], coarse: list[Counters], seed: int) -> list[Difference]:
    """By depth; a percentile bootstrap over samples, drawn alike for both heads."""
    draws = np.random.default_rng(seed).integers(len(exact), size=(RESAMPLES, len(exact)))
    found = []
    for k in range(len(exact[0].accepted_by_depth)):
        parts = [
            (np.array([c.accepted_by_depth[k] for c in one]), [c.reached_by_depth[k] for c in one])
            for one in (exact, coarse)
        ]
        whole, drawn = zip(*(ratios(a, np.array(r), draws) for a, r in parts), strict=True)
        gap = drawn[1] - drawn[0]
        low, high = np.nanquantile(gap, [0.025, 0.975]) if np.isfinite(gap).any() else (np.nan,) * 2
        found.append(Difference(k + 1, float(whole[1] - whole[0]), float(low), float(high)))
    return found


def ratios(accepted: np.ndarray, reached: np.ndarray, draws: np.ndarray) -> tuple:
    """accepted / reached of all samples, and of each draw; NaN of nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return accepted.sum() / reached.sum(), accepted[draws].sum(1) / reached[draws].sum(1)


def print_figures(
    reports: list[AcceptanceReport], gaps: list[Difference], tokens: int, samples: int
) -> None:
    print(f"held out: {tokens:,} supervised tokens in {samples} samples")
    for dtype, report in zip(BOTH, reports, strict=True):
        alphas = zip(report.alpha_by_depth, report.alpha_by_depth_intervals, strict=True)
        text = "  ".join(f"{a:.3f} [{i.low:.3f}, {i.high:.3f}]" for a, i in alphas)
        print(f"{dtype.name:>8}: tau {report.tau:.3f}, alpha by depth {text}")
    text = "  ".join(f"{g.value:+.3f} [{g.low:+.3f}, {g.high:+.3f}]" for g in gaps)
    print(f"fp8 - bfloat16, same samples: {text}")


def bars_of(gaps: list[Difference], tokens: int) -> list[Bar]:
    inside = sum(gap.within for gap in gaps)
    return [
        Bar("held-out supervised tokens", tokens, 2000),
        Bar("depths at which 0 lies in the 95 % interval of the difference", inside, len(gaps)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--steps", type=int, default=2016, help="optimizer steps of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep caches and runs here")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("overrides", nargs="*", help="of the job, as in threads of the engine")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = (args.folder or Path(name)).resolve()
        jobs = [train(words_of(args, folder, dtype)) for dtype in BOTH]
        reader = states_of_cache(jobs[0])
        by_job = [guesses(job, reader) for job in jobs]
        tokens = sum(int(reader.read(i).sample.loss_mask.sum()) for i in reader.valid_indices)
    reports = [report_acceptance(counters, RESAMPLES, seed=0) for counters in by_job]
    gaps = differences(by_job[0], by_job[1], args.seed)
    print_figures(reports, gaps, tokens, len(by_job[0]))
    bars = bars_of(gaps, tokens)
    print("\n".join(bar_lines(bars)))
    if args.json:
        figures = {
            "steps": args.steps,
            "seed": args.seed,
            "tokens": tokens,
            **{d.name: asdict(report) for d, report in zip(BOTH, reports, strict=True)},
            "differences": [asdict(gap) for gap in gaps],
            "bars": bars_as_json(bars),
        }
        write_atomically(args.json, json.dumps(plain(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
