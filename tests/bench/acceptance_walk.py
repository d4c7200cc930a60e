"""Held-out acceptance of heads, whoever trained them: the rounds of a greedy loop, not decoded.

    python tests/bench/acceptance_walk.py --work DIR HEAD_DIR ...

The verifier's own greedy answers to the held-out prompts are cut at their length limit, so a round
near the end has guesses past the known text; they count as misses for every head alike. Float32,
whatever the training was. Beside each head it writes walk.json: the counters of every prompt, by
the number of guesses a round.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
sys.path.append(str(ROOT / "tests" / "bench"))

import torch  # noqa: E402  after the path is set
from acceptance_data import HELD  # noqa: E402
from acceptance_states import CPU, SomeStates, find_inputs  # noqa: E402

from conf.runtime import cache_dir, progress, write_atomically  # noqa: E402
from conf.schema import DraftAttentionKind  # noqa: E402
from data.chains import Chains  # noqa: E402
from data.distributed import use_threads  # noqa: E402
from data.loader import batch_of, on_device  # noqa: E402
from data.records import CachedPack  # noqa: E402
from eval.acceptance import Counters, count_hits, walk  # noqa: E402
from models.eagle3 import Eagle3Draft  # noqa: E402
from models.heads import load_head  # noqa: E402
from models.kernels import choose_kernel  # noqa: E402
from models.verifier import load_ends, load_facts  # noqa: E402
from train.ttt import unroll_own  # noqa: E402

LENGTHS = range(1, 8)  # guesses a round
TOGETHER = 8  # samples of one pack


def answers_of(mask: torch.Tensor) -> list[tuple[int, int]]:
    """The supervised spans [a, b) of one sample."""
    edges = torch.cat([torch.zeros(1), mask.float(), torch.zeros(1)]).diff()
    starts, ends = (edges > 0).nonzero().flatten(), (edges < 0).nonzero().flatten()
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


@torch.no_grad()
def walk_head(draft: Eagle3Draft, source: SomeStates) -> dict[str, list[Counters]]:
    """By length of the chain, the counters of every held-out sample."""
    config = draft.config
    kernel = choose_kernel(DraftAttentionKind.auto, CPU, torch.float32, config.head_dim)
    found: dict[str, list[Counters]] = {str(n): [] for n in LENGTHS}
    chosen = source.valid_indices
    groups = [chosen[i : i + TOGETHER] for i in range(0, len(chosen), TOGETHER)]
    for group in progress(groups, len(groups), "held out", "pack"):
        pack = CachedPack.of([source.read(index) for index in group])
        mask = torch.cat([sample.loss_mask for sample in pack.samples])
        batch = batch_of(pack, Chains.of_answers(mask, pack.starts))
        batch = on_device(batch, CPU, torch.float32)
        proposed = unroll_own(draft, batch, kernel, max(LENGTHS)).T  # [T, N]
        for sample, rows in zip(pack.samples, proposed.split(lengths_of(pack)), strict=True):
            hits = count_hits(rows, sample.input_ids)
            for n in LENGTHS:
                counted = [walk(hits, a - 1, b - 2, n) for a, b in answers_of(sample.loss_mask)]
                found[str(n)].append(sum(counted, Counters()))
    return found


def lengths_of(pack: CachedPack) -> list[int]:
    return [len(sample.input_ids) for sample in pack.samples]


def tasks_of(source: SomeStates) -> list[str]:
    """The held-out samples' ids, in the order of the counters."""
    return [source.read(index).sample.id for index in source.valid_indices]


def walk_all(work: Path, layers: list[int], heads: list[Path]) -> None:
    inputs = find_inputs(work, HELD, layers, None, [])
    cache = cache_dir(inputs.cfg)
    facts = load_facts(inputs.cfg.verifier, cache)
    ends = load_ends(inputs.cfg.verifier, cache, torch.float32)
    ids = tasks_of(inputs.source)
    for folder in heads:
        draft = load_head(folder, facts, ends)
        assert isinstance(draft, Eagle3Draft)
        found = walk_head(draft, inputs.source)
        rows = {n: [asdict(one) for one in counters] for n, counters in found.items()}
        total = {n: sum(counters, Counters()).tau for n, counters in found.items()}
        write_atomically(folder / "walk.json", json.dumps({"ids": ids, "counters": rows}))
        print(json.dumps({"head": str(folder), "tau": total}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", default="2,15,27")
    parser.add_argument("heads", nargs="+", type=Path)
    args = parser.parse_args()
    use_threads(1)
    walk_all(args.work, [int(word) for word in args.layers.split(",")], args.heads)


if __name__ == "__main__":
    main()
