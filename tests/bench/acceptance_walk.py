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
    for index in progress(chosen, len(chosen), "held out", "answer"):
        pack = CachedPack.of([source.read(index)])
        (sample,) = pack.samples
        batch = batch_of(pack, Chains.of_answers(sample.loss_mask, pack.starts))
        batch = on_device(batch, CPU, torch.float32)
        proposed = unroll_own(draft, batch, kernel, max(LENGTHS)).T  # [T, N]
        hits = count_hits(proposed, sample.input_ids)
        for n in LENGTHS:
            counted = [walk(hits, a - 1, b - 2, n) for a, b in answers_of(sample.loss_mask)]
            found[str(n)].append(sum(counted, Counters()))
    return found


def tasks_of(source: SomeStates) -> list[str]:
    """The held-out samples' ids, in the order of the counters."""
    return [source.read(index).sample.id for index in source.valid_indices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--layers", default="2,15,27")
    parser.add_argument("heads", nargs="+", type=Path)
    args = parser.parse_args()
    use_threads(1)
    layers = [int(word) for word in args.layers.split(",")]
    inputs = find_inputs(args.work, HELD, layers, None, [])
    cache = cache_dir(inputs.cfg)
    facts = load_facts(inputs.cfg.verifier, cache)
    ends = load_ends(inputs.cfg.verifier, cache, torch.float32)
    for folder in args.heads:
        found = walk_head(load_head(folder, facts, ends), inputs.source)
        rows = {n: [asdict(one) for one in counters] for n, counters in found.items()}
        total = {n: sum(counters, Counters()).tau for n, counters in found.items()}
        document = {"ids": tasks_of(inputs.source), "counters": rows}
        write_atomically(folder / "walk.json", json.dumps(document))
        print(json.dumps({"head": str(folder), "tau": total}), flush=True)


if __name__ == "__main__":
    main()
