"""Entry: what this machine has, what of Eyrie works on it, and what to install for the rest.

python -m launch.doctor [--cache FOLDER] [--smoke]

Exits with 1 where something is missing that every job needs, or where the smoke run fails. It
needs none of Eyrie's packages, so that it can name those that are missing.
"""

import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.runtime import say
from eval.parser import Parser
from launch.checkup.abilities import Ability, abilities
from launch.checkup.machine import Machine, Vllm
from launch.checkup.probes import examine
from launch.checkup.smoke import STEPS, smoke

WIDTH = 30  # of the first column


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = read_options(sys.argv[1:] if argv is None else argv)
    machine = examine(options.cache, options.disk_mib)
    found = abilities(machine)
    for line in page(machine, found):
        say(line)
    if not all(one.works for one in found if one.needed):
        return 1
    if options.smoke and not smoke_passes(options.ranks or ranks_of(machine)):
        return 1
    return 0


def read_options(argv: list[str]) -> Namespace:
    parser = Parser(
        prog="python -m launch.doctor", description="What this machine has, and what works on it."
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("cache"), help="the folder that run.cache will name"
    )
    parser.add_argument(
        "--disk-mib", type=int, default=256, help="size of the file that is written there and read"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="also run the whole job in a few steps, about a minute"
    )
    parser.add_argument("--ranks", type=int, help="of the smoke run; default: one a GPU, else one")
    options = parser.parse_args(argv)
    for name in ("disk_mib", "ranks"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}={value}: must be 1 or more")
    return options


def ranks_of(machine: Machine) -> int:
    return max(1, machine.torch.gpus if machine.torch is not None else 1)


def page(machine: Machine, found: list[Ability]) -> list[str]:
    lines = ["This machine", *(f"  {line}" for line in described(machine)), "", "What works"]
    for one in found:
        mark = "yes" if one.works else "NO " if one.needed else "no "
        lines.append(f"  {mark} {one.name:{WIDTH}} {one.note}".rstrip())
    ways = list(dict.fromkeys(one.command for one in found if one.command))
    if ways:
        lines += ["", "To get the rest, from the checkout", *(f"  {way}" for way in ways)]
    missing = [one.name for one in found if one.needed and not one.works]
    if missing:
        lines += ["", f"Every job needs {', '.join(missing)}; the rest was not looked at."]
    return lines


def described(machine: Machine) -> list[str]:
    """A line a part: what there is, without a judgement."""
    driver, torch, disk, vllm = machine.driver, machine.torch, machine.disk, machine.vllm
    gpus = driver.gpus if driver else []
    built = "no torch" if torch is None else f"torch {torch.version}, CUDA {torch.cuda or 'none'}"
    rates = (
        disk.problem
        if disk.write_mbs is None or disk.read_mbs is None
        else f"writes {disk.write_mbs:,.0f} MB/s, reads {disk.read_mbs:,.0f} MB/s"
    )
    lines = [f"GPU         {one.name}, {one.memory_gib:.0f} GiB, {one.capability}" for one in gpus]
    return [
        *(lines or ["GPU         none"]),
        "driver      " + (f"{driver.version}, CUDA up to {driver.cuda}" if driver else "none"),
        f"torch       {built}, NCCL {torch.nccl if torch and torch.nccl else 'none'}",
        f"Python      {machine.python}; {machine.cores} cores, {machine.memory_gib:.0f} GiB",
        f"disk        {disk.folder}: {disk.free_gb:,.0f} GB free, {rates}",
        f"flash-attn  {machine.flash_attn or 'none'}",
        f"vLLM        {vllm_line(vllm)}",
        f"programs    {', '.join(machine.programs) or 'none'}",
    ]


def vllm_line(vllm: Vllm | None) -> str:
    return "none" if vllm is None else f"{vllm.version or 'none'} in {vllm.python}"


def smoke_passes(ranks: int) -> bool:
    say(f"\nSmoke run: the whole job, {STEPS} steps, {ranks} ranks, a random verifier")
    with TemporaryDirectory(prefix="eyrie-smoke-") as folder:
        run = smoke(Path(folder), ranks)
    for line in run.tail:
        say(f"  | {line}")
    outcome = "passed" if run.problem is None else f"FAILED: {run.problem}"
    say(f"Smoke run {outcome} after {run.seconds:.0f} s")
    return run.problem is None


if __name__ == "__main__":
    sys.exit(main())
