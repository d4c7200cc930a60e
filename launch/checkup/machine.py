"""What a machine has, as far as Eyrie cares: facts alone; launch/checkup/abilities.py judges."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    capability: str  # compute capability, as 9.0


@dataclass(frozen=True)
class Driver:
    """NVIDIA's, with the GPUs that it shows."""

    version: str
    cuda: str  # the newest CUDA that it runs
    gpus: list[Gpu]


@dataclass(frozen=True)
class Torch:
    version: str
    cuda: str | None  # that it was built for; None: a build for CPUs
    gpus: int  # that it can use
    nccl: str | None


@dataclass(frozen=True)
class Package:
    name: str
    wanted: str  # as pyproject.toml has it, >=5.24,<6
    installed: str | None
    fits: bool


@dataclass(frozen=True)
class Operator:
    """One of DeepSpeed's compiled parts, or another extension that torch built."""

    name: str
    folder: str
    built: bool
    locked: bool  # a build is under way, or was killed and left its lock


@dataclass(frozen=True)
class Disk:
    folder: str
    free_gb: float
    write_mbs: float | None  # megabytes a second, onto the disk; None: it cannot be written
    read_mbs: float | None
    problem: str | None


@dataclass(frozen=True)
class Vllm:
    python: str  # the interpreter asked
    version: str | None  # None: it has no vLLM


@dataclass(frozen=True)
class Machine:
    python: str
    cores: int  # that this process may use
    memory_gib: float  # that this process may use
    driver: Driver | None
    torch: Torch | None
    packages: list[Package]  # that every job needs
    flash_attn: str | None
    sweep: list[Package]  # the launchers of the extra
    operators: list[Operator]
    programs: list[str]  # on the path: compilers, Slurm's commands
    python_header: bool  # Python.h, against which torch.compile builds its stubs
    disk: Disk  # below run.cache
    vllm: Vllm | None  # None: no interpreter is named
