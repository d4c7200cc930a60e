"""Simulations of speculative decoding beside their exact values; exit code 1 when one is off.

    python -m eval.simulate [--seed 0] [--draws 50000] [--plots DIR] [--json FILE]

With right code chance puts a figure off in one run of about 300; another seed then has it right.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from conf.compose import sentence_on_error
from conf.runtime import plain, say, write_atomically
from eval.arithmetic.checks import check_lines
from eval.arithmetic.perturbed import NOISES, TARGET, acceptance, perturb
from eval.arithmetic.simulations import LENGTHS, off_the_formula, run_all
from eval.parser import Parser
from eval.plots import Curve, Labels, draw_curves


@dataclass(frozen=True)
class Request:
    seed: int
    draws: int
    plots: Path | None
    json: Path | None


def draw_all(folder: Path, seed: int, draws: int) -> None:
    """Tokens a call of the three drafts: the formula's curves, and what was drawn as rings."""
    curves: list[Curve] = []
    rings: list[Curve] = []
    for number, noise in enumerate(NOISES):
        checks = [off_the_formula(number, n, seed, draws) for n in LENGTHS]
        alpha = acceptance(TARGET, perturb(TARGET, noise))
        lengths: list[int] = [*LENGTHS]
        curves.append(Curve(f"α {alpha:.3f}", [one.expected for one in checks], None, lengths))
        rings.append(Curve("", [one.found for one in checks], None, lengths))
    labels = Labels("Tokens a verifier call, the rings drawn", "guesses a call, N", "tokens")
    draw_curves(folder / "simulated_tokens.png", labels, curves, rings)


def parse(argv: list[str] | None) -> Request:
    parser = Parser(
        prog="python -m eval.simulate",
        description="Simulate rounds on tables and compare with exact values. Exit code 1 when "
        "one is off.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=50_000, help="rounds of each simulation")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG plots there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    words = parser.parse_args(argv)
    if words.draws < 1000:
        parser.error(f"--draws={words.draws}: must be 1000 or more for errors to be normal")
    if not 0 <= words.seed < 2**63:
        parser.error(f"--seed={words.seed}: must be 0 or more and fit 63 bits")
    return Request(words.seed, words.draws, words.plots, words.json)


def main(argv: list[str] | None = None) -> int:
    """Print every simulation; 0 when all figures are as expected."""
    request = parse(argv)
    done = run_all(request.seed, request.draws)
    for one in done:
        for text in (f"\n{one.title}", *one.lines, *check_lines(one.checks)):
            say(text)
    off = [check.name for one in done for check in one.checks if not check.passed]
    total = sum(len(one.checks) for one in done)
    say(
        "\n" + (f"{total} figures, off: {'; '.join(off)}" if off else f"{total} figures, all right")
    )
    if request.plots:
        draw_all(request.plots, request.seed, request.draws)
    if request.json:
        figures = {"seed": request.seed, "draws": request.draws, "simulations": done}
        write_atomically(
            request.json, json.dumps(plain(figures), indent=2, ensure_ascii=False) + "\n"
        )
    return 1 if off else 0


if __name__ == "__main__":
    with sentence_on_error():
        raise SystemExit(main())
