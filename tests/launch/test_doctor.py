"""The doctor: made-up machines, what is said of them, and the probes on texts and folders."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import load_config
from conf.schema import Stage
from launch import doctor
from launch.checkup import abilities as judged
from launch.checkup import probes
from launch.checkup.abilities import Ability, abilities
from launch.checkup.machine import Disk, Driver, Gpu, Machine, Operator, Package, Torch, Vllm
from launch.checkup.smoke import command, problem_of, smoke, write_rows
from models.kernels import FLASH_ATTN_VERSION

ROOT = Path(__file__).resolve().parents[2]
H100 = Gpu("NVIDIA H100 80GB HBM3", 79.6, "9.0")
CLUSTER = Machine(
    python="3.12.4",
    cores=96,
    memory_gib=1800.0,
    driver=Driver("580.65.06", "13.0", [H100] * 8),
    torch=Torch("2.13.0+cu130", "13.0", 8, "2.28.3"),
    packages=[Package("torch", ">=2.13,<2.14", "2.13.0", True)],
    flash_attn="2.8.3.post2",
    sweep=[Package("hydra-submitit-launcher", ">=1.2,<2", "1.2.0", True)],
    operators=[],
    programs=["gcc", "g++", "nvcc", "sbatch", "srun"],
    python_header=True,
    disk=Disk("/scratch", 9000.0, 2000.0, 3000.0, None),
    vllm=Vllm("/opt/vllm/bin/python", "0.32.0"),
)
LAPTOP = replace(
    CLUSTER,
    driver=None,
    torch=Torch("2.13.0+cpu", None, 0, None),
    flash_attn=None,
    programs=["gcc", "g++"],
    vllm=None,
)


def of(machine: Machine, name: str) -> Ability:
    (found,) = [one for one in abilities(machine) if one.name == name]
    return found


def failing(machine: Machine) -> set[str]:
    return {one.name for one in abilities(machine) if not one.works}


# ---- what works where -----------------------------------------------------------------------


def test_a_whole_cluster_node_does_everything():
    assert failing(CLUSTER) == set()
    assert not [one.command for one in abilities(CLUSTER) if one.command]
    assert of(CLUSTER, "several GPUs").note == "NCCL 2.28.3"


def test_a_laptop_runs_the_job_on_its_cores():
    assert failing(LAPTOP) == {
        "run.device=cuda",
        "capture.backend=vllm",
        "engine.attention=flash_attn",
        "eval.step=graphed",
        "launch.serve_check",
        "launch/slurm/",
    }
    assert all(one.works for one in abilities(LAPTOP) if one.needed)
    assert of(LAPTOP, "launch.serve_check").command == "bash launch/vllm_env.sh"


@pytest.mark.parametrize(
    ("change", "name", "note", "command"),
    [
        ({"python": "3.10.12"}, "Python", "3.11 or later", "PYTHON=/path"),
        ({"disk": Disk("/full", 0.0, None, None, "No space left")}, "run.cache", "No space", "--c"),
        (
            {"packages": [Package("torch", ">=2.13,<2.14", None, False)]},
            "torch",
            "not installed",
            f"{judged.INSTALL} torch==2.13.0",
        ),
        (
            {"packages": [Package("transformers", ">=5.24,<6", "4.57.1", False)]},
            "transformers",
            "4.57.1 is installed; transformers>=5.24,<6 is needed",
            f"{judged.INSTALL} -e .",
        ),
    ],
)
def test_what_every_job_needs_comes_first_and_alone(change, name: str, note: str, command: str):
    machine = replace(CLUSTER, **change)
    found = abilities(machine)
    assert all(one.needed for one in found) and failing(machine) == {name}
    assert note in of(machine, name).note and command in (of(machine, name).command or "")


def test_torch_without_a_gpu_comes_from_the_index_for_cpus():
    missing = [Package("torch", ">=2.13,<2.14", None, False)]
    machine = replace(LAPTOP, packages=missing, torch=None)
    assert (of(machine, "torch").command or "").endswith(judged.CPU_INDEX)


@pytest.mark.parametrize(
    ("torch", "driver", "note", "command"),
    [
        (Torch("2.13.0+cpu", None, 0, None), "13.0", "a build for CPUs", "--force-reinstall"),
        (Torch("2.13.0", "13.0", 0, None), "12.4", "runs CUDA up to 12.4", None),
        (Torch("2.13.0", "13.0", 0, None), "13.0", "cannot use the GPUs", "torch.cuda.init"),
    ],
)
def test_gpus_that_torch_does_not_see(torch: Torch, driver: str, note: str, command: str | None):
    machine = replace(CLUSTER, torch=torch, driver=Driver("550", driver, [H100]))
    found = of(machine, "run.device=cuda")
    assert not found.works and note in found.note
    assert found.command is None if command is None else command in (found.command or "")


def test_hidden_gpus_are_counted():
    machine = replace(CLUSTER, torch=Torch("2.13.0", "13.0", 2, "2.28.3"))
    assert of(machine, "run.device=cuda").note.startswith("2 GPUs of 8; CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("change", "lost", "command"),
    [
        ({"flash_attn": None}, {"engine.attention=flash_attn"}, judged.FLASH_ATTN),
        ({"flash_attn": "2.6.3"}, {"engine.attention=flash_attn"}, judged.FLASH_ATTN),
        (
            {"driver": Driver("580", "13.0", [H100, Gpu("Tesla V100", 32.0, "7.0")])},
            {"engine.attention=torch_flash", "engine.attention=flash_attn"},
            None,
        ),
        (
            {"programs": ["nvcc", "g++", "sbatch"]},  # kernels are launched by a stub in C
            {"engine.compile=true", "eval.step=compiled"},
            judged.COMPILERS,
        ),
        ({"python_header": False}, {"engine.compile=true", "eval.step=compiled"}, judged.HEADER),
        ({"vllm": Vllm("/v/python", "0.17.1")}, {"capture.backend=vllm"}, "/v/python -m pip"),
        (
            {"vllm": Vllm("/v/python", None)},
            {"capture.backend=vllm", "launch.serve_check"},
            "bash launch/vllm_env.sh",
        ),
        (
            {"sweep": [Package("hydra-submitit-launcher", ">=1.2,<2", None, False)]},
            {"sweeps side by side"},
            "-e '.[sweep]'",
        ),
        ({"programs": ["gcc", "g++", "nvcc"]}, {"launch/slurm/"}, None),
        (
            {"operators": [Operator("cpu_adam", "/x/cpu_adam", False, True)]},
            {"operator cpu_adam"},
            "rm /x/cpu_adam/lock",
        ),
    ],
)
def test_one_thing_missing_costs_what_needs_it(change, lost: set[str], command: str | None):
    machine = replace(CLUSTER, **change)
    assert failing(machine) == lost
    ways = [one.command for one in abilities(machine) if one.command]
    assert any(command in way for way in ways) if command else not ways


def test_on_a_cpu_compiling_takes_another_compiler():
    assert of(replace(LAPTOP, programs=["gcc"]), "engine.compile=true").command == judged.COMPILERS
    assert of(replace(LAPTOP, python_header=False), "engine.compile=true").works


def test_commands_name_the_versions_of_the_project():
    constraints = (ROOT / "launch" / "constraints.txt").read_text()
    assert f"\ntorch=={judged.TORCH}\n" in constraints
    pinned = re.search(r"flash-attn==(\S+)", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None and f"flash-attn=={pinned[1]} " in judged.FLASH_ATTN
    assert judged.at_least(pinned[1], FLASH_ATTN_VERSION)
    assert f"vllm >= {judged.VLLM_CAPTURES}" in (ROOT / "conf" / "stage_rules.py").read_text()
    wanted = re.search(r'requires-python = ">=(\S+)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None and wanted[1] == judged.OLDEST_PYTHON


def test_versions_are_numbers():
    assert judged.at_least("2.10.0", "2.7.0") and not judged.at_least("2.7", "2.10")
    assert judged.at_least("2.8.3.post2", "2.8.3") and not judged.at_least(None, "0")


# ---- probes ---------------------------------------------------------------------------------


def test_nvidia_smi_is_read():
    listing = "NVIDIA H100 80GB HBM3, 81559 MiB, 9.0, 580.65.06\n" * 2
    driver = probes.driver_of(listing, "| Driver Version: 580.65.06    CUDA Version: 13.0  |")
    assert driver is not None and (driver.version, driver.cuda) == ("580.65.06", "13.0")
    assert [round(gpu.memory_gib) for gpu in driver.gpus] == [80, 80]
    assert driver.gpus[0].capability == "9.0"
    assert probes.driver_of("", "") is None
    assert probes.driver_of("No devices were found\n", "") is None


def test_the_memory_is_that_of_the_control_group():
    meminfo = "MemTotal:       33554432 kB\nMemFree: 1 kB\n"
    assert probes.memory_gib(meminfo, "max\n") == 32
    assert probes.memory_gib(meminfo, f"{8 << 30}\n") == 8
    assert probes.memory_gib(meminfo, f"{64 << 30}\n") == 32
    assert probes.memory_gib(meminfo, "") == 32


@pytest.mark.parametrize(
    ("line", "version", "fits"),
    [
        ("torch>=2.13,<2.14", "2.13.0+cu130", True),
        ("torch>=2.13,<2.14", "2.14.0", False),
        ("transformers>=5.24,<6", None, False),
        ("pyarrow>=21", "26.0.1", True),
    ],
)
def test_a_requirement_is_compared(line: str, version: str | None, fits: bool):
    package = probes.package_of(line, lambda _name: version)
    assert package.fits is fits and package.name + package.wanted == line


def test_builds_and_their_locks_are_found(tmp_path: Path):
    for name in ("py312_cu130/cpu_adam/cpu_adam.so", "py312_cu130/fused_adam/lock"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = {one.name: (one.built, one.locked) for one in probes.operators_in([tmp_path])}
    assert found == {"cpu_adam": (True, False), "fused_adam": (False, True)}


def test_the_disk_is_tried_and_left_as_it_was(tmp_path: Path):
    disk = probes.try_disk(tmp_path / "cache" / "deep", 2)
    assert disk.folder == str(tmp_path) and disk.problem is None
    assert (disk.write_mbs or 0) > 0 and (disk.read_mbs or 0) > 0
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_not_filled(tmp_path: Path):
    disk = probes.try_disk(tmp_path, 1 << 40)
    assert disk.write_mbs is None and "are free" in (disk.problem or "")


def test_a_program_that_is_not_there_says_nothing():
    assert probes.answer(["no-such-program-anywhere"]) == ""
    assert probes.answer([sys.executable, "-c", "print('x'); raise SystemExit(1)"]) == ""


def test_vllm_is_asked_in_its_own_python(tmp_path: Path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.32.0\n")
    python.chmod(0o755)
    monkeypatch.setenv("EYRIE_VLLM_PYTHON", str(python))
    assert probes.ask_vllm(probes.vllm_python()) == Vllm(str(python), "0.32.0")
    assert probes.ask_vllm(Path("/no/such/python")) == Vllm("/no/such/python", None)


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "code"), [(CLUSTER, 0), (LAPTOP, 0)])
def test_the_page(machine: Machine, code: int, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *_: machine)
    assert doctor.main([]) == code
    out = capsys.readouterr().out
    assert out.count("NVIDIA H100") == (8 if machine is CLUSTER else 0)
    assert ("To get the rest" in out) == (machine is LAPTOP)


def test_what_every_job_needs_decides_the_exit_code(monkeypatch, capsys):
    broken = replace(CLUSTER, packages=[Package("deepspeed", ">=0.19.8,<0.20", None, False)])
    monkeypatch.setattr(doctor, "examine", lambda *_: broken)
    assert doctor.main(["--smoke"]) == 1
    out = capsys.readouterr().out
    assert "Every job needs deepspeed" in out and "Smoke run" not in out
    assert "engine.attention" not in out


def test_it_starts_without_any_package_of_ours(tmp_path: Path):
    """-I -S: Python alone, as on a machine where nothing is installed."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r});"
        f"from launch.doctor import main; sys.exit(main(['--cache', {str(tmp_path)!r},"
        "'--disk-mib', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "NO  torch" in done.stdout and "torch==2.13.0" in done.stdout
    assert "Every job needs torch, transformers" in done.stdout


