"""Run by test_online.py: jobs one after the other, each a fork, so that imports are paid once.

argv: a file with a list of jobs, each a list of overrides. A job may be preceded by an object with
``copy`` and ``to``, run folders, and ``without``, names in the copy that are to be missing.
"""

import json
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from conf.compose import load_config
from train.stages import run_stages


def run(words: list[str]) -> None:
    child = os.fork()
    if child == 0:
        run_stages(load_config(words))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, words


def copy(wish: dict) -> None:
    shutil.copytree(wish["copy"], wish["to"])
    for name in wish["without"]:
        path = Path(wish["to"]) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        copy(job) if isinstance(job, dict) else run(job)
