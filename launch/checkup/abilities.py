"""What of Eyrie a machine can do, why not the rest, and the command that would change it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launch.checkup.machine import Driver, Machine, Package, Torch

INSTALL = "python -m pip install -c launch/constraints.txt"
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
FLASH_ATTN = "python -m pip install flash-attn==2.8.3.post2 --no-build-isolation"
COMPILERS = "sudo apt-get install build-essential"
HEADER = "sudo apt-get install python3-dev"
VLLM_CAPTURES = "0.18"  # the first with extract_hidden_states
OLDEST_PYTHON = "3.11"


@dataclass(frozen=True)
class Ability:
    name: str  # a knob's value, a command, or what every job needs
    works: bool
    note: str
    command: str | None = None  # that makes it work
    needed: bool = False  # every job needs it


def numbers(version: str) -> list[int]:
    """2.8.3.post2 -> [2, 8, 3]: what versions are compared by here."""
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []


def at_least(version: str | None, wanted: str) -> bool:
    return version is not None and numbers(version) >= numbers(wanted)


def on_gpu(machine: Machine) -> bool:
    return machine.torch is not None and machine.torch.gpus > 0


def abilities(machine: Machine) -> list[Ability]:
    """What every job needs comes first; where some of it is missing, no more can be said."""
    needs = [*what_all_need(machine)]
    if not all(need.works for need in needs):
        return needs
    return [
        *needs,
        *devices(machine),
        *captures(machine),
        *attention(machine),
        *compiled(machine),
        *operators(machine),
        *served(machine),
        *launched(machine),
    ]


def what_all_need(machine: Machine) -> Iterator[Ability]:
    right = at_least(machine.python, OLDEST_PYTHON)
    note = machine.python if right else f"{machine.python}; {OLDEST_PYTHON} or later is needed"
    way_out = None if right else "PYTHON=/path/to/python3.11 bash launch/demo.sh"
    yield Ability("Python", right, note, way_out, needed=True)
    wrong = [package for package in machine.packages if not package.fits]
    for package in wrong:
        have = f"{package.installed} is installed" if package.installed else "not installed"
        note = f"{have}; {package.name}{package.wanted} is needed"
        yield Ability(package.name, False, note, install(package, machine.driver), needed=True)
    if not wrong:
        yield Ability("packages", True, f"all {len(machine.packages)} fit", needed=True)
    disk = machine.disk
    way_out = None if disk.problem is None else "python -m launch.doctor --cache OTHER_FOLDER"
    note = f"{disk.folder} can be written" if disk.problem is None else disk.problem
    yield Ability("run.cache", disk.problem is None, note, way_out, needed=True)


def install(package: Package, driver: Driver | None) -> str:
    """torch goes first and alone, so that nothing else chooses its build."""
    if package.name != "torch":
        return f"{INSTALL} -e ."
    index = "" if driver else f" --index-url {CPU_INDEX}"
    return f"{INSTALL} torch=={TORCH}{index}"


def devices(machine: Machine) -> Iterator[Ability]:
    driver, torch = machine.driver, machine.torch
    assert torch is not None, "judged before"
    if on_gpu(machine):
        shown = len(driver.gpus) if driver else torch.gpus
        hidden = "" if torch.gpus >= shown else f" of {shown}; CUDA_VISIBLE_DEVICES hides some"
        yield Ability("run.device=cuda", True, f"{torch.gpus} GPUs{hidden}")
        note = f"NCCL {torch.nccl}" if torch.nccl else "this torch has no NCCL"
        yield Ability("several GPUs", torch.nccl is not None, note)
        return
    note, command = no_cuda(driver, torch)
    yield Ability("run.device=cuda", False, note, command)
    yield Ability("run.device=cpu", True, f"{machine.cores} cores; ranks meet over gloo")


def no_cuda(driver: Driver | None, torch: Torch) -> tuple[str, str | None]:
    """Why torch has no GPU, and the command if there is one."""
    if driver is None:
        return "nvidia-smi shows no GPU", None
    if torch.cuda is None:
        return "torch is a build for CPUs", f"{INSTALL} --force-reinstall torch=={TORCH}"
    if driver.cuda and numbers(driver.cuda)[0] < numbers(torch.cuda)[0]:
        return (
            f"driver {driver.version} runs CUDA up to {driver.cuda}, torch is built for "
            f"{torch.cuda}: a newer driver is needed",
            None,
        )
    return "torch cannot use the GPUs that nvidia-smi shows", (
        "python -c 'import torch; torch.cuda.init()'"
    )


def captures(machine: Machine) -> Iterator[Ability]:
    for backend in ("transformers", "layers", "dumped"):
        yield Ability(f"capture.backend={backend}", True, "")
    vllm, name = machine.vllm, "capture.backend=vllm"
    if not on_gpu(machine):
        yield Ability(name, False, "its connector needs a GPU")
    elif vllm is None or vllm.version is None:
        yield Ability(name, False, "no Python with vLLM", "export EYRIE_VLLM_PYTHON=/path/python")
    else:
        right = at_least(vllm.version, VLLM_CAPTURES)
        note = f"vLLM {vllm.version}" + ("" if right else f"; {VLLM_CAPTURES} is needed")
        way_out = None if right else f"{vllm.python} -m pip install 'vllm>={VLLM_CAPTURES}'"
        yield Ability(name, right, note, way_out)


def attention(machine: Machine) -> Iterator[Ability]:
    """By the limits of the kernels themselves, for heads whose width they take."""
    from models.kernels import FLASH_ATTN_VERSION, FLASH_CAPABILITY  # torch is there by now

    yield Ability("engine.attention=plain", True, "the reference; keeps all scores")
    torch_flash, flash_attn = "engine.attention=torch_flash", "engine.attention=flash_attn"
    if not on_gpu(machine):
        yield Ability(torch_flash, True, "PyTorch's kernel for CPUs")
        yield Ability(flash_attn, False, "needs CUDA")
        return
    oldest = ".".join(map(str, FLASH_CAPABILITY))
    gpus = machine.driver.gpus if machine.driver else []
    old = [gpu for gpu in gpus if not at_least(gpu.capability, oldest)]
    if old:
        note = f"{old[0].name} has compute capability {old[0].capability}, {oldest} is needed"
        yield Ability(torch_flash, False, note)
        yield Ability(flash_attn, False, note)
        return
    yield Ability(torch_flash, True, "in 16 bits")
    if at_least(machine.flash_attn, FLASH_ATTN_VERSION):
        yield Ability(flash_attn, True, f"flash-attn {machine.flash_attn}, in 16 bits")
        return
    note = f"flash-attn {machine.flash_attn or 'is not installed'}; {FLASH_ATTN_VERSION} is needed"
    if "nvcc" not in machine.programs:
        note += ", and nvcc of torch's CUDA to build it"
    yield Ability(flash_attn, False, note, FLASH_ATTN)


def compiled(machine: Machine) -> Iterator[Ability]:
    gpu = on_gpu(machine)
    language, names = ("C", ("gcc", "cc", "clang")) if gpu else ("C++", ("g++", "c++", "clang++"))
    compiler = next((name for name in names if name in machine.programs), None)
    note, command = f"with {compiler}", None
    if compiler is None:
        note, command = f"no {language} compiler on the path", COMPILERS
    elif gpu and not machine.python_header:
        note, command = "Python.h is missing, and Triton builds a stub against it", HEADER
    for name in ("engine.compile=true", "eval.step=compiled"):
        yield Ability(name, command is None, note, command)
    yield Ability("eval.step=graphed", gpu, "CUDA graphs" if gpu else "CUDA graphs need CUDA")


def operators(machine: Machine) -> Iterator[Ability]:
    left = [one for one in machine.operators if one.locked]
    for one in left:
        note = "a build is under way, or was killed and left a lock that later builds wait for"
        yield Ability(f"operator {one.name}", False, note, f"rm {one.folder}/lock")
    if not left:
        built = [one.name for one in machine.operators if one.built]
        note = f"built: {', '.join(built)}" if built else "none built"
        yield Ability("DeepSpeed's operators", True, f"{note}; Eyrie's own settings need none")


def served(machine: Machine) -> Iterator[Ability]:
    yield Ability("launch.export", True, "all formats")
    vllm = machine.vllm
    if vllm is not None and vllm.version is not None:
        yield Ability("launch.serve_check", True, f"vLLM {vllm.version} in {vllm.python}")
    else:
        yield Ability("launch.serve_check", False, "no Python with vLLM", "bash launch/vllm_env.sh")


def launched(machine: Machine) -> Iterator[Ability]:
    missing = [package for package in machine.sweep if not package.fits]
    names = ", ".join(package.name for package in missing)
    note = f"{names} not installed" if missing else "Hydra's launchers are there"
    command = f"{INSTALL} -e '.[sweep]'" if missing else None
    yield Ability("sweeps side by side", not missing, note, command)
    slurm = "sbatch" in machine.programs
    yield Ability("launch/slurm/", slurm, "sbatch is there" if slurm else "no sbatch on the path")
