"""Scale on paper: where reading, compute or communication binds, from 1 GPU to 64.

python -m launch.planning.scaling [--docs docs]    prints the tables; with a folder it also writes
them between the marks of its scaling.md, and draws scaling-plan.png.
"""

import sys
from dataclasses import replace
from pathlib import Path

from conf.compose import load_config, sentence_on_error
from conf.runtime import cache_dir, say, write_atomically
from conf.schema import ConfigError, Gpu, RunConfig, StateDtype
from eval.parser import Parser
from eval.plots import Curve, Labels, draw_panels
from eval.tables import Row, table
from launch.planning.hardware import GB, KINDS, USABLE
from launch.planning.hours import (
    Hours,
    break_even,
    capture_hours,
    epoch_hours,
    needed_read_gbs,
    online_hours,
)
from launch.planning.memory import capture_memory, online_fits, training_memory
from launch.planning.question import Question

RECIPE = ["draft=eagle3", "ttt=default", "optim=default", "plan.tokens=1e9"]
SCALED = ("llama3_1_8b", "llama3_3_70b")
SHIPPED = ("smollm2_135m", "qwen3_8b", "llama3_1_8b", "qwen3_32b", "llama3_3_70b")
GPUS = (1, 2, 4, 8, 16, 32, 64)
BEGIN, END = "<!-- made by launch.planning.scaling -->", "<!-- end -->"
PLOT, PAGE = "scaling-plan.png", "scaling.md"
TB = 1e12


def asked_of(verifier: str, *more: str) -> Question:
    cfg = load_config([f"verifier={verifier}", *RECIPE, *more], [])
    return Question.of(cfg, cache_dir(cfg))


def in_fp8(asked: Question) -> Question:
    capture = replace(asked.cfg.capture, dtype=StateDtype.fp8)
    return replace(asked, cfg=replace(asked.cfg, capture=capture))


def tables(scaled: list[Question]) -> list[str]:
    """Markdown: the assumptions, the shipped verifiers, and one table a scaled verifier."""
    lines = ["### What is assumed", "", assumptions(scaled[0].cfg), "", "### The shipped verifiers"]
    by_path = {asked.cfg.verifier.path: asked for asked in scaled}
    every = []
    for name in SHIPPED:
        path = load_config([f"verifier={name}"], []).verifier.path
        every.append(by_path.get(path) or asked_of(name))
    lines += ["", shipped(every)]
    for asked in scaled:
        lines += ["", f"### {asked.cfg.verifier.path}, 1 to 64 GPUs", "", scale(asked)]
    return lines


def assumptions(cfg: RunConfig) -> str:
    """The table of launch/planning/hardware.py, and the shares of plan.*."""
    rows: list[Row] = []
    for kind in Gpu:
        one = KINDS[kind]
        rates = (one.memory, one.link, one.network)
        memory, link, network = (f"{rate / GB:.0f}" for rate in rates)
        rows.append((kind.value, memory, f"{one.peak / TB:.0f}", link, network))
    head = ("GPU", "memory, GB", "peak bf16, TFLOP/s", "NVLink, GB/s", "network, GB/s")
    plan = cfg.plan
    words = (
        f"{USABLE:.0%} of the memory can be used. Of the peak the verifier's forward reaches "
        f"{plan.forward_mfu:.0%} and training {plan.train_mfu:.0%}; a machine of "
        f"{plan.node_gpus} GPUs reads and writes {plan.read_gbs:g} GB/s of the cache; samples have "
        f"{plan.sample_tokens:,} tokens, {plan.supervised_share:.0%} of them the answer. A step "
        f"takes a pack of {cfg.optim.micro_batch_tokens:,} tokens a GPU, and at least "
        f"{cfg.optim.packs_per_step} packs."
    )
    return f"{table(head, rows)}\n\n{words}"


