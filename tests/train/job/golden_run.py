"""Run by test_golden.py: the job with its samples dealt to steps as a file says.

argv: the file (steps, each a list of sample ids), then the job's overrides.
"""

import json
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from conf.compose import load_config
from data.loader import TrainLoader
from data.reader import ShardReader
from train.stages import run_stages


@cache
def places(reader: ShardReader) -> dict[str, int]:
    """Sample id -> its number in the cache."""
    return {reader.read(index).sample.id: index for index in range(len(reader))}


def main(order: Path, words: list[str]) -> None:
    steps = json.loads(order.read_text())

    def packs_of(loader: TrainLoader, step: int) -> list[list[int]]:
        assert isinstance(loader.source, ShardReader)
        return [[places(loader.source)[name] for name in steps[step]]]

    TrainLoader.packs_of = packs_of
    run_stages(load_config(words))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
