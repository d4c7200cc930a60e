"""Speed of the loader on a cold cache, against cat on the same files in the same run.

    python tests/bench/loader.py [--mib 1024] [--width 576] [--dtype bfloat16] [--json FILE]

A made-up cache is written, then read in turns: files evicted and sent through ``cat`` to
/dev/null; files evicted and dealt by the loader for one epoch, in its own shuffled and packed
order, every digest checked. Then the same without eviction, and once with a step that computes
(sleeps) twice as long as a window took to load: what the step still waits for is not hidden.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch  # noqa: E402  after the path is set

from conf.runtime import RankInfo, write_atomically  # noqa: E402
from conf.schema import OptimSection, StateDtype, TTTSection  # noqa: E402
from data.fp8 import FP8  # noqa: E402
from data.loader import TrainLoader  # noqa: E402
from data.manifest import FORMAT_VERSION, Manifest, shard_folder, write_manifest  # noqa: E402
from data.reader import ShardReader  # noqa: E402
from data.records import SampleStates, TokenizedSample  # noqa: E402
from data.shard_file import describe, write_shard  # noqa: E402
from data.shard_plan import RowSizes, plan_spans  # noqa: E402
from data.shards import HiddenStateShard  # noqa: E402

BAR = 0.8  # of cat's bytes a second
LAYERS = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds; speeds in bytes a second of the files as they lie on the disk."""

    bytes: int
    shards: int
    samples: int
    tokens: int
    cat_cold: float
    loader_cold: float
    ratio_cold: float  # of the pairs, each timed one after the other
    cat_warm: float
    loader_warm: float
    step_seconds: float  # computed (slept) a step
    waited_seconds: float  # for windows by all such steps but the first
    waited_share: float  # of those steps' time


