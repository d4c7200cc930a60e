"""Time and memory of one training step against length, steps, supervised share and vocabulary.

    python tests/bench/scaling.py [--threads 2] [--json FILE] [--plot docs/scaling.png] [--tiny]

A step is forward and backward in fp32 on one document with its answer at the end, for a head of
SmolLM2's size. One axis moves at a time around 2048 tokens, K = 7, 40 per cent supervised and a
draft vocabulary of 8192. Attention over the step-0 keys, quadratic in length, is timed apart; the
rest is held against a straight line in guesses, which are the supervised rows of all steps. Long
points have a process of their own. Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT))

from arena import note  # noqa: E402  after the path is set
from bars import bar_lines  # noqa: E402
from machine import cpu_model  # noqa: E402
from scaling_points import FULL, SMALL, Plan, measure, measure_alone  # noqa: E402
from scaling_report import Results, as_json, bars_of, page, title  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402


def measure_all(plan: Plan, threads: int, tries: int) -> Results:
    problems, results = plan.problems(), {}
    measure(problems[0], threads, 1)  # libraries take memory for themselves at their first use
    begin = perf_counter()
    for number, problem in enumerate(problems, start=1):
        alone = problem.shape.tokens >= plan.alone
        results[problem] = (measure_alone if alone else measure)(problem, threads, tries)
        note(
            f"[{perf_counter() - begin:4.0f} s] {number} of {len(problems)}: {title(problem)}: "
            f"{results[problem].seconds:.2f} s; "
            f"matrix product {results[problem].rate / 1e9:.0f} GFLOP/s"
        )
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tries", type=int, default=3, help="timed steps of a short point")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "scaling.png")
    parser.add_argument("--tiny", action="store_true", help="try the path; figures mean nothing")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # Here, so that the processes of long points, which import this file, do without it.
    from scaling_plot import draw

    plan, load = SMALL if args.tiny else FULL, os.getloadavg()[0]
    machine = f"{cpu_model()}, {os.cpu_count()} cores, {args.threads} threads"
    print(f"{machine}, load {load:.2f}" + ("; tiny: figures mean nothing" if args.tiny else ""))
    begin = perf_counter()
    results = measure_all(plan, args.threads, args.tries)
    minutes = (perf_counter() - begin) / 60
    rates = [measured.rate / 1e9 for measured in results.values()]
    print(f"{minutes:.1f} minutes; matrix product {min(rates):.0f} to {max(rates):.0f} GFLOP/s\n")
    print(page(plan, results))
    print("\n".join(bar_lines(bars_of(plan, results))))
    draw(plan, results, args.plot)
    print(f"\nplot: {args.plot}")
    if args.json:
        run = {"command": sys.argv, "machine": machine, "threads": args.threads, "load": load}
        content = run | {"minutes": minutes} | as_json(plan, results)
        write_atomically(args.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
