"""One training step and decoding on a GPU: heads of Llama-3.1-8B's and 70B's sizes, in bf16.

    python tests/bench/gpu.py [--minutes 5] [--lengths 2048 8192 32768 65536] [--shares 40 100]
                              [--only steps|decoding] [--compile] [--json FILE] [--tiny]

Random weights and states, K = 7, one document with its answer at the end. For each length and share
every attention kernel that is there, side by side: seconds of forward and backward between CUDA
events, MFU by counted FLOPs, memory beyond weights and states. Where a step does not fit, it is
tried again with activation checkpointing. Then the gradient in bf16 against the plain kernel in
fp32. It stops between cases when the minutes are over.

Decoding: a verifier of 8B's width and eight layers with a random head. Single steps of 1, 5 and 16
tokens, eager, compiled and graphed, and whole answers without a draft, with chains of 4 and with a
tree, by each kind of steps; in fp32 all must give the same tokens. ``--compile`` adds the compiled
ones, which take a minute or so a shape.

Without CUDA it tries its path on tiny shapes. ``python -m pytest -m gpu`` runs every check that
needs a GPU, this one among them, in at most eight minutes.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT))

import torch  # noqa: E402  after the path is set
from arena import note  # noqa: E402
from bars import Bar, bar_lines, bars_as_json  # noqa: E402
from gpu_decoding import decodings  # noqa: E402
from gpu_report import (  # noqa: E402
    Case,
    Figure,
    Taken,
    bars_of,
    described,
    parity_lines,
    table,
)
from machine import (  # noqa: E402
    device_mm_rate,
    device_name,
    extra_bytes_of,
    peak_flops,
    seconds_of,
)
from problem import Place, Problem, make_batch, make_module, take_step  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers.utils.import_utils import is_flash_attn_2_available  # noqa: E402
from workload import TINY, Shape  # noqa: E402

from conf.runtime import write_atomically  # noqa: E402
from data.records import TTTBatch  # noqa: E402
from models.attention import Kernel  # noqa: E402
from models.kernels import CPU_FLASH, CUDA_FLASH, FLASH_ATTN, PLAIN  # noqa: E402
from train.loss import Distillation  # noqa: E402
from train.ttt import TrainingTimeTest  # noqa: E402

Made = TypeVar("Made")
LLAMA_8B = Shape(
    batch=1,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocab=128256,
    draft_vocab=32000,
)
LLAMA_70B = replace(LLAMA_8B, hidden=8192, heads=64, mlp=28672)
HEADS = {"Llama-3.1-8B": LLAMA_8B, "Llama-3.3-70B": LLAMA_70B}
PARITY = Shape(
    batch=2,
    tokens=256,
    hidden=512,
    heads=4,
    kv_heads=2,
    head_dim=128,
    mlp=1024,
    vocab=2048,
    draft_vocab=512,
)
SHORT = 2048  # tokens up to which the plain kernel, which writes all scores down, takes part
DOES_NOT_FIT = "does not fit"
GOAL_CHIPS = ("H100", "H200")  # that the MFU's bar is for
GUESS = 0.4  # of the peak, before a step is timed
FEW, MANY = 3, 10  # timed steps of a case whose step is longer than a second, and of others


@dataclass
class Budget:
    """Minutes that may be spent, and a guess of what a case will take."""

    seconds: float
    rate: float  # FLOP/s, of the last step that was timed

    def __post_init__(self) -> None:
        self.begin = perf_counter()

    def allows(self, problem: Problem) -> bool:
        flops = problem.flops + problem.attention_flops
        needed = (1 + FEW) * flops / self.rate
        return perf_counter() - self.begin + needed <= self.seconds

    def learn(self, figure: Figure) -> None:
        if figure.taken:
            self.rate = figure.mfu * figure.peak


def kernels_of(device: torch.device, tokens: int) -> list[Kernel]:
    flash = [CPU_FLASH]
    if device.type == "cuda":
        flash = [CUDA_FLASH, *([FLASH_ATTN] if is_flash_attn_2_available() else [])]
    return [*flash, PLAIN] if tokens <= SHORT else flash


def fitting(make: Callable[[], Made]) -> Made | None:
    """What ``make`` makes; None where the device's memory does not hold it."""
    try:
        return make()
    except torch.OutOfMemoryError:
        return None


def measure(module: TrainingTimeTest, batch: TTTBatch) -> Taken:
    """One step for memory, which warms up, then some for time."""
    device, losses = batch.lse.device, []

    def step() -> None:
        losses.append(take_step(module, batch))

    begin = perf_counter()
    extra = extra_bytes_of(step, device)
    count = FEW if perf_counter() - begin > 1 else MANY
    seconds = [seconds_of(step, device) for _ in range(count)]
    return Taken(seconds, extra, losses[0].item())


