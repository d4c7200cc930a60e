"""One training step of Eyrie against SpecForge's and speculators', on the same shapes and data.

    python tests/bench/step.py [--envs DIR] [--rounds 3] [--depths 7 3] [--shares 8 40 100]
                               [--json FILE] [--no-compiled] [--without-peers] [--tiny]

A step is forward and backward on 4 x 512 tokens in fp32, of which each sample's answer holds 8, 40
or 100 per cent. The peers run eagerly, in environments of their own (tests/bench/peer_envs.sh).
Each contender is a process; one is at work at a time, and a round gives every one its turn between
two looks at the machine's own matrix product. A round in which that falls by more than a tenth is
dropped and repeated. Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT))

import torch  # noqa: E402  after the path is set
from arena import Arena, Rival, Timing, note  # noqa: E402
from contender import mm_rate  # noqa: E402
from machine import cpu_model  # noqa: E402
from step_report import (  # noqa: E402
    BAR_DEPTH,
    OURS,
    OURS_BF16,
    PEERS,
    Figures,
    as_json,
    bars_of,
    figures_of,
    page,
)
from workload import TINY, Case, Shape  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402

COMPILED_SHARE = 40  # the one case that is also run under torch.compile
MEMORY_TRIES = 1


def rivals_of(args: argparse.Namespace, compiled: bool = False) -> list[Rival]:
    mark = " compiled" if compiled else ""
    own = Path(sys.executable)
    ours = [Rival(OURS + mark, "contender_eyrie.py", own, compiled=compiled)]
    if not compiled:
        ours.append(Rival(OURS_BF16, "contender_eyrie.py", own, dtype="bfloat16"))
    peers = () if args.without_peers else PEERS
    return ours + [
        Rival(peer + mark, f"contender_{peer}.py", python_of(args.envs, peer), compiled=compiled)
        for peer in peers
    ]


def python_of(envs: Path, peer: str) -> Path:
    python = (envs / peer / "bin" / "python").absolute()  # a link, which must not be resolved
    if not python.exists():
        raise SystemExit(
            f"{envs} holds no environment of {peer}: make it with bash tests/bench/peer_envs.sh "
            f"{envs}, or compare with nobody (--without-peers)"
        )
    return python


def contest(
    args: argparse.Namespace, rivals: list[Rival], cases: list[Case]
) -> tuple[list[Figures], dict[str, Any]]:
    """Memory, then time, of every rival in every case -> figures, and what describes the run."""
    shape = TINY if args.tiny else Shape()
    arena = Arena(rivals, ["--shape", json.dumps(asdict(shape))], args.threads)
    rate = partial(mm_rate, 256, 256) if args.tiny else mm_rate
    memory = arena.memory(cases, MEMORY_TRIES)
    timing = arena.time(cases, args.rounds, rate)
    facts: dict[str, Any] = facts_of(timing, arena)
    if rivals[0].name == OURS:
        middle = Case(COMPILED_SHARE, max(args.depths))
        note("gradients of bf16 against fp64")
        facts |= arena.ask(rivals[1], middle, "gradient_error")
    arena.close()
    kept = timing.kept()
    figures = [
        figures_of(shape, case, rivals, [s for s in kept if s.case == case], memory[case])
        for case in cases
    ]
    return figures, facts


def facts_of(timing: Timing, arena: Arena) -> dict[str, Any]:
    kept = timing.kept()
    return {
        "matrix_product_flops": [sample.rates for sample in timing.samples],
        "rounds_dropped": len(timing.samples) - len(kept),
        "versions": {p.rival.name: p.versions for p in arena.processes.values()},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--envs", type=Path, default=ROOT / ".bench", help="the peers' environments"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=[BAR_DEPTH, 3])
    parser.add_argument("--shares", type=int, nargs="+", default=[8, 40, 100])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compiled", action="store_true", help="leave torch.compile out")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="try the path; figures mean nothing")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rivals = rivals_of(args)
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    machine = f"{cpu_model()}, {os.cpu_count()} cores, {args.threads} threads"
    print(f"{machine}, load {load:.2f}" + ("; tiny: figures mean nothing" if args.tiny else ""))
    cases = [Case(share, depth) for depth in args.depths for share in args.shares]
    figures, facts = contest(args, rivals, cases)
    compiled: list[Figures] = []
    if not (args.no_compiled or args.tiny):
        case = Case(COMPILED_SHARE, max(args.depths))
        compiled, extra = contest(args, rivals_of(args, compiled=True), [case])
        facts["versions"] |= extra["versions"]
    bars = bars_of(figures, facts.get("gradient_error"))
    rates = [max(pair) / 1e9 for pair in facts["matrix_product_flops"]]
    print(
        f"matrix product {min(rates):.0f} to {max(rates):.0f} GFLOP/s; "
        f"{facts['rounds_dropped']} samples dropped because it fell\n"
    )
    print(page(figures, compiled, bars))
    if args.json:
        run = {"command": sys.argv, "machine": machine, "threads": args.threads, "load": load}
        content = run | facts | as_json(figures, compiled, bars)
        write_atomically(args.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
