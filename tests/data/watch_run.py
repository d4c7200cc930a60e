"""Run under torchrun by test_watch.py: two ranks, of which the second does as argv says."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from conf.compose import sentence_on_error
from conf.runtime import RankInfo
from conf.schema import ConfigError
from data.distributed import barrier, setup, shutdown
from data.watch import Watch


def main(fault: str, minutes: float) -> None:
    ranks = RankInfo.from_env()
    with Watch(ranks, minutes):
        setup(torch.device("cpu"))
        barrier()
        if ranks.is_main and fault == "alone":  # rank 0 works for longer than the timeout
            end = time.monotonic() + 90 * minutes
            while time.monotonic() < end:
                sum(range(1000))
        if not ranks.is_main and fault == "hang":
            time.sleep(1000)
        if not ranks.is_main and fault == "refuse":
            raise ConfigError("knob=1: cannot be; try knob=2")
        barrier()
    shutdown()


if __name__ == "__main__":
    with sentence_on_error():
        main(sys.argv[1], float(sys.argv[2]))