def release() -> None:
    """Give all that is unused back, so that one case cannot take room from the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class Bench:
    """Where and against what the cases of every head are measured."""

    place: Place
    peak: float  # FLOP/s that the shares are of
    budget: Budget

    def figures_of(self, head: str, problems: list[Problem], compiled: bool) -> Iterator[Figure]:
        """Every length, share and kernel of one head; one module serves them all."""
        module = fitting(lambda: make_module(problems[0], self.place, PLAIN))
        if module is not None and compiled:
            module.compile_parts()
        for problem in problems:
            release()
            if not self.budget.allows(problem):
                yield Figure(Case(head, problem), self.peak, error="no time left")
            elif module is None:
                yield Figure(Case(head, problem), self.peak, error=DOES_NOT_FIT)
            else:
                yield from self.figures_at(head, problem, module)

    def figures_at(self, head: str, problem: Problem, module: TrainingTimeTest) -> Iterator[Figure]:
        """Every kernel; recomputed where it does not fit otherwise."""
        batch = fitting(lambda: make_batch(problem, self.place))
        if batch is None:
            yield Figure(Case(head, problem), self.peak, error=DOES_NOT_FIT)
            return
        for module.kernel in kernels_of(self.place.device, problem.shape.tokens):
            for module.recompute in (False, True):
                case = Case(head, replace(problem, recompute=module.recompute), module.kernel.name)
                taken = fitting(lambda: measure(module, batch))
                module.zero_grad(set_to_none=True)
                release()
                figure = Figure(case, self.peak, taken, "" if taken else DOES_NOT_FIT)
                yield figure
                if taken:
                    self.budget.learn(figure)
                    break


def parity(device: torch.device) -> dict[str, float]:
    """Each kernel's gradient in bf16 against the plain one's in fp32 on the same numbers."""
    problem, place = Problem(PARITY), Place(device, torch.bfloat16)
    module, batch = make_module(problem, place, PLAIN), make_batch(problem, place)
    known = module.distillation
    wide = Distillation(known.kind, known.head.float(), known.config)
    exact = TrainingTimeTest(deepcopy(module.draft).float(), wide, module.ttt, PLAIN)
    take_step(exact, replace(batch, aux=batch.aux.float(), last=batch.last.float()))
    wanted = gradient(exact)
    errors = {}
    for kernel in kernels_of(device, SHORT):
        for module.recompute in (False, True):
            module.kernel = kernel
            take_step(module, batch)
            name = kernel.name + (", recomputed" if module.recompute else "")
            errors[name] = float((gradient(module) - wanted).norm() / wanted.norm())
    return errors


def gradient(module: TrainingTimeTest) -> Tensor:
    """All gradients as one vector, in fp64."""
    return torch.cat([p.grad.flatten().double() for p in module.parameters() if p.grad is not None])


def problems_of(args: argparse.Namespace, shape: Shape) -> list[Problem]:
    return [
        Problem(replace(shape, tokens=tokens), share)
        for tokens in args.lengths
        for share in args.shares
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 65536])
    parser.add_argument("--shares", type=int, nargs="+", default=[40, 100])
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--only", choices=("steps", "decoding"), help="one of the two parts")
    parser.add_argument("--tiny", action="store_true", help="try the path; figures mean nothing")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if not (args.tiny or torch.cuda.is_available()):
        print("No CUDA here: tiny shapes on the CPU, whose figures mean nothing.")
        print("The table of a GPU is still to be measured.")
        args.tiny = True
    if args.tiny:
        args.lengths = [32, 64]
    return args


def training_steps(args: argparse.Namespace, bench: Bench) -> list[Figure]:
    figures: list[Figure] = []
    for head, shape in ({"tiny": replace(TINY, batch=1)} if args.tiny else HEADS).items():
        found: list[Figure] = []
        for figure in bench.figures_of(head, problems_of(args, shape), args.compile):
            note(described(figure))
            found.append(figure)
        print("\n".join(table(head, found)), flush=True)
        figures += found
    return figures


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name, rate = device_name(device), device_mm_rate(device, 256 if args.tiny else 8192)
    listed = peak_flops(name)
    peak = listed or rate
    source = "its data sheet" if listed else "its own product, for the table lacks it"
    machine = f"{name}, torch {torch.__version__}, matrix product {rate / 1e12:.3g} TFLOP/s"
    print(f"{machine}\nMFU is of {peak / 1e12:.3g} TFLOP/s: {source}\n", flush=True)
    budget = Budget(60 * args.minutes, GUESS * peak)
    rows: dict[str, Any] = {}
    bars: list[Bar] = []
    if args.only != "decoding":
        errors = parity(device)
        print("\n".join(parity_lines(errors)), flush=True)
        figures = training_steps(args, Bench(Place(device, torch.bfloat16), peak, budget))
        rows |= {"cases": [f.as_json() for f in figures], "gradient_errors": errors}
        goal = any(chip in name for chip in GOAL_CHIPS) and not args.tiny
        bars += bars_of(figures, errors, goal)
    if args.only != "steps":
        release()
        decoded = decodings(TINY if args.tiny else LLAMA_8B, device, args.compile)
        print("\n".join(decoded.lines), flush=True)
        rows |= {"decoding": decoded.as_json()}
        bars += decoded.bars
    print("\n".join(bar_lines(bars)))
    if args.json:
        run = {"command": sys.argv, "machine": machine, "matrix_product_flops": rate, "peak": peak}
        content = run | rows | {"bars": bars_as_json(bars)}
        write_atomically(args.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