@pytest.mark.parametrize("words", [["--disk-mib", "0"], ["--ranks", "0"], ["--ranks", "x"]])
def test_bad_options_are_one_sentence(words: list[str], capsys):
    with pytest.raises(SystemExit) as end:
        doctor.main(words)
    assert end.value.code == 2 and capsys.readouterr().err.count("\n") == 1


# ---- the smoke run --------------------------------------------------------------------------


def finished_run(run: Path, identical: int) -> None:
    for name in ("best/draft.json", "export/vllm/config.json"):
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text("{}")
    (run / "eval").mkdir()
    lossless = {"checked": 2, "identical": identical}
    (run / "eval" / "report.json").write_text(json.dumps({"lossless": lossless}))


def test_a_smoke_run_is_judged_by_what_it_leaves(tmp_path: Path):
    good, lossy, cut = (tmp_path / name for name in ("good", "lossy", "cut"))
    finished_run(good, 2)
    finished_run(lossy, 1)
    finished_run(cut, 2)
    (cut / "export" / "vllm" / "config.json").unlink()
    assert problem_of(good, 0) is None
    assert problem_of(good, 1) == "torchrun ended with exit code 1"
    assert "1 of 2 answers" in (problem_of(lossy, 0) or "")
    assert "config.json is missing" in (problem_of(cut, 0) or "")


def test_the_words_of_the_smoke_run_are_a_configuration(tmp_path: Path):
    write_rows(tmp_path)
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "config.json").touch()
    words = command(tmp_path, 2)
    at = words.index(str(ROOT / "train" / "main.py"))
    assert words[1:at] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cfg = load_config(words[at + 1 :])
    assert cfg.optim.packs_per_step == 4 and cfg.stages == list(Stage)
    assert Path(cfg.run.cache).parent == Path(cfg.run.root).parent == tmp_path


@pytest.mark.slow
def test_the_smoke_run(tmp_path: Path):
    run = smoke(tmp_path, ranks=1)
    assert run.problem is None, run.tail
