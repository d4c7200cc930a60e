"""The sbatch files, run with stand-ins for Slurm: what torchrun would get is what Eyrie takes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from conf.compose import load_config
from conf.schema import RunConfig, Stage
from launch.sweep import make_plan, read_options

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "launch" / "slurm"
FILES = sorted(SLURM.glob("*.sbatch"))
SHELL = [*FILES, SLURM / "job.sh", ROOT / "launch" / "environment.sh"]
NODES = ["gpu07", "gpu08", "gpu11"]
STAND_INS = {
    # what srun's options are not is the command of every task; a signal goes on to it, as in Slurm
    "srun": """
        echo "srun $* cores=$SRUN_CPUS_PER_TASK" >>"$SEEN"
        while [[ ${1:-} == -* ]]; do shift; done
        exec "$@"
        """,
    "scontrol": """
        echo "scontrol $*" >>"$SEEN"
        [ "$1" != show ] || printf '%s\\n' $STAND_IN_NODES
        """,
    "torchrun": """
        printf '%s\\0' "$@" >"$WORDS"
        env >"$WORDS.env"
        trap 'exit 1' TERM
        if [ -n "${STAND_IN_WAITS:-}" ]; then touch "$WORDS.up"; sleep 60 >/dev/null 2>&1 & wait; fi
        exit "${STAND_IN_STATUS:-0}"
        """,
    "python": """printf '%s\\0' "$@" >"$WORDS" """,
}
WANTED = ["run.name=x", "draft=eagle3", "ttt=default", "optim.lr=2e-4", "data.max_length=1024"]


class Cluster:
    """A folder of stand-ins, and what they saw."""

    def __init__(self, folder: Path):
        self.folder, self.words_file, self.seen = folder, folder / "words", folder / "seen"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, body in STAND_INS.items():
            path = bin_folder / name
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)
        self.env = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(folder),
            "WORDS": str(self.words_file),
            "SEEN": str(self.seen),
            "STAND_IN_NODES": " ".join(NODES),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "gpu[07-08,11]",
            "SLURM_JOB_NUM_NODES": str(len(NODES)),
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_ON_NODE": "96",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_ARRAY_TASK_MAX": "15",
        }

    def start(self, script: str, *words: str, **more: str) -> subprocess.Popen[str]:
        """As Slurm does: a copy of the file, from a folder that is not the checkout."""
        copy = self.folder / "slurm_script"
        copy.write_text((SLURM / script).read_text())
        return subprocess.Popen(
            ["bash", str(copy), *words],
            cwd=self.folder,
            env={**self.env, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *words: str, code: int = 0, **more: str) -> str:
        with self.start(script, *words, **more) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        return err

    @property
    def words(self) -> list[str]:
        return self.words_file.read_text().split("\0")[:-1]

    def torchrun(self) -> Namespace:
        """The words as torchrun itself reads them."""
        return get_args_parser().parse_args(self.words)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def composed(words: list[str], *running: Stage) -> RunConfig:
    return load_config(words, running)


# ---- the files ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_bash_can_read_them(path: Path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def directives(path: Path) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.M)
    assert len(found) == path.read_text().count("#SBATCH"), "a line that Slurm would not take"
    return dict(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_job_can_be_stopped_and_go_on(path: Path):
    asked = directives(path)
    text = path.read_text()
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.index("#SBATCH") < text.index(commands[0]), "Slurm stops reading at a command"
    assert text.rindex("#SBATCH") < text.index(commands[0])
    assert asked["ntasks-per-node"] == "1"  # torchrun starts the ranks
    assert {"requeue", "exclusive"} <= set(asked) and asked["open-mode"] == "append"
    target, _, warning = asked["signal"].partition("@")
    assert target == "B:TERM"
    grace = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT (\d+)", environment_text())
    assert grace is not None and 30 < int(grace[1]) < int(warning)
    assert "%j" in asked["output"] or "%A-%a" in asked["output"]  # jobs do not share a log


def environment_text() -> str:
    return (ROOT / "launch" / "environment.sh").read_text()


# ---- what they start ------------------------------------------------------------------------


def test_one_node(cluster: Cluster):
    cluster.run("single_node.sbatch", *WANTED, "stages=[prepare,capture]")
    asked = cluster.torchrun()
    assert asked.standalone and asked.nproc_per_node == "4" and asked.max_restarts == 0
    assert (ROOT / asked.training_script) == ROOT / "train" / "main.py"
    cfg = composed(asked.training_script_args)
    assert cfg.run.name == "x" and cfg.optim.lr == 2e-4
    assert cfg.stages == [Stage.prepare, Stage.capture]
    assert "--ntasks-per-node=1" in cluster.seen.read_text()
    assert "cores=96" in cluster.seen.read_text()  # srun alone would give the ranks one core


def test_several_nodes_meet_at_the_first(cluster: Cluster):
    cluster.run("multi_node.sbatch", *WANTED, SLURM_RESTART_COUNT="2", SLURM_CPUS_PER_TASK="64")
    asked = cluster.torchrun()
    assert (asked.nnodes, asked.nproc_per_node, asked.standalone) == ("3", "4", False)
    assert asked.rdzv_backend == "c10d" and asked.rdzv_id == "123456-2"
    host, port = asked.rdzv_endpoint.split(":")
    assert host == NODES[0] and 20000 <= int(port) < 40000
    assert composed(asked.training_script_args).run.name == "x"
    seen = cluster.seen.read_text()
    assert "scontrol show hostnames gpu[07-08,11]" in seen and "cores=64" in seen


def test_two_jobs_on_a_node_take_two_ports(cluster: Cluster):
    ports = []
    for job in ("123456", "123457"):
        cluster.run("multi_node.sbatch", SLURM_JOB_ID=job)
        ports.append(cluster.torchrun().rdzv_endpoint)
    assert ports[0] != ports[1]


def test_an_array_captures_in_parts(cluster: Cluster):
    cluster.run("capture_array.sbatch", *WANTED)
    asked = cluster.torchrun()
    assert asked.module and asked.training_script == "data.capture"
    cfg = composed(asked.training_script_args, Stage.prepare, Stage.capture)
    assert (cfg.capture.part, cfg.capture.parts) == (3, 16)
    assert directives(SLURM / "capture_array.sbatch")["array"] == "0-15"


def test_a_sweep(cluster: Cluster):
    cluster.run("sweep.sbatch", "sweep=ttt_depth", *WANTED)
    assert cluster.words[:2] == ["-m", "launch.sweep"]
    options = read_options(cluster.words[2:])
    assert options.nproc_per_node == 4
    plan = make_plan(options.overrides, options.nproc_per_node)
    assert plan.swept == ["ttt.depth"] and "optim.lr=2e-4" in plan.fixed


def test_words_with_blanks_and_brackets_arrive_whole(cluster: Cluster):
    words = ["eval.stop=['a b','c']", "eval.n_sweep=[1, 2]", "data.path=a*b.jsonl"]
    for script in (path.name for path in FILES):
        cluster.run(script, *words)
        assert cluster.words[-3:] == words


def test_a_node_without_gpus_asks_how_many_ranks(cluster: Cluster):
    del cluster.env["SLURM_GPUS_ON_NODE"]
    for script in (path.name for path in FILES):
        assert "set EYRIE_RANKS" in cluster.run(script, code=2)
        assert not cluster.words_file.exists()
    cluster.run("single_node.sbatch", EYRIE_RANKS="2")
    assert cluster.torchrun().nproc_per_node == "2"


def test_without_an_environment_the_way_out_is_named(cluster: Cluster):
    if (ROOT / ".venv").exists():
        pytest.skip("this checkout has an environment, which the job would take")
    (cluster.folder / "bin" / "torchrun").unlink()
    assert "torchrun: not found" in cluster.run("single_node.sbatch", code=2)


# ---- stopping -------------------------------------------------------------------------------


def test_a_job_that_slurm_stops_is_queued_again(cluster: Cluster):
    with cluster.start("single_node.sbatch", STAND_IN_WAITS="1") as process:
        deadline = time.monotonic() + 60
        while not Path(f"{cluster.words_file}.up").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "queued again" in err
    assert "scontrol requeue 123456" in cluster.seen.read_text()


@pytest.mark.parametrize("status", [0, 1, 2])
def test_a_job_that_ends_by_itself_is_not(cluster: Cluster, status: int):
    cluster.run("single_node.sbatch", code=status, STAND_IN_STATUS=str(status))
    assert "requeue" not in cluster.seen.read_text()


# ---- the environment ------------------------------------------------------------------------


def test_ranks_get_the_environment_and_a_persons_values_win(cluster: Cluster):
    cluster.run("single_node.sbatch", NCCL_DEBUG="INFO")
    got = dict(
        line.split("=", 1) for line in Path(f"{cluster.words_file}.env").read_text().splitlines()
    )
    assert got["NCCL_DEBUG"] == "INFO" and got["OMP_NUM_THREADS"] == "1"
    assert got["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert str(cluster.folder) not in got["TRITON_CACHE_DIR"], "not in the home folder"


def test_every_variable_has_its_reason():
    blocks = environment_text().split("\n\n")
    for block in blocks:
        if re.search(r"^set_default ", block, re.M):
            assert block.startswith("# "), block


def test_the_environment_is_set_in_one_place():
    names = re.findall(r"^set_default (\w+)", environment_text(), re.M)
    assert len(names) == len(set(names)) > 5
    container = ROOT / "launch" / "container" / "Dockerfile"
    for path in [*FILES, SLURM / "job.sh", container]:
        assert not [name for name in names if re.search(rf"\b{name}=", path.read_text())], path


# ---- DeepSpeed's launcher -------------------------------------------------------------------

HOSTFILE = "source launch/slurm/job.sh && hostfile 4 && echo --- && environment_file"


def parsed_hostfile(lines: list[str]) -> dict[str, int]:
    """By the rule of DeepSpeed's launcher: NAME, blanks, slots=N."""
    found = [re.fullmatch(r"(\S+)\s+slots=(\d+)", line) for line in lines]
    assert all(found), lines
    return {match[1]: int(match[2]) for match in found if match is not None}


