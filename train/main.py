"""The entry: compose and judge the configuration, then import torch and run the stages."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # torchrun puts train/ there

from conf.compose import from_command_line, sentence_on_error  # noqa: E402  after the path is right

if __name__ == "__main__":
    with sentence_on_error(alike=True):
        config = from_command_line(sys.argv[1:])
    if config is not None:
        with sentence_on_error():
            from train.stages import run_stages

            run_stages(config)