def shipped(every: list[Question]) -> str:
    head = (
        "verifier", "parameters", "trained", "capture, GB a GPU", "training, GB a GPU",
        "KiB a token", "bf16, TB", "fp8, TB", "read, GB/s", "capture, h", "epoch, h",
    )  # fmt: skip
    rows: list[Row] = []
    for asked in every:
        size = asked.stored_bytes
        small = in_fp8(asked)
        rows.append((
            asked.cfg.verifier.path.rpartition("/")[2],
            f"{asked.verifier.parameters / 1e9:.3g} B",
            f"{asked.draft.trainable / 1e6:.1f} M",
            capture_cell(asked),
            f"{training_memory(asked, asked.cfg.engine.zero_stage).total / GB:.1f}",
            f"{size / asked.cfg.plan.tokens / 1024:.2f}",
            f"{size / TB:.3g}",
            f"{small.stored_bytes / TB:.3g}",
            f"{needed_read_gbs(asked):.2f}",
            f"{capture_hours(asked).total:.2f}",
            f"{epoch_hours(asked).total:.2f}",
        ))  # fmt: skip
    plan = every[0].cfg.plan
    words = f"{plan.tokens:.0e} tokens on {plan.gpus} x {plan.gpu.value}, ZeRO-1, states in bf16."
    return f"{words}\n\n{table(head, rows)}"


def capture_cell(asked: Question) -> str:
    """GB of a GPU; where that is too much, also with the verifier split over all of them."""
    alone = f"{capture_memory(asked).total / GB:.1f}"
    if capture_memory(asked).total <= asked.hardware.usable:
        return alone
    capture = replace(asked.cfg.capture, tensor_parallel=True)
    split = replace(asked, cfg=replace(asked.cfg, capture=capture))
    return f"{alone}; {capture_memory(split).total / GB:.1f} with capture.tensor_parallel"


def scale(asked: Question) -> str:
    """One row a number of GPUs; in brackets what binds."""
    head = (
        "GPUs", "capture, h", "epoch: compute", "disk, bf16", "links", "epoch bf16, h",
        "epoch fp8, h", "epoch online, h", "fp8 cache pays from",
    )  # fmt: skip
    rows: list[Row] = []
    for count in GPUS:
        here = asked.on(count)
        small, epoch = in_fp8(here), epoch_hours(here)
        passes = break_even(small)
        rows.append((
            f"{count}",
            bound(capture_hours(here)),
            f"{epoch.compute:.3g}",
            f"{epoch.disk:.3g}",
            f"{epoch.links:.2g}",
            bound(epoch),
            bound(epoch_hours(small)),
            f"{online_hours(here):.3g}" if online_fits(here) else "does not fit",
            "never" if passes is None else f"{passes:.2f} epochs",
        ))  # fmt: skip
    return table(head, rows)


def bound(hours: Hours) -> str:
    return f"{hours.total:.3g} ({hours.bound})"


def draw(path: Path, scaled: list[Question]) -> None:
    """Hours of one pass over the GPUs: each part, as if it were alone."""
    panels, groups = [], []
    for asked in scaled:
        bf16 = [epoch_hours(asked.on(count)) for count in GPUS]
        fp8 = [epoch_hours(in_fp8(asked).on(count)) for count in GPUS]
        name = asked.cfg.verifier.path.rpartition("/")[2]
        panels.append(Labels(name, "GPUs", "hours of one pass" if not panels else ""))
        groups.append([
            Curve("compute", [one.compute for one in bf16], at=GPUS),
            Curve("reading bf16", [one.disk for one in bf16], at=GPUS),
            Curve("reading fp8", [one.disk for one in fp8], at=GPUS),
            Curve("communication", [one.links or float("nan") for one in bf16], at=GPUS),
            Curve("the verifier's forward", forwards(asked), at=GPUS),
        ])  # fmt: skip
    draw_panels(path, panels, groups)


def forwards(asked: Question) -> list[float]:
    return [capture_hours(asked.on(count)).compute for count in GPUS]


def between_marks(page: Path, lines: list[str]) -> str:
    """The page with ``lines`` between its marks. Raises ConfigError where it has none."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{page}: has no lines {BEGIN} and {END}; put them where tables belong")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m launch.planning.scaling", description="Scale on paper.")
    parser.add_argument("--docs", type=Path, help="folder of scaling.md and scaling-plan.png")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    scaled = [asked_of(name) for name in SCALED]
    lines = tables(scaled)
    for line in lines:
        say(line)
    if options.docs is not None:
        write_atomically(options.docs / PAGE, between_marks(options.docs / PAGE, lines))
        draw(options.docs / PLOT, scaled)
    return 0


if __name__ == "__main__":
    with sentence_on_error():
        sys.exit(main())
