"""A verifier's step on this machine: eager with growing and with fixed shapes, compiled, graphed.

    python tests/bench/steps.py --verifier FOLDER [--dtype bfloat16] [--tokens 1 5 8] [--batch 1]
                                [--context 128] [--repeats 50] [--no-compile] [--json FILE]

One process, the kinds in turn, random text in the cache; medians. The first step of each kind is
timed apart: compiling takes a minute or two a shape on a CPU.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT))

import torch  # noqa: E402  after the path is set
from decoding import Contest, kinds_on, step_lines, step_times  # noqa: E402
from machine import device_name  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402
from conf.schema import VerifierSection  # noqa: E402
from models.steps import CAPACITIES  # noqa: E402
from models.verifier import Verifier  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verifier", required=True, help="its folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 8])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    section = VerifierSection(path=args.verifier)
    verifier = Verifier.load(section, Path("cache"), device, dtype)
    room = -(-(args.context + max(args.tokens)) // CAPACITIES) * CAPACITIES
    contest = Contest(verifier, args.batch, args.context, room)
    kinds = kinds_on(device, not args.no_compile)
    machine = f"{device_name(device)}, {args.threads} threads, torch {torch.__version__}"
    print(f"{machine}\n{args.verifier}, {args.dtype}", flush=True)
    times = step_times(contest, args.tokens, kinds, args.repeats)
    print("\n".join(step_lines(times)))
    if args.json:
        found = {"command": sys.argv, "machine": machine, "steps": [one.as_json() for one in times]}
        write_atomically(args.json, json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
