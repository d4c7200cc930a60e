"""What a training took: parameters, steps, FLOPs and seconds, as runs/NAME/training.json."""

import json
from dataclasses import dataclass
from pathlib import Path

from conf.runtime import RankInfo, plain, write_atomically

FILE = "training.json"


@dataclass(frozen=True)
class Spent:
    """Of a draft that is counted and not trained, parameters and steps are 0."""

    trained: int  # parameters
    steps: int  # of the whole training
    flops: float | None  # of them, as models/flops.py counts; None: no budget asked for it
    seconds: float  # of the steps timed, held-out acceptance and checkpoints apart
    timed: int  # steps of the start that came to the end; fewer than all after a resumption

    @property
    def whole_seconds(self) -> float:
        """As if the steps before a resumption took as long as those after it."""
        return self.seconds * self.steps / self.timed if self.timed else self.seconds

    def save(self, folder: Path, ranks: RankInfo) -> None:
        """By the first rank. A start that found no step left to do keeps the note of the one that
        did them."""
        if ranks.is_main and (self.timed or not self.steps):
            write_atomically(folder / FILE, json.dumps(plain(self), indent=2) + "\n")
