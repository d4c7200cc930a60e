"""Training on states that the verifier computes as they are needed: the cache's curve, no cache."""

import json
from pathlib import Path

import pytest

STEPS = 10
WORDS = f"""
    stages=[prepare,capture,train] engine.precision=float32 capture.dtype=float32
    optim.max_steps={STEPS} log.every=1 log.valid_every=5 log.save_every=5
    """.split()
LAST = f"checkpoints/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def runs(place, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Runs ``cached``, ``online``, and ``resumed``: online, stopped at step 5. -> What was said."""
    online = [*WORDS, "capture.mode=online"]
    jobs = [
        place.words("cached", *WORDS, cache="cache_exact"),
        place.words("online", *online, cache="cache_online"),
        {
            "copy": str(place.run("online")),
            "to": str(place.run("resumed")),
            "without": [LAST, "stages.json"],
        },
        place.words("resumed", *online, cache="cache_online"),
    ]
    wishes = tmp_path_factory.mktemp("online") / "jobs.json"
    wishes.write_text(json.dumps(jobs))
    run = Path(__file__).with_name("online_run.py")
    with place.start([str(wishes)], program=str(run)) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return out


def test_the_curve_is_the_caches(place, runs: str):
    cached, online = place.lines("cached"), place.lines("online")
    assert len(cached) == len(online) >= STEPS
    for one, other in zip(cached, online, strict=True):
        assert one["step"] == other["step"]
        if "loss" in one:
            assert other["loss_by_depth"] == pytest.approx(one["loss_by_depth"], rel=1e-5, abs=1e-7)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert one.get("held_out") == other.get("held_out")
    assert sum("held_out" in row for row in online) == 2


def test_nothing_of_the_states_is_on_the_disk(place, runs: str):
    names = [path.name for path in (place.folder / "cache_online").iterdir()]
    assert [name for name in names if not name.startswith("prepare-")] == []
    assert list((place.folder / "cache_exact").glob("capture-*/manifest.json"))
    assert "capture: skipped, capture.mode=online" in runs


def test_the_verifier_is_frozen_counted_and_in_no_checkpoint(place, runs: str):
    assert place.digests(place.verifier) == place.verifier_files
    assert "frozen and " in (place.run("online") / "train.log").read_text()
    sizes = [
        sum(path.stat().st_size for path in (place.run(name) / LAST / "engine").iterdir())
        for name in ("cached", "online")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


def test_a_stopped_run_goes_on(place, runs: str):
    assert "resumed at step 5" in (place.run("resumed") / "train.log").read_text()
    place.assert_same_training("resumed", "online")


@pytest.mark.slow
def test_two_ranks_compute_their_own_packs(place, runs: str):
    words = place.words("online_pair", *WORDS, "capture.mode=online", cache="cache_online")
    place.finish(words, ranks=2)
    for one, two in zip(place.lines("online"), place.lines("online_pair"), strict=True):
        assert one["step"] == two["step"]
        if "loss" in one:
            assert two["loss_by_depth"] == pytest.approx(one["loss_by_depth"], rel=1e-4, abs=1e-6)
            assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
