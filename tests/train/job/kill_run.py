"""Run by test_kill.py: the job killed again and again with signal 9, then left to finish.

argv: seed, kills at random moments, kills while a checkpoint is being written, then the job's
overrides. Each life is a fork of a process that has imported everything, so a kill costs no start.
Prints what the kills left, as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from conf.compose import load_config
from conf.runtime import run_dir
from train.stages import run_stages

LONGEST = 3.0  # seconds of one life; a whole training of the tests takes about five


def live(words: list[str]) -> int:
    """A child that runs the job -> its process id."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        run_stages(load_config(words))
        os._exit(0)
    return child


def kill(child: int) -> bool:
    """Whether the child was still alive."""
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(seed: int, kills: int, torn: int, words: list[str]) -> None:
    moments = random.Random(seed)
    checkpoints = run_dir(load_config(words)) / "checkpoints"
    left = []
    for number in range(kills + torn):
        child = live(words)
        if number < kills:
            time.sleep(moments.uniform(0, LONGEST))
        else:
            wait_for_writing(checkpoints, child)
        alive = kill(child)
        names = sorted(path.name for path in checkpoints.glob("*"))
        left.append({"alive": alive, "left": names})
    _, status = os.waitpid(live(words), 0)
    print(json.dumps({"kills": left, "status": status}))  # noqa: T201


def wait_for_writing(checkpoints: Path, child: int) -> None:
    """Return in the middle of a checkpoint: its temporary folder has an unfinished file or two."""
    while not list(checkpoints.glob(".writing-*/engine/*")):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.0005)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