def test_the_hostfile_names_nodes_and_slots(cluster: Cluster):
    text = subprocess.check_output(["bash", "-c", HOSTFILE], cwd=ROOT, env=cluster.env, text=True)
    hosts, variables = text.split("---\n")
    assert parsed_hostfile(hosts.splitlines()) == dict.fromkeys(NODES, 4)
    assert "OMP_NUM_THREADS=1" in variables.splitlines()
    names = re.findall(r"^set_default (\w+)", environment_text(), re.M)
    assert [line.partition("=")[0] for line in variables.splitlines()] == names


@pytest.mark.slow
def test_deepspeed_reads_the_hostfile_so(cluster: Cluster):
    """Its import takes seconds; its words start the ranks without an argument of its own."""
    hosts = [f"{name} slots=4" for name in NODES]
    check = (
        "import json, sys; from deepspeed.launcher import runner;"
        "args = runner.parse_args(sys.argv[2:]);"
        "pool = runner._parse_hostfile(json.loads(sys.argv[1]));"
        "print('ANSWER', json.dumps([dict(pool), args.no_local_rank, args.user_script,"
        " args.user_args]))"
    )
    line = re.search(r"^ *deepspeed (.*)$", (ROOT / "docs" / "cluster.md").read_text(), re.M)
    assert line is not None
    words = [word for word in line[1].split() if word != "…"]
    out = subprocess.check_output(
        [sys.executable, "-c", check, json.dumps(hosts), *words], text=True, env=os.environ
    )
    answer = json.loads(out.split("ANSWER ")[1].splitlines()[0])
    assert answer[0] == parsed_hostfile(hosts) and answer[1] is True
    assert answer[2] == "train/main.py" and composed(answer[3]).run.name == "llama70b"
