"""kill -9 at any moment costs the steps since the last checkpoint, and nothing else."""

import json
from pathlib import Path

RUN = str(Path(__file__).with_name("kill_run.py"))


def trained(place, name: str, kills: int, torn: int) -> dict:
    words = place.words(name, "stages=[train]", "log.save_every=2", "log.keep=3")
    with place.start(["7", str(kills), str(torn), *words], program=RUN) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def test_killed_at_any_moment_the_run_ends_as_if_never_killed(place, finished: Path):
    assert trained(place, "quiet", 0, 0)["status"] == 0
    report = trained(place, "restless", 6, 3)
    assert report["status"] == 0
    killed = [kill for kill in report["kills"] if kill["alive"]]
    assert len(killed) >= 5
    assert any(name.startswith(".writing-") for kill in killed for name in kill["left"])
    place.assert_same_training("restless", "quiet")
    names = [path.name for path in (place.run("restless") / "checkpoints").iterdir()]
    assert sorted(names) == [f"step-{step:08d}" for step in (20, 22, 24)]
