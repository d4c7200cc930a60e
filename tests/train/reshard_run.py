"""Run under torchrun by test_reshard.py: some steps from a checkpoint of any number of ranks.

argv: folder first_step end_step former_ranks job ...
Loads folder/<job> when former_ranks > 0, saves there, writes folder/<job>-<end>.json.
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_run import DEVICE, Spec, build

from conf.runtime import RankInfo
from data.distributed import barrier, setup, shutdown

if __name__ == "__main__":
    setup(DEVICE)
    ranks = RankInfo.from_env()
    folder, first, end, former = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    for word in sys.argv[5:]:
        job = build(Spec.of(word), ranks)
        place = folder / word.replace(":", "_")
        if former:
            job.engine.load(place, former)
        steps = job.train(range(first, end))
        barrier()
        if ranks.is_main:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        barrier()
        job.engine.save(place)
        found = {"steps": steps, "checksum": job.checksum()}
        if ranks.is_main:
            place.with_suffix(f".{end}.json").write_text(json.dumps(found))
    shutdown()