def samples_of(tokens: int, mean: int) -> list[TokenizedSample]:
    """Samples of mean/4 to 7/4 mean tokens, the second half of each supervised."""
    generator = torch.Generator().manual_seed(0)
    samples: list[TokenizedSample] = []
    while tokens > 0:
        length = int(torch.randint(mean // 4, 7 * mean // 4 + 1, (1,), generator=generator))
        ids = torch.randint(0, 1000, (length,), generator=generator)
        mask = torch.arange(length) >= length // 2
        samples.append(TokenizedSample(f"sample-{len(samples)}", ids, mask, False, False))
        tokens -= length
    return samples


def write_cache(folder: Path, args: argparse.Namespace) -> None:
    dtype = getattr(torch, StateDtype[args.dtype].value)
    sizes = RowSizes.of(args.width, LAYERS, dtype)
    samples = samples_of(args.mib * MIB // (sizes.token + sizes.asking // 2), args.mean)
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    asking = torch.tensor([int(sample.loss_mask[1:].sum()) for sample in samples])
    manifest = Manifest(
        FORMAT_VERSION, "capture", "weights", "made up", "bfloat16", "prepared", "tokenizer",
        "template", StateDtype[args.dtype].value, args.width, [2, 4, 5], "transformers", "",
    )  # fmt: skip
    shard_folder(folder).mkdir(parents=True)
    entries = []
    for span in plan_spans(lengths, asking, sizes, args.shard_mib * MIB):
        chosen = samples[span.first : span.first + span.count]
        shard = HiddenStateShard.empty(chosen, span.first, manifest)
        for place, sample in enumerate(chosen):
            shard.put(place, noise(len(sample.input_ids), int(asking[span.first + place]), shard))
        write_shard(folder, span, shard, manifest.fingerprint)
        entries.append(describe(folder, span.name))
    write_manifest(folder, replace(manifest, shards=entries))


def noise(tokens: int, asking: int, shard: HiddenStateShard) -> SampleStates:
    width, dtype = shard.last.shape[1], shard.last.dtype
    scaled = dtype == FP8
    return SampleStates(
        aux=torch.randn(tokens, LAYERS * width).to(dtype),
        last=torch.randn(asking, width).to(dtype),
        argmax=torch.randint(0, 1000, (asking,)),
        lse=torch.rand(asking),
        aux_scales=torch.rand(tokens, LAYERS) if scaled else None,
        last_scales=torch.rand(asking, 1) if scaled else None,
    )


def evict(files: list[Path]) -> None:
    """Drop the files from the page cache; they were written with fsync."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat(files: list[Path]) -> None:
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)


def seconds_of(work: Callable[[], object]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def one_epoch(loader: TrainLoader) -> None:
    for _ in loader.windows():
        pass


def waited(loader: TrainLoader, step_seconds: float) -> list[float]:
    """Seconds that each step but the first waits for its window when steps compute so long."""
    windows = loader.windows()
    next(windows)
    waits = []
    for _ in range(1, loader.total_steps):
        sleep(step_seconds)
        waits.append(seconds_of(lambda: next(windows)))
    return waits


def measure(loader: TrainLoader, files: list[Path], rounds: int) -> Figures:
    size = sum(path.stat().st_size for path in files)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object], cold: bool) -> None:
        if cold:
            evict(files)
        times.setdefault(name, []).append(seconds_of(work))

    for _ in range(rounds):
        for cold, word in ((True, "cold"), (False, "warm")):
            timed(f"cat {word}", lambda: cat(files), cold)
            timed(f"loader {word}", lambda: one_epoch(loader), cold)
    pairs = zip(times["cat cold"], times["loader cold"], strict=True)
    step = 2 * median(times["loader cold"]) / loader.total_steps
    evict(files)
    waits = waited(loader, step)
    return Figures(
        bytes=size,
        shards=len(files),
        samples=len(loader.source),
        tokens=int(loader.source.lengths.sum()),
        cat_cold=size / median(times["cat cold"]),
        loader_cold=size / median(times["loader cold"]),
        ratio_cold=median(quick / slow for quick, slow in pairs),
        cat_warm=size / median(times["cat warm"]),
        loader_warm=size / median(times["loader warm"]),
        step_seconds=step,
        waited_seconds=sum(waits),
        waited_share=sum(waits) / (sum(waits) + step * len(waits)),
    )


def show(found: Figures) -> None:
    print(
        f"{found.bytes / 1e6:.0f} MB in {found.shards} shards, {found.samples} samples, "
        f"{found.tokens} tokens\n"
        f"cold: cat {found.cat_cold / 1e6:.0f} MB/s, loader {found.loader_cold / 1e6:.0f} MB/s, "
        f"ratio {found.ratio_cold:.2f}; must be at least {BAR}\n"
        f"warm: cat {found.cat_warm / 1e6:.0f} MB/s, loader {found.loader_warm / 1e6:.0f} MB/s\n"
        f"steps of {found.step_seconds * 1e3:.0f} ms waited {found.waited_seconds * 1e3:.1f} ms in "
        f"all, {found.waited_share:.2%} of their time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("--mib", type=int, default=1024, help="size of the cache")
    parser.add_argument("--shard-mib", type=int, default=1024, help="largest shard")
    parser.add_argument("--width", type=int, default=576, help="of a state")
    parser.add_argument("--mean", type=int, default=400, help="tokens of a sample")
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=2, help="packs a step")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--dtype", choices=[one.name for one in StateDtype], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the cache; default: temporary")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder = Path(place) / "cache"
        write_cache(folder, args)
        optim = OptimSection(packs_per_step=args.packs, micro_batch_tokens=args.pack, epochs=1.0)
        reader = ShardReader(folder)
        loader = TrainLoader(reader, optim, TTTSection(depth=args.depth), 0, RankInfo(0, 1, 0))
        if loader.total_steps < 4:
            parser.error(f"--mib {args.mib} is {loader.total_steps} steps: too few to read ahead")
        files = [shard_folder(folder) / entry.name for entry in reader.manifest.shards]
        found = measure(loader, files, args.rounds)
    show(found)
    if args.json:
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "folder")}
        figures = {**settings, **asdict(found), "bar": BAR, "reached": found.ratio_cold >= BAR}
        write_atomically(args.json, json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
