"""Run under torchrun by test_faults.py: the job, with a fault on one rank at one step.

argv: fault rank step, then the job's overrides. The fault happens in the reduction of that step.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from conf.compose import load_config, sentence_on_error
from conf.runtime import RankInfo
from train import loop
from train.stages import run_stages


def bring_about(fault: str, cache: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        time.sleep(10_000)
    elif fault == "full":  # as a disk that takes no more: a write of this rank's fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    elif fault == "lost":
        for shard in Path(cache).rglob("shards/*.safetensors"):
            shard.unlink()
    else:
        assert fault == "none", fault


def main(fault: str, rank: int, step: int, words: list[str]) -> None:
    cfg = load_config(words)
    usual, calls = loop.row_weights, iter(range(1_000_000))

    def reduction(*arguments):
        now = next(calls)
        if RankInfo.from_env().rank == rank:
            if fault == "slow":
                time.sleep(1.0)
            elif now == step:
                bring_about(fault, cfg.run.cache)
        return usual(*arguments)

    loop.row_weights = reduction
    run_stages(cfg)


if __name__ == "__main__":
    with sentence_on_error():
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
